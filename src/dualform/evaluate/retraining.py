"""Leave-out retraining: the only way to know what a model without some samples would give."""

from __future__ import annotations

import functools
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from dualform.errors import EvaluationError, RetrainingError
from dualform.evaluate.truth import GroundTruth
from dualform.evaluate.work_folder import check_settings, work_progress, write_whole
from dualform.evaluate.workers import Job, Task, train_all
from dualform.read.scores import Array

QUERIES, TRUTH = "queries.txt", "truth.npz"
PLAIN = (str, int, float, bool, Path, type(None))


@dataclass(frozen=True)
class Retraining:
    """Trains on random subsets of the samples, several seeds each, and keeps what comes out.

    Every finished training is a small file in `folder`: after an interruption, or with more
    subsets or seeds asked for, `run` trains only what is missing. All subsets are trained with the
    same seeds, 0, 1, …; what a seed does is the task's own matter.

    >>> import tempfile
    >>> def mean_of(ids, seed):
    ...     return [ids.mean()]
    >>> truth = Retraining(mean_of, 10, tempfile.mkdtemp(), subsets=4, workers=0).run()
    >>> truth.members.shape, truth.members.sum(1).tolist(), truth.runs.shape
    ((4, 10), [5, 5, 5, 5], (4, 3, 1))

    Args:
        task: `task(ids, seed)` trains on the samples at these positions and returns one number for
            each query. A function at the top of a module, or functools.partial of one, since it
            runs in worker processes. One with `at_once` and `stacked(ids, seeds)` trains many at a
            time, in this process.
        samples: how many there are; positions are 0 to samples − 1.
        folder: where finished trainings are kept.
        fraction: the share of the samples that a subset has.
        workers: how many processes; by default one for each core. 0 trains in this process.
        seed: of the choice of subsets.
    """

    task: Task
    samples: int
    folder: str | os.PathLike[str]
    subsets: int = 50
    seeds: int = 3
    fraction: float = 0.5
    workers: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("samples", 2), ("subsets", 1), ("seeds", 1)):
            if getattr(self, name) < least:
                raise EvaluationError(f"{name}={getattr(self, name)}: give at least {least}.")
        if not 0 < self._size < self.samples:
            raise EvaluationError(
                f"fraction={self.fraction} of {self.samples} samples is {self._size}; give a share "
                "that leaves some in and some out."
            )

    @property
    def members(self) -> NDArray[np.bool_]:
        """(subsets, samples): which samples each subset has; more subsets leave the first alike."""
        members = np.zeros((self.subsets, self.samples), dtype=bool)
        for number, row in enumerate(members):
            order = np.random.default_rng([self.seed, number]).random(self.samples).argsort()
            row[order[: self._size]] = True
        return members

    def run(self) -> GroundTruth:
        """Trains what is missing, with progress; returns everything and keeps it in `truth.npz`."""
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(folder / "lock", timeout=0):
                check_settings(folder, self._settings, "trainings")
                self._train(folder)
                truth = GroundTruth(self.members, self._runs(folder))
                truth.save(folder / TRUTH)
                return truth
        except Timeout:
            raise EvaluationError(
                f"another process is retraining into '{folder}'; wait for it, or end it."
            ) from None

    @property
    def _size(self) -> int:
        return round(self.fraction * self.samples)

    @property
    def _settings(self) -> dict[str, Any]:
        """What the trainings in a folder have in common."""
        shared = {name: getattr(self, name) for name in ("samples", "fraction", "seed")}
        return {"task": describe(self.task), **shared}

    def _train(self, folder: Path) -> None:
        missing = self._missing(folder)
        total = self.subsets * self.seeds
        with work_progress() as progress:
            bar = progress.add_task("retraining", completed=total - len(missing), total=total)

            def done(job: Job, outputs: Array) -> None:
                _keep(folder, job.name, outputs)
                progress.advance(bar)

            try:
                train_all(self.task, missing, done, self.workers)
            except RetrainingError as error:
                kept = total - len(self._missing(folder))
                raise RetrainingError(
                    f"{str(error).rstrip('.')}. {kept} of {total} trainings are kept in "
                    f"'{folder}'; run again to go on."
                ) from error.__cause__

    def _missing(self, folder: Path) -> list[Job]:
        return [
            Job(name, np.flatnonzero(members), seed)
            for subset, members in enumerate(self.members)
            for seed in range(self.seeds)
            for name in [_name(subset, seed)]
            if not _file(folder, name).exists()
        ]

    def _runs(self, folder: Path) -> Array:
        """(subsets, seeds, queries)."""
        names = [
            _name(subset, seed) for subset in range(self.subsets) for seed in range(self.seeds)
        ]
        outputs = [np.load(_file(folder, name), allow_pickle=False) for name in names]
        return np.array(outputs).reshape(self.subsets, self.seeds, -1)


def describe(task: Task) -> str:
    """A task in words: where its function is, and the plain values it is given.

    >>> describe(functools.partial(np.linspace, 0, num=5))
    'numpy:linspace(0, num=5)'
    """
    if not isinstance(task, functools.partial):
        return f"{task.__module__}:{getattr(task, '__qualname__', type(task).__qualname__)}"
    plain = [repr(value) for value in task.args if isinstance(value, PLAIN)]
    plain += [f"{name}={v!r}" for name, v in task.keywords.items() if isinstance(v, PLAIN)]
    return f"{describe(task.func)}({', '.join(plain)})"


def _name(subset: int, seed: int) -> str:
    return f"subset {subset}, seed {seed}"


def _file(folder: Path, name: str) -> Path:
    return folder / (name.replace(", ", "-").replace(" ", "-") + ".npy")


def _keep(folder: Path, name: str, outputs: Array) -> None:
    """Keeps the outputs of a training, if they are as many as those of the others."""
    path, queries = folder / QUERIES, str(len(outputs))
    if not path.exists():
        write_whole(path, queries.encode())
    elif path.read_text() != queries:
        raise RetrainingError(
            f"{name}: the task returned {queries} numbers, and {path.read_text()} before; it must "
            "return one number for each query, whatever it is trained on."
        )
    data = io.BytesIO()
    np.save(data, outputs)
    write_whole(_file(folder, name), data.getvalue())
