"""Runs every benchmark, one after the other: `python -m benchmarks`."""

import subprocess
import sys

RECORDED = "recording distributed least architectures optimizers ledger reading explaining memory"
OTHERS = "ray_reading owners attention diagnose hyper ridge families explorer"
for name in [*RECORDED.split(), *OTHERS.split()]:
    print(f"— {name}", flush=True)
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
