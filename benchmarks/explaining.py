"""Seconds for `explain` and `influence` over 60,000 samples: `python -m benchmarks.explaining`.

A network of two layers learns random data for some epochs; then it is asked about a few queries.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import dualform
from dualform.read import Run

MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


def network(widths: list[int]) -> nn.Module:
    """A network with one hidden layer, the same each time."""
    torch.manual_seed(0)
    inputs, hidden, outputs = widths
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def inputs_of(samples: int, width: int) -> torch.Tensor:
    """Random inputs, the same each time."""
    return torch.randn(samples, width, generator=torch.Generator().manual_seed(1))


def record(path: Path, model: nn.Module, x: torch.Tensor, epochs: int, optimizer: str) -> None:
    """Trains by batches of 500."""
    made = MAKE[optimizer](model.parameters())
    y = (x[:, 0] > 0).long()
    with dualform.record(model, made, path) as recorder:
        for _ in range(epochs):
            for ids in torch.randperm(len(x)).split(500):
                recorder.samples(ids)
                F.cross_entropy(model(x[ids]), y[ids]).backward()
                made.step()
                made.zero_grad()


def timed(what: str, call: Callable[[], Any]) -> None:
    """Prints how long a call takes, and the most memory the process has had.

    Processor time counts where others are busy on the same machine.
    """
    began, used = time.perf_counter(), time.process_time()
    call()
    seconds, used = time.perf_counter() - began, time.process_time() - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"{what}: {seconds:.1f} s, {used:.1f} s of processors, peak memory {peak:.1f} GB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs=3, default=[128, 256, 4])
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--epochs", type=int, default=32)
    parser.add_argument("--optimizer", choices=sorted(MAKE), default="SGD")
    parser.add_argument("--queries", type=int, nargs="*", default=[1, 2, 8, 64])
    parser.add_argument("--folder", type=Path, help="keeps the run, or reads one that is there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        path = options.folder or Path(temporary) / "run"
        model, x = network(options.widths), inputs_of(options.samples, options.widths[0])
        if not path.exists():
            timed("recording", lambda: record(path, model, x, options.epochs, options.optimizer))
        measure(dualform.open(path), model, x, options.queries)


def measure(run: Run, model: nn.Module, x: torch.Tensor, queries: list[int]) -> None:
    """Times both reads, for some numbers of queries."""
    model.load_state_dict(run.state_dict())
    busy = os.getloadavg()[0]
    print(f"{run.nbytes / 1e9:.1f} GB, {len(run.ids):,} samples, load {busy:.1f}")
    for count in queries:
        timed(f"explain {count}", lambda count=count: run.explain(model, x[:count]))
    for count in queries:
        timed(f"influence {count}", lambda count=count: run.influence(model, x[:count]))


if __name__ == "__main__":
    main()
