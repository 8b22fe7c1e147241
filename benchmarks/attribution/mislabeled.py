"""Which labels are wrong? 10 % of MNIST's flipped: `python -m benchmarks.attribution.mislabeled`.

One recorded training on the flipped labels. Every sample is asked about itself, with the label it
was given: the more its own margin rests on having been trained on, the more suspicious it is.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.attribution import ours
from benchmarks.attribution.tasks import TASKS, Task
from benchmarks.attribution.trained import Trained
from dualform.evaluate import mislabeled

SHARE = 0.1
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


def own_loss(trained: Trained) -> NDArray[np.float64]:
    """−margin of each sample: what needs no attribution at all."""
    return -trained.task.measure(trained.model())


def own_support(trained: Trained, method: str) -> NDArray[np.float64]:
    """What each sample gave its own margin."""
    return np.diagonal(ours.scores(trained, method)).copy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=("mlp", "mlp-adamw", "cnn", "cnn-adamw"), default="mlp")
    parser.add_argument("--methods", nargs="+", choices=ours.OURS, default=["ridge", "accounting"])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    options = parser.parse_args()
    task, wrong = flipped(TASKS[options.task])
    trained = Trained.of(task, options.runs)
    print(HEADER)
    for method in (*options.methods, "own loss"):
        began = time.perf_counter()
        found = own_loss(trained) if method == "own loss" else own_support(trained, method)
        seconds, result = time.perf_counter() - began, mislabeled(found, wrong)
        print(f"| {method} | {result.auc:.4f} | {result.found(SHARE):.1%} | {seconds:.1f} |")


if __name__ == "__main__":
    main()
