"""Brittleness: what becomes of an output when the samples that matter most to it are removed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table

from dualform.errors import EvaluationError
from dualform.evaluate.scores import ScoresLike, by_position
from dualform.evaluate.workers import Ids, Job, Task, train_all
from dualform.read.display import Displayed, framed, matplotlib_axes, signed
from dualform.read.scores import Array, Scores


@dataclass(frozen=True, repr=False)
class Brittleness(Displayed):
    """An output before and after samples were removed: the highest ranked, or as many at random.

    >>> before, after, random = np.array([2.0, 2.2]), np.array([[0.5, 0.7]]), np.array([[2.0, 2.2]])
    >>> removed = Brittleness([10], before, after, random)
    >>> removed.effect.round(2), removed.control.round(2)
    (array([-1.5]), array([0.]))
    """

    k: Sequence[int]
    """How many were removed."""
    before: Array
    """(seeds,): trained on all samples."""
    after: Array
    """(k, seeds): trained without the k highest ranked."""
    random: Array
    """(k, seeds): trained without k others at random, other ones for each seed."""

    @property
    def effect(self) -> Array:
        """(k,): the change by removing the highest ranked, mean over seeds."""
        change: Array = (self.after - self.before).mean(1)
        return change

    @property
    def control(self) -> Array:
        """(k,): the change by removing as many at random, mean over seeds."""
        change: Array = (self.random - self.before).mean(1)
        return change

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        arrays = {"before": self.before, "after": self.after, "random": self.random}
        return {"k": list(self.k), **{name: array.tolist() for name, array in arrays.items()}}

    def plot(self, axes: Any = None) -> Any:
        """The output against the number of removed samples; each seed is a point."""
        axes = matplotlib_axes(axes)
        at = [0, *self.k]
        for name, outputs in (("highest ranked", self.after), ("at random", self.random)):
            whole = np.vstack([self.before, outputs])
            (line,) = axes.plot(at, whole.mean(1), label=name)
            axes.plot(at, whole, ".", color=line.get_color())
        axes.set_xlabel("samples removed")
        axes.set_ylabel("output")
        axes.legend()
        return axes

    def __rich__(self) -> Group:
        table = Table()
        for name in ("removed", "highest ranked", "change", "at random", "change"):
            table.add_column(name, justify="right")
        for at, k in enumerate(self.k):
            after, effect = _spread(self.after[at]), signed(self.effect[at])
            random, control = _spread(self.random[at]), signed(self.control[at])
            table.add_row(f"{k:,}", after, effect, random, control)
        title = f"the output is {_spread(self.before)} with all samples; and without"
        return framed(title, table, f"mean ± standard deviation over {len(self.before)} seeds")


def brittleness(
    scores: ScoresLike,
    query: int,
    task: Task,
    k: int | Sequence[int],
    seeds: int = 3,
    workers: int | None = None,
    seed: int = 0,
) -> Brittleness:
    """Retrains without the k samples that score highest for a query, and without k at random.

    >>> def total(ids, seed):
    ...     return [ids.sum()]
    >>> brittleness(np.arange(10.0), 0, total, k=2, workers=0).effect
    array([-17.])

    Args:
        query: which column of the scores, and which output of the task.
        task: as for `Retraining`.
        k: how many to remove; or several numbers, each by itself.
        workers: as for `Retraining`.
        seed: of the choice of random samples.
    """
    samples = len(scores) if isinstance(scores, Scores) else len(np.asarray(scores))
    values, counts = by_position(scores, samples), [k] if isinstance(k, int) else list(k)
    if not 0 <= query < values.shape[1]:
        raise EvaluationError(f"query={query}: the scores have queries 0 to {values.shape[1] - 1}.")
    if not counts or min(counts) < 1 or max(counts) >= samples or seeds < 1:
        raise EvaluationError(
            f"k={k}, seeds={seeds}: remove at least 1 and at most {samples - 1:,} of {samples:,} "
            "samples, with at least one seed."
        )
    order = np.argsort(-values[:, query], kind="stable")
    jobs = list(_jobs(order, counts, seeds, np.random.default_rng(seed)))
    found: dict[str, Array] = {}
    train_all(task, jobs, lambda job, outputs: found.update({job.name: outputs}), workers)
    outputs = np.array([_output(found[job.name], query) for job in jobs]).reshape(-1, seeds)
    return Brittleness(counts, outputs[0], outputs[1::2], outputs[2::2])


def _jobs(
    order: Ids, counts: Sequence[int], seeds: int, chance: np.random.Generator
) -> Iterator[Job]:
    """All samples; then for each k without the first of the order, and without k at random."""
    numbers = range(seeds)
    yield from (Job(f"all samples, seed {seed}", np.sort(order), seed) for seed in numbers)
    for k in counts:
        for seed in numbers:
            yield Job(f"without the {k} highest ranked, seed {seed}", np.sort(order[k:]), seed)
        for seed in numbers:
            left = np.sort(chance.permutation(order)[k:])
            yield Job(f"without {k} at random, seed {seed}", left, seed)


def _output(outputs: Array, query: int) -> float:
    if query >= len(outputs):
        raise EvaluationError(
            f"query={query}, but the task returned {len(outputs)} numbers; it must return one for "
            "each column of the scores."
        )
    return float(outputs[query])


def _spread(outputs: Array) -> str:
    return f"{outputs.mean():.4g} ± {outputs.std():.2g}"
