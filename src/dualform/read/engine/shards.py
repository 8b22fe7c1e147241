"""Which part of a run a fold reads: some steps of one shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from dualform.ledger import Ledger, Shard
from dualform.ledger.ids import run_numbers


@dataclass(frozen=True)
class ShardRange:
    """Some steps of one shard: a path, its line of the log, and two numbers.

    Whoever folds it opens the file. What is sent elsewhere holds nothing that is open.

    >>> from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run()
    >>> [(shard.first, shard.last) for shard in ShardRange.of(Ledger(run.path), 2, 4)]
    [(2, 4)]
    """

    shard: Shard
    first: int
    last: int
    numbers: Tensor | None = None
    """The run's number for each that the shard's rank has given a sample; None if the same."""

    @classmethod
    def of(cls, ledger: Ledger, first: int, last: int) -> list[ShardRange]:
        """The shards that hold the steps from `first` to `last`, in the order of time."""
        ranges = [
            cls(s, max(first, s.first), min(last, s.last), ledger.ids.table(s.rank))
            for s in ledger.shards
        ]
        return [shard for shard in ranges if shard.first <= shard.last]

    @property
    def steps(self) -> int:
        """How many there are."""
        return self.last - self.first + 1

    def holds(self, stream: str) -> bool:
        """Whether the shard has rows of a stream."""
        return f"{stream}/segments" in self.shard.file

    def samples(self) -> Tensor:
        """(samples,): the samples of the shard's batches, by the run's numbers."""
        return run_numbers(self.numbers, self.shard.rank, self.shard.file.read("samples"))

    def __reduce__(self) -> tuple[Callable[..., ShardRange], tuple[Any, ...]]:
        """Without the opened file, which the shard may hold."""
        return ShardRange, (replace(self.shard), self.first, self.last, self.numbers)


def split(shards: Sequence[ShardRange], parts: int) -> list[list[ShardRange]]:
    """The shards in so many runs of neighbors at most, of about as many steps each.

    >>> from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run()
    >>> whole, = ShardRange.of(Ledger(run.path), 1, 6)
    >>> [len(part) for part in split([whole] * 5, 2)]
    [3, 2]
    """
    total, done = sum(shard.steps for shard in shards), 0
    found: list[list[ShardRange]] = []
    for shard in shards:
        if len(found) <= done * parts // max(1, total):
            found.append([shard])
        else:
            found[-1].append(shard)
        done += shard.steps
    return found
