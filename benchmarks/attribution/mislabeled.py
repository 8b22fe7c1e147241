"""Which labels are wrong? 10 % of MNIST's flipped: `python -m benchmarks.attribution.mislabeled`.

One recorded training on the flipped labels. "errors" reads the ledger alone. Our attributions ask
every sample about itself, with the label it was given: the more its own margin rests on having been
trained on, the more suspicious it is. "margin" needs no recording: −margin after training.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import dualform
from benchmarks.attribution import ours
from benchmarks.attribution.tasks import TASKS, Task
from benchmarks.attribution.trained import Trained
from dualform.evaluate import mislabeled, suspicion

SHARE = 0.1
METHODS = ("errors", "margin", *ours.OURS)
HEADER = "| method | AUC | found in the first 10 % | seconds |\n|---|---|---|---|"


def flipped(task: Task, seed: int = 0) -> tuple[Task, NDArray[np.bool_]]:
    """The task with a tenth of its labels moved to another class, asked about its own samples."""
    chance = torch.Generator().manual_seed(seed)
    x, y = task.samples()
    wrong = torch.rand(len(y), generator=chance).argsort() < SHARE * len(y)
    moved = torch.randint(1, 10, y.shape, generator=chance)
    given = torch.where(wrong, (y + moved) % 10, y)
    load = lambda: (x, given, x, given)  # noqa: E731
    return replace(task, name=f"{task.name}-flipped", load=load, asked=len(y)), wrong.numpy()


def suspect(trained: Trained, method: str) -> NDArray[np.float64]:
    """How suspicious each sample is."""
    if method == "margin":
        return -trained.task.measure(trained.model())
    if method == "errors":
        found = suspicion(dualform.open(trained.ledger))
        return found.values[np.argsort(np.array(found.ids)), 0]
    return np.diagonal(ours.scores(trained, method)).copy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=("mlp", "mlp-adamw", "cnn", "cnn-adamw"), default="mlp")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS[:4]))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    options = parser.parse_args()
    task, wrong = flipped(TASKS[options.task])
    trained = Trained.of(task, options.runs)
    print(HEADER)
    for method in options.methods:
        began = time.perf_counter()
        found = suspect(trained, method)
        seconds, result = time.perf_counter() - began, mislabeled(found, wrong)
        print(f"| {method} | {result.auc:.4f} | {result.found(SHARE):.1%} | {seconds:.1f} |")


if __name__ == "__main__":
    main()
