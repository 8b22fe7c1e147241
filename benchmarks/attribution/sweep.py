"""Chooses the settings of a peer: `python -m benchmarks.attribution.sweep TASK PEER`.

First a case with a known answer: samples asked about themselves must raise their own margin, or
lower their own loss, more than nearly all others do. Then the LDS of every setting, by subsets that
the report does not use, over the first queries.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.attribution import truth
from benchmarks.attribution.peers import PEERS, Peer, peer
from benchmarks.attribution.tasks import TASKS, Task
from benchmarks.attribution.trained import Trained
from dualform.evaluate import lds


def asked_about_themselves(task: Task, samples: int, queries: int) -> Task:
    """The task with fewer samples, whose first are the queries."""
    x, y = task.samples()
    few = (x[:samples], y[:samples], x[:queries], y[:queries])
    return replace(task, load=lambda: few, asked=queries)


def known_answer(module: Peer, task: Task, settings: dict[str, Any]) -> float:
    """The share of others that a sample helps itself more than; 0 with the wrong sign."""
    small = asked_about_themselves(task, 300, 30)
    with tempfile.TemporaryDirectory() as work:
        found = module.scores(Trained.of(small, Path(work)), Path(work), **settings)
    helps = -found if task.name == "text" else found
    return float((helps < np.diagonal(helps)).sum() / (30 * 299))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--settings", type=json.loads, nargs="+", help="instead of the peer's list")
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--truth", type=Path, default=Path("truth"))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    module, task = peer(options.peer), TASKS[options.task]
    settings = options.settings or module.SETTINGS
    share = known_answer(module, task, settings[-1])
    print(f"samples help themselves more than {share:.1%} of the others do", flush=True)
    known = truth.load(task.name, "settings", options.truth, options.queries)
    trained = Trained.of(task, options.runs).asking(options.queries)
    with tempfile.TemporaryDirectory() as work:
        for chosen in settings:
            found = lds(module.scores(trained, Path(work), **chosen), known)
            print(f"{task.name} {options.peer} {chosen}: {found.mean:.3f}", flush=True)


if __name__ == "__main__":
    main()
