"""What an engine is asked to do: folds over shards, and the merging of what they give."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from dualform.read.engine.shards import ShardRange

Partial = TypeVar("Partial")
Block = TypeVar("Block")


class Part(ABC):
    """Some records of a stream in a shard, as arrays that an engine can read ahead of a fold."""

    @property
    @abstractmethod
    def stream(self) -> str:
        """The stream's name."""

    @property
    @abstractmethod
    def arrays(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each array."""

    @abstractmethod
    def reads(self, into: Mapping[str, Tensor]) -> Iterator[Callable[[], object]]:
        """Calls that fill the arrays in main memory, in any order and side by side."""


class Fold(ABC, Generic[Partial]):
    """A question to the rows, as plain data: it can be sent to wherever the shards are.

    A fold is a dataclass of names, numbers, tensors and other such dataclasses. It holds no ledger,
    no open file and no function. Folding shards in any order, and merging partial results of any
    partition, gives the same result up to rounding.
    """

    device: torch.device | str = "cpu"
    rounds: ClassVar[bool] = True
    """Whether sums are rounded; if not, any partition gives the same bits."""

    @property
    @abstractmethod
    def streams(self) -> Sequence[str]:
        """The names of the streams that it reads."""

    def reads(self, shard: ShardRange) -> bool:
        """Whether there is something for it in a shard; others are not folded."""
        return any(map(shard.holds, self.streams))

    def parts(self, shard: ShardRange, chunk_bytes: int) -> Iterator[Part] | None:
        """What it reads of a shard, in this order, for engines that read ahead, or None.

        Args:
            chunk_bytes: how much it may read at a time.
        """
        return None

    @abstractmethod
    def start(self) -> Partial:
        """The result of no shard."""

    @abstractmethod
    def fold(self, partial: Partial, shard: ShardRange) -> Partial:
        """A partial result, and a shard more; in place where that is cheaper."""

    @abstractmethod
    def merge(self, one: Partial, other: Partial) -> Partial:
        """The result of two partitions of shards; of the earlier steps first."""

    @property
    def partial_bytes(self) -> int:
        """How large a partial result is: each worker has one."""
        return 0


class BlockFold(ABC, Generic[Block]):
    """A fold whose result is too large for memory, and comes in blocks.

    Every partition of the shards gives the same sequence of blocks; those at the same place are
    merged. A block is valid until the next.
    """

    @abstractmethod
    def blocks(self, shards: Sequence[ShardRange]) -> Iterator[Block]:
        """What some shards give, block by block."""

    @abstractmethod
    def merge(self, one: Block, other: Block) -> Block:
        """A block of two partitions of shards; may reuse the memory of the first."""


class BlockSum(ABC, Generic[Partial]):
    """What the blocks of a question add up to, as plain data: so that no block need be sent.

    It is cut otherwise than by shards: each piece reads whatever it needs of all of them. Pieces
    add up to the whole, up to rounding.
    """

    @property
    def device(self) -> torch.device | str:
        """Where it is computed."""
        return "cpu"

    @abstractmethod
    def cut(self, pieces: int) -> Sequence[BlockSum[Partial]]:
        """The same in so many pieces at most."""

    @abstractmethod
    def total(self, shards: Sequence[ShardRange]) -> Partial:
        """What its blocks add up to."""

    @abstractmethod
    def merge(self, one: Partial, other: Partial) -> Partial:
        """The sum of two pieces, which are neighbors."""


class Engine(ABC):
    """Who folds: it decides how shards are partitioned and where each part is folded."""

    @property
    def speedup(self) -> float:
        """How many times as fast as this process it folds."""
        return 1.0

    @abstractmethod
    def reduce(
        self, fold: Fold[Partial], shards: Sequence[ShardRange], onto: Partial | None = None
    ) -> Partial:
        """The result of all shards; merged with an earlier one, which is lost, if there is one."""

    @abstractmethod
    def reduce_blocks(
        self, fold: BlockFold[Block], shards: Sequence[ShardRange]
    ) -> Iterator[Block]:
        """The blocks of all shards, in order."""

    def sum_blocks(self, asked: BlockSum[Partial], shards: Sequence[ShardRange]) -> Partial:
        """What the blocks of a question add up to; by this process, unless an engine knows more."""
        return asked.total(shards)


class Scratch:
    """What a worker may keep from one fold to the next, such as memory or an index.

    It stays where it is: a fold that is sent elsewhere begins with nothing.

    >>> import pickle
    >>> scratch = Scratch()
    >>> scratch.get("index", lambda: [1, 2]), scratch.get("index", list)
    ([1, 2], [1, 2])
    >>> pickle.loads(pickle.dumps(scratch)).get("index", list)
    []
    """

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        """What is known under a key; made the first time."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def __reduce__(self) -> tuple[type[Scratch], tuple[()]]:
        return Scratch, ()
