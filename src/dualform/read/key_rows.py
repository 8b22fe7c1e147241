"""The rows of matrix products as they were stored: their keys compared, or all of them loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from dualform.ledger import Stream
from dualform.read.engine import Fold, ShardRange
from dualform.read.grouping import Grouping
from dualform.read.scan import chunks

Loaded: TypeAlias = list[tuple[Tensor, Tensor]]
"""Keys and values of some rows after others."""


@dataclass(frozen=True)
class KeySimilarity(Fold[Tensor]):
    """`Σ |x·q|` over the rows of each group."""

    read: tuple[Stream, ...]
    queries: Tensor
    """(queries, width)."""
    grouping: Grouping
    device: torch.device | str = "cpu"

    @property
    def streams(self) -> list[str]:
        """Those whose keys are compared."""
        return [stream.name for stream in self.read]

    def start(self) -> Tensor:
        """(groups, queries) of zeros."""
        shape = (self.grouping.count, len(self.queries))
        return torch.zeros(shape, dtype=torch.float64, device=self.device)

    def fold(self, partial: Tensor, shard: ShardRange) -> Tensor:
        """Adds a shard's similarities."""
        for stream in self.read:
            for chunk in chunks(shard, stream, self.device):
                similarity = (chunk.keys @ self.queries.to(chunk.keys).T).abs_()
                partial.index_add_(0, self.grouping.of_chunk(chunk), similarity.double())
        return partial

    def merge(self, one: Tensor, other: Tensor) -> Tensor:
        """The sum."""
        return one.add_(other)

    @property
    def partial_bytes(self) -> int:
        """Of all sums."""
        return 8 * self.grouping.count * len(self.queries)


@dataclass(frozen=True)
class StoredRows(Fold[Loaded]):
    """All rows in memory, values times the coefficients of their steps; stream by stream."""

    stream: Stream
    numbers: Tensor
    """(T + 1,): the coefficient of a row by its step's number."""
    device: torch.device | str = "cpu"

    @property
    def streams(self) -> list[str]:
        """One."""
        return [self.stream.name]

    def start(self) -> Loaded:
        """No rows."""
        return []

    def fold(self, partial: Loaded, shard: ShardRange) -> Loaded:
        """The rows of a shard behind the others."""
        for chunk in chunks(shard, self.stream, self.device):
            values = chunk.values * self.numbers[chunk.steps].to(chunk.values)[:, None]
            partial.append((chunk.keys.clone(), values))
        return partial

    def merge(self, one: Loaded, other: Loaded) -> Loaded:
        """One behind the other."""
        return one + other
