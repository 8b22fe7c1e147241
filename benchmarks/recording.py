"""A training step with recording against one without: `python -m benchmarks.recording`."""

from __future__ import annotations

import argparse
import itertools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import dualform
from benchmarks.timing import Comparison, compare

MODELS = {"64-128-10": (64, 128, 10), "784-800-800-10": (784, 800, 800, 10)}


def make_step(widths: tuple[int, ...], batch: int, device: str) -> tuple[Callable[[], None], ...]:
    """A model's training step on fresh data from a small pool, and the model and optimizer."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    model = nn.Sequential(*layers[:-1]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    xs = torch.randn(16, batch, widths[0], device=device)
    ys = torch.randint(0, widths[-1], (16, batch), device=device)
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        loss = F.cross_entropy(model(xs[count % 16]), ys[count % 16])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer


def overhead(
    widths: tuple[int, ...], batch: int, device: str, steps: int, turns: int, folder: str | None
) -> tuple[Comparison, int, float]:
    """Interleaves two identical trainings, one recorded: the ratio, bytes a step, remainder."""
    plain, *_ = make_step(widths, batch, device)
    recorded, model, optimizer = make_step(widths, batch, device)
    ids = torch.arange(batch)
    path = Path(tempfile.mkdtemp(dir=folder)) / "run"

    def sync() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    def run_plain() -> None:
        for _ in range(steps):
            plain()
        sync()

    with dualform.record(model, optimizer, path) as recorder:

        def run_recorded() -> None:
            for _ in range(steps):
                recorder.samples(ids)
                recorded()
            sync()

        run_plain()
        run_recorded()
        result = compare(run_recorded, run_plain, turns)
        total = recorder.step
    run = dualform.open(path, device)
    size, remainder = run.nbytes // total, run.audit().remainder
    shutil.rmtree(path.parent)
    return result, size, remainder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[64])
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--folder", default=None, help="where the runs are written")
    options = parser.parse_args()
    for name, widths in MODELS.items():
        for batch in options.batches:
            steps = 300 if options.device != "cpu" or widths[0] < 100 else 12
            result, size, remainder = overhead(
                widths, batch, options.device, steps, options.turns, options.folder
            )
            print(
                f"{name}, batch {batch}: step × {result}, {result.reference / steps * 1e6:,.0f} µs "
                f"without, {size / 1e3:,.0f} kB a step, remainder {remainder:.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
