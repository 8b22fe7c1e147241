"""Folds that go through the chunks of some streams, so that an engine can read ahead of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dualform.ledger import Stream
from dualform.read.engine import Fold, Part, ShardRange
from dualform.read.engine.interface import Partial
from dualform.read.scan import COLUMNS, Chunk, chunk_parts, chunks


class StreamFold(Fold[Partial]):
    """Goes through the chunks of each stream that it reads, one stream after the other."""

    @property
    @abstractmethod
    def read_streams(self) -> Sequence[Stream]:
        """The streams, in the order in which it goes through them."""

    @property
    def streams(self) -> list[str]:
        """Their names."""
        return [stream.name for stream in self.read_streams]

    def parts(self, shard: ShardRange, chunk_bytes: int) -> Iterator[Part]:
        """What the chunks are made of."""
        for stream in self.read_streams:
            yield from chunk_parts(shard, stream, chunk_bytes, COLUMNS)


@dataclass(frozen=True)
class CollectedRows(StreamFold[list[tuple[Tensor, ...]]]):
    """Something of every row of a stream, chunk behind chunk, in the order of time."""

    stream: Stream
    device: torch.device | str = field(default="cpu", kw_only=True)

    @abstractmethod
    def of(self, chunk: Chunk) -> tuple[Tensor, ...]:
        """What is collected of a chunk's rows; it must not hold on to the chunk's memory."""

    @property
    def read_streams(self) -> list[Stream]:
        """One."""
        return [self.stream]

    def start(self) -> list[tuple[Tensor, ...]]:
        """No rows."""
        return []

    def fold(
        self, partial: list[tuple[Tensor, ...]], shard: ShardRange
    ) -> list[tuple[Tensor, ...]]:
        """The rows of a shard behind the others."""
        partial.extend(self.of(chunk) for chunk in chunks(shard, self.stream, self.device))
        return partial

    def merge(
        self, one: list[tuple[Tensor, ...]], other: list[tuple[Tensor, ...]]
    ) -> list[tuple[Tensor, ...]]:
        """One behind the other."""
        return one + other
