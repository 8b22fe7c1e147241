"""Peak memory of recording and reading as a run grows: `python -m benchmarks.memory`.

Each size runs in a process of its own; what is printed is how far its peak lies above the same
training without recording, and above opening the run without reading it.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import dualform
from benchmarks.recording import MODELS, make_step

SIZES = (250, 500, 1000)


def peak() -> int:
    """Peak resident memory of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def train(path: Path, steps: int, recorded: bool) -> None:
    """784-800-800-10, batch 64: about 1 MB a step."""
    step, model, optimizer = make_step(MODELS["784-800-800-10"], 64, "cpu")
    if not recorded:
        for _ in range(steps):
            step()
        return
    with dualform.record(model, optimizer, path):
        for _ in range(steps):
            step()


def read(path: Path, asked: bool) -> None:
    """Every sample's contribution to 16 queries at the first layer."""
    run = dualform.open(path)
    _, model, _ = make_step(MODELS["784-800-800-10"], 64, "cpu")
    model.load_state_dict(run.state_dict())
    spotlight = run.spotlight(model, torch.randn(16, 784))
    if asked:
        spotlight["0"].samples()
        spotlight["0"].rows(100)


def measure(*arguments: str) -> int:
    """The peak of a process that does one of the above."""
    command = [sys.executable, "-m", "benchmarks.memory", *arguments]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        for steps in SIZES:
            path = str(folder / f"run{steps}")
            plain = measure("train", path, str(steps), "plain")
            recorded = measure("train", path, str(steps), "recorded")
            opened = measure("read", path, str(steps), "plain")
            scanned = measure("read", path, str(steps), "asked")
            size = dualform.open(path).nbytes / 1e6
            print(
                f"{steps:5} steps, {size:6,.0f} MB on disk: recording +{recorded - plain} MB, "
                f"reading +{scanned - opened} MB",
                flush=True,
            )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        verb, where, count, kind = sys.argv[1:]
        if verb == "train":
            train(Path(where), int(count), kind == "recorded")
        else:
            read(Path(where), kind == "asked")
        print(peak())
    else:
        main()
