"""When it was learned: contributions by step or by epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Group
from torch import Tensor

from dualform.errors import ReadingError
from dualform.ledger import Ledger
from dualform.read.scan import batch_samples
from dualform.read.scores import Array, Check
from dualform.read.shown import Amounts, columns, framed, matplotlib_axes, signed


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
    ledger: Ledger, steps: Array, by: str, queries: Sequence[str], check: Check | None
) -> Timeline:
    """Contributions (steps, queries), the first step's first, summed by "step" or "epoch"."""
    if by not in ("step", "epoch"):
        raise ReadingError(f"timeline by {by!r}: there are 'step' and 'epoch'.")
    numbers = np.arange(1, len(steps) + 1)
    if by == "epoch":
        numbers = epochs(ledger, len(steps))[1:]
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
    def of(cls, ledger: Ledger, until: int, most: int = 48) -> Bins:
        """Epochs; runs of them if there are more than `most`, or of steps if there is one only."""
        numbers = epochs(ledger, until)
        ends = [*np.flatnonzero(np.diff(numbers[1:])) + 1, until] if until else [0]
        unit = "epoch" if len(ends) > 1 else "step"
        if len(ends) == 1:
            ends = list(range(1, until + 1)) or [0]
        kept = np.linspace(0, len(ends), min(most, len(ends)) + 1).round().astype(int)[1:] - 1
        return cls(unit, (0, *(int(ends[at]) for at in kept)))

    def by_step(self, steps: Tensor) -> Tensor:
        """The bin of each step."""
        return torch.bucketize(steps, torch.tensor(self.edges[1:-1]))


def epochs(ledger: Ledger, until: int) -> NDArray[np.int64]:
    """(until + 1,): the epoch of each step by its number.

    An epoch ends where a sample comes up that the epoch has had.
    """
    epoch, seen = 1, set[int]()
    found = np.ones(until + 1, dtype=np.int64)
    for step, samples in _samples_by_step(ledger):
        if step > until:
            break
        if not seen.isdisjoint(samples):
            epoch, seen = epoch + 1, set()
        seen.update(samples)
        found[step:] = epoch
    return found


def _samples_by_step(ledger: Ledger) -> list[tuple[int, list[int]]]:
    by_step: dict[int, dict[tuple[int, int], list[int]]] = {}
    for shard in ledger.shards:
        if "batches" not in shard.file:
            continue
        rows = batch_samples(ledger, shard)
        for stream in ledger.info.streams:
            if f"{stream.name}/segments" in shard.file:
                for step, batch, _ in shard.file.read(f"{stream.name}/segments").tolist():
                    by_step.setdefault(step, {})[shard.rank, batch] = rows[batch]
    return [
        (step, [sample for batch in sorted(batches) for sample in batches[batch]])
        for step, batches in sorted(by_step.items())
    ]
