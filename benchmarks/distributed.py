"""A step of several processes, recorded and not: `python -m benchmarks.distributed`.

Each process has one thread for its training. Both sides are trained by DistributedDataParallel (or,
with `--sharded`, by fully_shard) over gloo, in turns, in the same processes. The figures are those
of process 0: by the clock, and by the processor seconds of all its threads, which count little of
what else runs on the machine.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import dualform
from benchmarks.timing import compare

WIDTHS = (784, 2048, 2048, 10)


def make_step(batch: int, sharded: bool) -> tuple[Callable[[], None], nn.Module, Any]:
    """A training step of a perceptron, the wrapped model, and its optimizer."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(a, b), nn.ReLU()]
    model: nn.Module = nn.Sequential(*layers[:-1])
    if sharded:
        for layer in layers[:-1:2]:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    torch.manual_seed(dist.get_rank())
    xs, ys = torch.randn(8, batch, WIDTHS[0]), torch.randint(0, WIDTHS[-1], (8, batch))
    at = itertools.cycle(range(8))

    def step() -> None:
        one = next(at)
        F.cross_entropy(model(xs[one]), ys[one]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer


def measure(
    rank: int, of: int, folder: str, batch: int, steps: int, turns: int, sharded: bool, keep: str
) -> None:
    """What one process does; process 0 says what came of it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", world_size=of, rank=rank)
    plain, *_ = make_step(batch, sharded)
    step, model, optimizer = make_step(batch, sharded)
    clocks = {"clock": time.perf_counter, "processor": time.process_time}
    path, results = Path(folder, "run"), {}
    with dualform.record(model, optimizer, path, keep=keep) as recorder:
        ids = torch.arange(rank, of * batch, of)

        def run_recorded() -> None:
            dist.barrier()
            for _ in range(steps):
                recorder.samples(ids)
                step()

        def run_plain() -> None:
            dist.barrier()
            for _ in range(steps):
                plain()

        run_plain()
        run_recorded()
        for name, clock in clocks.items():
            results[name] = compare(run_recorded, run_plain, turns, clock)
    if rank == 0:
        for name, result in results.items():
            print(
                f"{of} processes{', sharded' * sharded}, batch {batch} each, "
                f"keep='{keep}', by the {name}: step × {result}, "
                f"{result.reference / steps * 1e3:,.0f} ms without",
                flush=True,
            )
        run = dualform.open(path)
        audit = run.audit()
        print(
            f"{run.steps} steps, {run.nbytes / run.steps / 1e6:.1f} MB a step, remainder "
            f"{audit.remainder:.1e}, {audit.coverage:.0%} of the parameters by row"
        )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128, help="samples of each process")
    parser.add_argument("--steps", type=int, default=20, help="how many make a turn")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--sharded", action="store_true", help="by fully_shard")
    parser.add_argument("--keep", default="auto")
    given = parser.parse_args()
    folder = tempfile.mkdtemp()
    try:
        how = (given.sharded, given.keep)
        asked = (given.processes, folder, given.batch, given.steps, given.turns, *how)
        spawn(measure, asked, given.processes)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
