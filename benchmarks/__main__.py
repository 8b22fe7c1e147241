"""Runs every benchmark, one after the other: `python -m benchmarks`."""

import subprocess
import sys

for name in ("recording", "architectures", "ledger", "reading", "memory", "families"):
    print(f"— {name}", flush=True)
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
