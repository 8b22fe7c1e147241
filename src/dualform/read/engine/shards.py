"""Which part of a run a fold reads: some steps of one shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from dualform.errors import CorruptError
from dualform.ledger import Ledger, Shard, Stream
from dualform.ledger.ids import run_numbers
from dualform.memory.summary import Bases


class ReadParts(Protocol):
    """What was read of a shard before a fold asks for it."""

    def of(self, shard: ShardRange, stream: str) -> Iterator[tuple[Any, Mapping[str, Tensor]]]:
        """The parts of a stream, each with its arrays, which are valid until the next."""


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
    basis_shards: Mapping[str, Shard] = field(default_factory=dict)
    """Where the bases of each stream of summaries are."""
    ahead: ReadParts | None = field(default=None, compare=False, repr=False)
    """What an engine has read of it; None where a fold maps the file."""

    @classmethod
    def of(cls, ledger: Ledger, first: int, last: int) -> list[ShardRange]:
        """The shards that hold the steps from `first` to `last`, in the order of time."""
        bases = ledger.basis_shards
        ranges = [
            cls(s, max(first, s.first), min(last, s.last), ledger.ids.table(s.rank), bases)
            for s in ledger.shards
        ]
        return [shard for shard in ranges if shard.first <= shard.last]

    @property
    def steps(self) -> int:
        """How many there are."""
        return self.last - self.first + 1

    @property
    def nbytes(self) -> int:
        """How large the file is, as far as it is of these steps."""
        steps = self.shard.last - self.shard.first + 1
        return int(self.shard.record["bytes"]) * self.steps // steps

    def holds(self, stream: str) -> bool:
        """Whether the shard has rows of a stream."""
        return f"{stream}/segments" in self.shard.file

    def samples(self) -> Tensor:
        """(samples,): the samples of the shard's batches, by the run's numbers."""
        return run_numbers(self.numbers, self.shard.rank, self.shard.file.read("samples"))

    def bases(self, stream: Stream, device: torch.device | str = "cpu") -> Bases | None:
        """The bases that a stream's records are kept in; None where they are rows."""
        return stream_bases(self.basis_shards, stream, device)


def stream_bases(
    shards: Mapping[str, Shard], stream: Stream, device: torch.device | str = "cpu"
) -> Bases | None:
    """The bases of a stream, which are in one of these shards; None where it has rows."""
    if not stream.bases:
        return None
    U, V = (
        _basis(shards[stream.name], f"{stream.name}/{side}").to(device) if count else None
        for side, count in zip(("outputs", "inputs"), stream.bases, strict=True)
    )
    return Bases(U, V)


def _basis(shard: Shard, name: str) -> Tensor:
    """A basis as it is computed with, or an error that says what is wrong with it."""
    if name not in shard.file or len(shard.file.array(name).shape) != 2:
        raise CorruptError(f"'{shard.path}' has no basis '{name}'; restore it from a copy.")
    return shard.file.read(name).float()
