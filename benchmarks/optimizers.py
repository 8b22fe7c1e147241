"""What an optimizer costs its readers: `python -m benchmarks.optimizers [--only SOAP]`.

An MLP 64-128-10, 200 recorded steps of 32 samples; processor seconds of each read, on one thread,
of a run opened anew: medians over some turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import dualform

SAMPLES, STEPS, BATCH, QUERIES = 1000, 200, 32, 8
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "Shampoo": lambda p: import_module("pytorch_optimizer").Shampoo(p, lr=0.5, matrix_eps=1e-2),
    "SOAP": lambda p: import_module("pytorch_optimizer").SOAP(p, lr=3e-3),
}
READS: dict[str, Callable[[dualform.Run, nn.Module, Tensor], object]] = {
    "audit": lambda run, model, x: run.audit(),
    "spotlight": lambda run, model, x: [r.samples() for r in run.spotlight(model, x).values()],
    "explain": lambda run, model, x: run.explain(model, x),
    "influence": lambda run, model, x: run.influence(model, x),
    "subtract": lambda run, model, x: run.subtract(run.ids[:2]),
}


def recorded(optimizer: str, path: Path) -> tuple[nn.Module, Tensor]:
    """A run, its model, and its inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    x = torch.randn(SAMPLES, 64)
    y = (x @ torch.randn(64, 10)).argmax(1)
    made = OPTIMIZERS[optimizer](model.parameters())
    with dualform.record(model, made, path) as recorder:
        for ids in torch.randperm(STEPS * BATCH).remainder(SAMPLES).view(-1, BATCH):
            recorder.samples(ids)
            nn.functional.cross_entropy(model(x[ids]), y[ids]).backward()
            made.step()
            made.zero_grad()
    return model, x


def seconds(work: Callable[[], object], turns: int) -> float:
    found = []
    for _ in range(turns):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return statistics.median(found)


def report(optimizer: str, turns: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        model, x = recorded(optimizer, path)
        for name, read in READS.items():

            def work(read: Callable[..., object] = read) -> None:
                read(dualform.open(path), model, x[:QUERIES])

            print(f"{optimizer}, {name}: {seconds(work, turns):.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", default="", help="a part of the optimizers' names")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for optimizer in OPTIMIZERS:
        if options.only in optimizer:
            report(optimizer, options.turns)


if __name__ == "__main__":
    main()
