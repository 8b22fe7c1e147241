"""The rows of matrix products as they were stored: their keys compared, or all of them loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.ledger import Stream
from dualform.read.engine import ShardRange
from dualform.read.grouping import Grouping
from dualform.read.scan import Chunk, chunks
from dualform.read.stream_folds import CollectedRows, StreamFold


@dataclass(frozen=True)
class KeySimilarity(StreamFold[Tensor]):
    """`Σ |x·q|` over the rows of each group."""

    read: tuple[Stream, ...]
    queries: Tensor
    """(queries, width)."""
    grouping: Grouping
    device: torch.device | str = "cpu"

    @property
    def read_streams(self) -> tuple[Stream, ...]:
        """Those whose keys are compared."""
        return self.read

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
class StoredRows(CollectedRows):
    """Keys of all rows, and values times the coefficients of their steps."""

    numbers: Tensor
    """(T + 1,): the coefficient of a row by its step's number."""

    def of(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Copies."""
        values = chunk.values * self.numbers[chunk.steps].to(chunk.values)[:, None]
        return chunk.keys.clone(), values
