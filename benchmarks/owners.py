"""What it costs to find out whose row is whose: `python -m benchmarks.owners [--device cuda]`.

For each architecture, in turns: a step without recording, the first recorded step, which is an
experiment, and a later one, which is not. Then what experiments add to a run of so many steps.
With `--laws`, attribution itself is checked on the device, structure by structure.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
from tests.cases.case import Case
from tests.cases.structures import CASES
from tests.laws.attribution import attribution_holds
from torch.utils._pytree import tree_map_only

import dualform
from benchmarks.architectures import WORKLOADS, Training, Workload, sync
from dualform.owners import Owners

STEPS = 1000


def one_step(training: Training, at: int, recorder: dualform.Recorder | None) -> float:
    """Seconds of one step of training."""
    sync(training.device)
    began = time.perf_counter()
    if recorder is not None:
        recorder.samples(training.ids[at])
    out = training.model(training.inputs[at]).flatten(0, -2)
    torch.nn.functional.cross_entropy(out, training.targets[at].flatten()).backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    sync(training.device)
    return time.perf_counter() - began


def steps(workload: Workload, device: str, folder: Path) -> tuple[float, float, float]:
    """Seconds of a plain step, of the first recorded one, and of a later recorded one."""
    plain, recorded = (Training(workload, "SGD", device) for _ in range(2))
    one_step(plain, 0, None)
    with dualform.record(recorded.model, recorded.optimizer, folder / "run") as recorder:
        first = one_step(recorded, 0, recorder)
        one_step(recorded, 1, recorder)
        later = one_step(recorded, 2, recorder)
    return one_step(plain, 2, None), first, later


def experiments(passes: int) -> int:
    """How many of so many forward passes are experiments, where the data moves no rows."""
    owners = Owners({}, 0)
    due = 0
    for owners._passes in range(1, passes + 1):
        due += owners._is_due(set())
    return due


def costs(device: str, turns: int) -> None:
    times = experiments(STEPS)
    print(f"{times} of {STEPS} passes are experiments")
    print(
        f"{'':24s} {'step':>9s} {'first':>9s} {'first/step':>10s} {'added to ' + str(STEPS):>14s}"
    )
    for name, workload in WORKLOADS.items():
        found = []
        for _ in range(turns):
            with tempfile.TemporaryDirectory() as folder:
                found.append(steps(workload, device, Path(folder)))
        plain, first, later = (statistics.median(column) for column in zip(*found, strict=True))
        ratio = statistics.median(b / a for a, b, _ in found)
        added = times * (first - later) / (STEPS * plain)
        print(
            f"{name:24s} {plain * 1e3:6.1f} ms {first * 1e3:6.1f} ms {ratio:10.1f} {added:14.1%}",
            flush=True,
        )


def laws(device: str) -> None:
    for name, case in CASES.items():
        there = dataclasses.replace(
            case,
            make=lambda case=case: case.make().to(device),
            losses=lambda model, x, case=case: _losses(case, model, x, device),
        )
        with tempfile.TemporaryDirectory() as folder:
            try:
                audit = attribution_holds(there, Path(folder) / "run", reach=1e-7, training=True)
            except Exception as error:
                print(f"{name:60s} DOES NOT HOLD: {type(error).__name__} {error}", flush=True)
                continue
        print(f"{name:60s} {audit.remainder:.0e} {audit.coverage:.0%}", flush=True)


def _losses(case: Case, model: torch.nn.Module, x: object, device: str) -> torch.Tensor:
    with torch.device(device), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RNN module weights are not part of")
        return case.losses(model, tree_map_only(torch.Tensor, lambda t: t.to(device), x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--laws", action="store_true")
    options = parser.parse_args()
    if options.laws:
        laws(options.device)
    costs(options.device, options.turns)


if __name__ == "__main__":
    main()
