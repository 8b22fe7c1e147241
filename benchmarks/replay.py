"""Long runs of small models: what replaying an optimizer over many steps costs its readers.

`python -m benchmarks.replay --steps 20000`: an MLP 16-32-4 and AdamW, batches of 8; wall-clock
seconds of each read of a run opened anew, medians over some turns. `--seconds cpu` has those of the
processor, where others are busy. `--run` keeps the run in a folder, or reads the one that is there,
so that two versions can be timed in turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

import dualform
from benchmarks.timing import seconds

SAMPLES, BATCH = 1000, 8
READS: dict[str, Callable[[dualform.Run], object]] = {
    "audit": lambda run: run.audit(),
    "state_dict": lambda run: run.at(run.steps - 1).state_dict(),
    "subtract": lambda run: run.subtract(run.ids[:2]),
}


def record(path: Path, steps: int) -> None:
    """A run of so many steps, whose last one alone is kept."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    x = torch.randn(SAMPLES, 16)
    y = (x @ torch.randn(16, 4)).argmax(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with dualform.record(model, optimizer, path) as recorder:
        for ids in torch.randint(SAMPLES, (steps, BATCH)):
            recorder.samples(ids)
            nn.functional.cross_entropy(model(x[ids]), y[ids]).backward()
            optimizer.step()
            optimizer.zero_grad()


def opened(read: Callable[[dualform.Run], object], path: Path) -> object:
    """A read of the run, opened anew."""
    return read(dualform.open(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--run", type=Path, help="a folder for the run, which stays")
    options = parser.parse_args()
    clock = time.perf_counter if options.seconds == "wall" else time.process_time
    with tempfile.TemporaryDirectory() as folder:
        path = options.run or Path(folder) / "run"
        if not path.exists():
            record(path, options.steps)
        for name, read in READS.items():
            works = [partial(opened, read, path)] * options.turns
            took = [seconds(work, clock) for work in works]
            print(f"{name}: {statistics.median(took):.2f} s", flush=True)


if __name__ == "__main__":
    main()
