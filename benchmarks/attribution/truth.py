"""The ground truth: every task trained again on halves of its samples.

`python -m benchmarks.attribution.truth mlp cnn --folder truth --workers 16` (all tasks if none is
named). For each task `folder/TASK/` holds two of them, which have no subset in common:
`settings/truth.npz`, by which the peers' settings are chosen, and `report/truth.npz`, by which
everything is judged. An interrupted run goes on where it was.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.attribution.data import FILES, folder
from benchmarks.attribution.tasks import TASKS
from benchmarks.attribution.trained import SEED
from dualform.evaluate import GroundTruth, Retraining

PARTS = ("settings", "report")


def outputs(name: str, ids: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """What the queries of a task give after training on these samples.

    No seed is that of the run which is explained.
    """
    task = TASKS[name]
    return task.measure(task.train(ids.tolist(), SEED + 1 + seed))


def retraining(
    name: str, part: str, where: Path, subsets: int, seeds: int, workers: int | None
) -> Retraining:
    """The trainings of one part; its subsets are drawn with a seed of its own."""
    samples = len(TASKS[name].samples()[0])
    path, seed = where / name / part, PARTS.index(part)
    return Retraining(partial(outputs, name), samples, path, subsets, seeds, 0.5, workers, seed)


def load(name: str, part: str, where: Path, queries: int) -> GroundTruth:
    """The finished ground truth of a task, of its first queries."""
    whole = GroundTruth.load(where / name / part / "truth.npz")
    return GroundTruth(whole.members, whole.runs[:, :, :queries])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", choices=[*TASKS, []], default=[])
    parser.add_argument("--folder", type=Path, default=Path("truth"))
    parser.add_argument("--data", help="where mnist/ and text/ are, else DUALFORM_DATA")
    parser.add_argument("--subsets", type=int, nargs=2, default=(40, 100), metavar=PARTS)
    parser.add_argument("--seeds", type=int, nargs=2, default=(3, 5), metavar=PARTS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()
    if options.data:
        os.environ["DUALFORM_DATA"] = options.data
    missing = [name for name in FILES if not (folder() / name).exists()]
    if missing:
        parser.error(f"{folder()} lacks {', '.join(missing)}; say where it is with --data")
    for name in options.tasks or TASKS:
        for part, subsets, seeds in zip(PARTS, options.subsets, options.seeds, strict=True):
            if part not in options.parts:
                continue
            work = retraining(name, part, options.folder, subsets, seeds, options.workers)
            print(f"{name}, {part}: {work.run().to_dict()}", flush=True)


if __name__ == "__main__":
    main()
