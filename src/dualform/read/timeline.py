"""When it was learned: contributions by step or by epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Group
from torch import Tensor

from dualform.errors import ReadingError
from dualform.read.display import Amounts, columns, framed, matplotlib_axes, signed
from dualform.read.engine import Fold, RowReader, ShardRange
from dualform.read.scan import batch_samples
from dualform.read.scores import Array, Check


@dataclass(frozen=True, repr=False)
class Timeline(Amounts):
    """What each step (or epoch) of training contributed to each query.

    >>> Timeline("step", np.array([1, 2]), np.array([[0.5], [0.25]]), ["q"]).cumulative.tolist()
    [[0.5], [0.75]]
    """

    unit: str
    at: NDArray[np.int64]
    values: Array
    """(steps or epochs, queries)."""
    queries: Sequence[str]
    check: Check | None = None

    @property
    def cumulative(self) -> Array:
        """The running sum: how the evidence built up, as it counts now."""
        return np.cumsum(self.values, axis=0)

    @property
    def lines(self) -> Sequence[int]:
        """The numbers of the steps or epochs."""
        numbers: list[int] = self.at.tolist()
        return numbers

    def plot(self, axes: Any = None) -> Any:
        """The running sum of each query over training."""
        axes = matplotlib_axes(axes)
        for at, name in enumerate(self.queries):
            axes.plot(self.at, self.cumulative[:, at], label=name)
        axes.set_xlabel(self.unit)
        axes.set_ylabel("evidence so far")
        axes.legend()
        return axes

    def __rich__(self) -> Group:
        table = columns((self.unit, *self.queries[:6]), words=())
        shown = np.unique(np.linspace(0, len(self.at) - 1, min(len(self.at), 12)).astype(int))
        for at in shown:
            table.add_row(str(self.at[at]), *(signed(v) for v in self.values[at, :6]))
        note = f"{len(shown)} of {len(self.at):,} shown" if len(shown) < len(self.at) else ""
        return framed(f"contributions by {self.unit}", table, note)


def make_timeline(
    reader: RowReader, steps: Array, by: str, queries: Sequence[str], check: Check | None
) -> Timeline:
    """Contributions (steps, queries), the first step's first, summed by "step" or "epoch"."""
    if by not in ("step", "epoch"):
        raise ReadingError(f"timeline by {by!r}: there are 'step' and 'epoch'.")
    numbers = np.arange(1, len(steps) + 1)
    if by == "epoch":
        numbers = epochs(reader, len(steps))[1:]
    sums = np.zeros((int(numbers.max(initial=0)), steps.shape[1]))
    np.add.at(sums, numbers - 1, steps)
    return Timeline(by, np.arange(1, len(sums) + 1), sums, queries, check)


@dataclass(frozen=True)
class Bins:
    """Training in parts that are long enough to tell apart: epochs, or else runs of steps.

    >>> from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run()
    >>> run.bins
    Bins(unit='epoch', edges=(0, 2, 4, 6))
    """

    unit: str
    edges: tuple[int, ...]
    """Bin i holds the steps after `edges[i]`, up to `edges[i + 1]`."""

    def __len__(self) -> int:
        return len(self.edges) - 1

    @classmethod
    def of(cls, reader: RowReader, until: int, most: int = 48) -> Bins:
        """Epochs; runs of them if there are more than `most`, or of steps if there is one only."""
        numbers = epochs(reader, until)
        ends = [*np.flatnonzero(np.diff(numbers[1:])) + 1, until] if until else [0]
        unit = "epoch" if len(ends) > 1 else "step"
        if len(ends) == 1:
            ends = list(range(1, until + 1)) or [0]
        kept = np.linspace(0, len(ends), min(most, len(ends)) + 1).round().astype(int)[1:] - 1
        return cls(unit, (0, *(int(ends[at]) for at in kept)))

    def by_step(self, steps: Tensor) -> Tensor:
        """The bin of each step."""
        return torch.bucketize(steps, torch.tensor(self.edges[1:-1]))


def epochs(reader: RowReader, until: int) -> NDArray[np.int64]:
    """(until + 1,): the epoch of each step by its number.

    An epoch ends where a sample comes up that the epoch has had.
    """
    epoch, seen = 1, set[int]()
    found = np.ones(until + 1, dtype=np.int64)
    fold = EpochSamples(tuple(stream.name for stream in reader.ledger.info.streams))
    for step, batches in sorted(reader.reduce(fold, until).items()):
        samples = [sample for batch in sorted(batches) for sample in batches[batch]]
        if not seen.isdisjoint(samples):
            epoch, seen = epoch + 1, set()
        seen.update(samples)
        found[step:] = epoch
    return found


BatchesByStep: TypeAlias = dict[int, dict[tuple[int, int], list[int]]]
"""The numbers of the samples of each batch, by step, and by rank and batch."""


@dataclass(frozen=True)
class EpochSamples(Fold[BatchesByStep]):
    """Which samples each step saw, batch by batch."""

    names: tuple[str, ...]
    """Of the streams that are looked at."""

    @property
    def streams(self) -> tuple[str, ...]:
        """All that are looked at."""
        return self.names

    def start(self) -> BatchesByStep:
        """No step."""
        return {}

    def fold(self, partial: BatchesByStep, shard: ShardRange) -> BatchesByStep:
        """Adds the steps of a shard."""
        file, rank = shard.shard.file, shard.shard.rank
        rows = batch_samples(shard)
        for stream in filter(shard.holds, self.streams):
            for step, batch, _ in file.read(f"{stream}/segments").tolist():
                if shard.first <= step <= shard.last:
                    partial.setdefault(step, {})[rank, batch] = rows[batch]
        return partial

    def merge(self, one: BatchesByStep, other: BatchesByStep) -> BatchesByStep:
        """The steps of both."""
        for step, batches in other.items():
            one.setdefault(step, {}).update(batches)
        return one
