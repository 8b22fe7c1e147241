"""A training step with recording against one without: `python -m benchmarks.recording`.

`--keep` takes policies: `rows`, `summaries`, `summaries:8,64,int8,steps`. On a busy machine,
`OMP_NUM_THREADS=1` and `--processor` count processor seconds, with all that it takes to write.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import dualform
from benchmarks.timing import Comparison, compare
from dualform.recording.keep import Keep

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
    widths: tuple[int, ...],
    batch: int,
    device: str,
    steps: int,
    turns: int,
    folder: str | None,
    keep: Keep = "auto",
    processor: bool = False,
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

    with dualform.record(model, optimizer, path, keep=keep) as recorder:

        def run_recorded() -> None:
            for _ in range(steps):
                recorder.samples(ids)
                recorded()
            sync()
            if processor:
                recorder.checkpoint()

        run_plain()
        run_recorded()
        clock = time.process_time if processor else time.perf_counter
        result = compare(run_recorded, run_plain, turns, clock)
        total = recorder.step
    run = dualform.open(path, device)
    size, remainder = run.nbytes // total, run.audit().remainder
    shutil.rmtree(path.parent)
    return result, size, remainder


def policy(given: str) -> Keep:
    """What `--keep` says.

    >>> policy("rows"), policy("summaries:8,64,int8,steps")
    ('rows', Summaries(shape=(8, 64), numbers='int8', offsets='steps'))
    """
    name, _, sizes = given.partition(":")
    if not sizes:
        return name
    outputs, inputs, *rest = sizes.split(",")
    return dualform.summaries(int(outputs), int(inputs), *rest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--batches", type=int, nargs="+", default=[64])
    parser.add_argument("--keep", nargs="+", default=["auto"], help="policies, each by itself")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--steps", type=int, help="how many make a turn")
    parser.add_argument("--processor", action="store_true", help="count processor seconds")
    parser.add_argument("--folder", default=None, help="where the runs are written")
    options = parser.parse_args()
    for name, batch, keep in itertools.product(options.models, options.batches, options.keep):
        widths = MODELS[name]
        usual = 150 if widths[0] > 100 else 1500  # several hand-overs to the writer a turn
        steps = options.steps or usual
        where = (options.device, steps, options.turns, options.folder)
        result, size, remainder = overhead(widths, batch, *where, policy(keep), options.processor)
        print(
            f"{name}, batch {batch}, {keep}: step × {result}, "
            f"{result.reference / steps * 1e6:,.0f} µs without, {size / 1e3:,.0f} kB a step, "
            f"remainder {remainder:.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
