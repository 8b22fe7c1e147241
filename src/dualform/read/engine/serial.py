"""Folding in this process, one shard after the other; and how far a fold is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dualform.read.engine.interface import Block, BlockFold, Engine, Fold, Partial
from dualform.read.engine.shards import ShardRange
from dualform.read.progress import LateProgress, reporting


class Serial(Engine):
    """Folds one shard after the other."""

    def reduce(
        self, fold: Fold[Partial], shards: Sequence[ShardRange], onto: Partial | None = None
    ) -> Partial:
        """The result of all shards."""
        with fold_progress(fold, shards) as progress, reporting(progress.advance):
            return fold_all(fold, shards, fold.start() if onto is None else onto)

    def reduce_blocks(
        self, fold: BlockFold[Block], shards: Sequence[ShardRange]
    ) -> Iterator[Block]:
        """All shards are one part, since a block is made of rows from all of them."""
        return fold.blocks(shards)


def fold_all(fold: Fold[Partial], shards: Sequence[ShardRange], partial: Partial) -> Partial:
    """A partial result, and some shards more, one after the other."""
    for shard in shards:
        partial = fold.fold(partial, shard)
    return partial


def fold_progress(fold: Fold[Partial], shards: Sequence[ShardRange]) -> LateProgress:
    """How far a fold is, in steps of each stream."""
    name = fold.streams[0] if len(fold.streams) == 1 else f"{len(fold.streams)} layers"
    return LateProgress(name, steps_read(fold, shards))


def steps_read(fold: Fold[Partial], shards: Sequence[ShardRange]) -> int:
    """How many steps a fold reads of all its streams together."""
    return sum(s.steps for s in shards for stream in fold.streams if s.holds(stream))
