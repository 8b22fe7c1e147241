"""Runs every benchmark, one after the other: `python -m benchmarks`."""

import subprocess
import sys

NAMES = "recording least architectures optimizers ledger reading memory attention ridge families explorer"
for name in NAMES.split():
    print(f"— {name}", flush=True)
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
