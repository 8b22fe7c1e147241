"""LDS, time and memory of our methods and of the peers: `python -m benchmarks.attribution`.

Needs the peers (`make peers`), the ground truth (`python -m benchmarks.attribution.truth`), and the
data. All methods explain the same training run, recorded into `--runs` if it is not there yet, and
each call runs in a process of its own; turns go through all methods before any runs again.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.attribution import truth
from benchmarks.attribution.data import QUERIES
from benchmarks.attribution.method import METHODS, Cost, measured
from benchmarks.attribution.peers import PEERS
from benchmarks.attribution.tasks import TASKS
from benchmarks.attribution.trained import Trained
from dualform.evaluate import GroundTruth, lds

HEADER = "| method | LDS | 95 % | seconds | processor | peak memory |\n|---|---|---|---|---|---|"


def row(
    method: str, scores: NDArray[np.float64], costs: list[Cost], known: GroundTruth
) -> tuple[float, str]:
    """A line of the table, and the LDS by which it is sorted."""
    found = lds(scores, known)
    low, high = found.interval
    name = method if method in PEERS else f"**dualform {method}**"
    kinds = ("seconds", "processor", "megabytes")
    spent = (statistics.median(getattr(cost, kind) for cost in costs) for kind in kinds)
    taken = "{:,.1f} | {:,.1f} | {:,.0f} MB".format(*spent)
    return found.mean, f"| {name} | {found.mean:.3f} | {low:.3f} to {high:.3f} | {taken} |"


def table(name: str, options: argparse.Namespace) -> None:
    """Runs every method on one task, in turns, and prints what came out."""
    Trained.of(TASKS[name], options.runs)
    known = truth.load(name, "report", options.truth, options.queries)
    sizes = known.to_dict()
    halves = f"{sizes['subsets']} halves of {sizes['samples']:,} samples × {sizes['seeds']} seeds"
    print(f"\n{name}: {sizes['queries']} queries, {halves}, at best {sizes['ceiling']:.3f}\n")
    print(HEADER)
    scores: dict[str, NDArray[np.float64]] = {}
    costs: dict[str, list[Cost]] = {method: [] for method in options.methods}
    for _ in range(options.turns):
        for method in options.methods:
            scores[method], cost = measured(
                name, method, options.runs, options.threads, options.queries
            )
            costs[method].append(cost)
    rows = [row(method, scores[method], costs[method], known) for method in options.methods]
    for _, line in sorted(rows, reverse=True):
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--truth", type=Path, default=Path("truth"))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--queries", type=int, default=QUERIES, help="the first so many")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    for name in options.tasks:
        table(name, options)


if __name__ == "__main__":
    main()
