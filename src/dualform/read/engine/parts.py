"""How shards are cut into parts, and in which order what the parts give is merged.

Both depend on the run and the fold alone, not on who folds: so every engine rounds the same sums
in the same places, and gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from dualform.read.engine.interface import Fold, Partial
from dualform.read.engine.shards import ShardRange

T = TypeVar("T")

PARTS = 256
"""How many parts there are at most."""
PART_BYTES = 64 << 20
"""How large the files of a part are at least: to hand out less costs more than it gains."""
PARTIAL_SHARE = 8
"""How many times as large as a partial result they are at least: merging must cost little."""


def in_parts(
    fold: Fold[Partial], shards: Sequence[ShardRange], part_bytes: int = PART_BYTES
) -> list[list[ShardRange]]:
    """The shards in runs of neighbors, each of which gives a partial result."""
    each = max(1, part_bytes, PARTIAL_SHARE * fold.partial_bytes)
    most = sum(shard.nbytes for shard in shards) // each
    return split(shards, min(PARTS, max(1, most)))


def split(shards: Sequence[ShardRange], parts: int) -> list[list[ShardRange]]:
    """The shards in so many runs of neighbors at most, of about as many steps each.

    >>> from dualform.ledger import Ledger
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


def in_tree(merge: Callable[[T, T], T], partials: Iterable[T]) -> T:
    """Merges neighbors, then neighbors of what that gives; at most a few are held at a time.

    >>> in_tree(lambda one, other: f"({one}{other})", "abcdefg")
    '(((ab)(cd))((ef)g))'
    """
    held: list[tuple[int, T]] = []
    for partial in partials:
        size = 1
        while held and held[-1][0] == size:
            partial, size = merge(held.pop()[1], partial), 2 * size
        held.append((size, partial))
    _, merged = held.pop()
    while held:
        merged = merge(held.pop()[1], merged)
    return merged
