"""A run, and the engine that reads it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from dualform.ledger import Ledger
from dualform.read.engine.interface import Block, BlockFold, BlockSum, Engine, Fold, Partial
from dualform.read.engine.shards import ShardRange
from dualform.read.engine.threads import Threads


@dataclass(frozen=True)
class RowReader:
    """Reads the rows of a ledger: by which engine, and on which device.

    >>> from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run()
    >>> RowReader(Ledger(run.path)).ledger.last_step
    6
    """

    ledger: Ledger
    device: torch.device | str = "cpu"
    engine: Engine = field(default_factory=Threads)

    def reduce(
        self, fold: Fold[Partial], last: int, first: int = 1, onto: Partial | None = None
    ) -> Partial:
        """What a fold gives over the steps from `first` to `last`."""
        return self.engine.reduce(fold, self.shards(fold, last, first), onto)

    def reduce_blocks(self, fold: BlockFold[Block], last: int) -> Iterator[Block]:
        """The blocks of a fold over the steps up to `last`."""
        return self.engine.reduce_blocks(fold, ShardRange.of(self.ledger, 1, last))

    def sum_blocks(self, asked: BlockSum[Partial], last: int) -> Partial:
        """What the blocks of a question add up to, over the steps up to `last`."""
        return self.engine.sum_blocks(asked, ShardRange.of(self.ledger, 1, last))

    def shards(self, fold: Fold[Partial], last: int, first: int = 1) -> list[ShardRange]:
        """The shards between two steps that a fold has something to read in."""
        shards = ShardRange.of(self.ledger, first, last)
        return [shard for shard in shards if fold.reads(shard)]
