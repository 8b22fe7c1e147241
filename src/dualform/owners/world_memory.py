"""What worlds hold: copies of the memory that differs there, and no more of them than fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from dualform.private import storage_key

HOST_BYTES = 2 << 30
"""How much memory all worlds together may take on a CPU."""
DEVICE_SHARE = 50
"""On a GPU they may take the device's memory divided by this, if that is more, and never more than
half of what is free: a forward pass has room for as much as the backward pass will need."""
OPERATION_SHARE = 4
"""The results of one operation, in all worlds together, may take all this divided by that."""
LEAST = 2
"""So many worlds are enough to tell whether rows follow a pattern."""
SMALL = 4096
"""What is smaller than all memory of worlds divided by this is never let go to make room."""
CALLS = 32
"""After so many operations, copies are let go whose tensors are no more."""


@dataclass(slots=True)
class WorldMemory:
    """A piece of memory: its bytes from `start` to `end` in each world, where they differ."""

    ref: StorageWeakRef
    start: int
    end: int
    copies: list[UntypedStorage | None]
    lost: set[int] = field(default_factory=set)
    """The worlds in which nobody knows what it holds, since there was no room for it."""
    used: int = 0
    """When an operation was given it last."""
    decided: bool = False
    """Whether it holds integers which the data decided."""
    moved: bool = False
    """Whether its elements are where such integers said."""

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum([copy.nbytes() for copy in self.copies if copy is not None])

    @property
    def differs(self) -> bool:
        """Whether it differs in some world, or may."""
        return bool(self.lost) or any(copy is not None for copy in self.copies)

    def lose(self, worlds: Iterable[int]) -> None:
        """Lets copies go: what these worlds hold here is not known any more."""
        for world in worlds:
            self.copies[world] = None
            self.lost.add(world)


class WorldMemories:
    """The pieces of memory that worlds hold copies of.

    All copies together take at most `room` bytes. Where more is needed, copies go that no operation
    has used for the longest time: first in all worlds but the first `kept`, then in these. What a
    world held there is *lost*, and so is what later operations make of it in that world.

    >>> memories, x = WorldMemories(worlds=3, room=200), torch.zeros(5)
    >>> memories.affordable([0, 1, 2], nbytes=20), memories.affordable([0, 1, 2], nbytes=30)
    ([0, 1], [])
    """

    def __init__(self, worlds: int, room: int, kept: int = LEAST) -> None:
        self._worlds, self._room, self._kept = worlds, room, kept
        self._pieces: dict[int, WorldMemory] = {}
        self._bytes, self._now = 0, 0

    @property
    def nbytes(self) -> int:
        """Bytes of all copies in all worlds."""
        return sum([piece.nbytes for piece in self._pieces.values()])

    def get(self, tensor: Tensor) -> WorldMemory | None:
        """The piece that a tensor is in, where a world has held a copy of it."""
        return self._pieces.get(key_of(tensor))

    def of(self, tensor: Tensor) -> WorldMemory:
        """The piece that a tensor is in, which may be new."""
        key = key_of(tensor)
        if key not in self._pieces:
            real = tensor.untyped_storage()
            ref = StorageWeakRef(real)  # type: ignore[no-untyped-call]
            piece = WorldMemory(ref, 0, real.nbytes(), [None] * self._worlds, used=self._now)
            self._pieces[key] = piece
        return self._pieces[key]

    def use(self, given: Sequence[Tensor]) -> list[WorldMemory]:
        """The pieces that an operation is given now."""
        found = [piece for t in given if (piece := self._pieces.get(key_of(t))) is not None]
        for piece in found:
            piece.used = self._now
        return found

    def can_own(self, tensor: Tensor, world: int) -> bool:
        """Whether there is room for one more copy, as one operation may make them."""
        piece = self.of(tensor)
        if piece.copies[world] is not None:
            return True
        size = piece.end - piece.start
        fits = piece.nbytes + size <= self._room // OPERATION_SHARE
        return fits and self._make_room(size)

    def own(self, tensor: Tensor, world: int) -> None:
        """Gives a world its own copy of a tensor's memory."""
        piece = self.of(tensor)
        if piece.copies[world] is None:
            copy = _copy(tensor.untyped_storage(), piece.start, piece.end)
            self.hold(piece, world, copy)

    def hold(self, piece: WorldMemory, world: int, copy: UntypedStorage) -> None:
        """Takes a copy over."""
        piece.copies[world] = copy
        self._bytes += copy.nbytes()

    def span(self, tensors: Sequence[Tensor]) -> None:
        """Copies of what may be a part of a whole dataset are no larger than they must be."""
        for tensor in tensors:
            new, (start, end) = key_of(tensor) not in self._pieces, extent(tensor)
            piece = self.of(tensor)
            if not any(piece.copies):
                piece.start = start if new else min(piece.start, start)
                piece.end = end if new else max(piece.end, end)

    def missing(self, tensors: Iterable[Tensor], worlds: Iterable[int]) -> int:
        """How many bytes a world needs to hold tensors that some world holds no copies of."""
        sizes = {}
        for tensor in tensors:
            piece = self.get(tensor)
            if piece is None or any(piece.copies[world] is None for world in worlds):
                size = tensor.untyped_storage().nbytes()
                sizes[key_of(tensor)] = size if piece is None else piece.end - piece.start
        return sum(sizes.values())

    def affordable(self, worlds: Sequence[int], nbytes: int) -> Sequence[int]:
        """Those worlds that an operation can be made in, if it takes so many bytes in each.

        They are the first ones, at least two of them; otherwise there are none.
        """
        if not nbytes:
            return worlds
        fit = self._room // OPERATION_SHARE // nbytes
        if fit < min(LEAST, len(worlds)):
            return []
        made = worlds[:fit]
        return made if self._make_room(nbytes * len(made)) else []

    def tick(self) -> None:
        """The next operation is about to be made."""
        self._now += 1
        if self._now % CALLS == 0:
            self._tidy()

    def drop(self, worlds: Iterable[int]) -> None:
        """Lets go of worlds."""
        for piece in self._pieces.values():
            for world in worlds:
                piece.copies[world] = None

    def clear(self) -> None:
        """Lets go of everything."""
        self._pieces.clear()

    def _tidy(self) -> None:
        """Forgets memory that is no more."""
        gone = [key for key, piece in self._pieces.items() if piece.ref.expired()]  # type: ignore[no-untyped-call]
        for key in gone:
            del self._pieces[key]
        self._bytes = self.nbytes

    def _make_room(self, nbytes: int) -> bool:
        """Lets copies go until there is room for so many bytes; whether there is."""
        if self._bytes + nbytes <= self._room:
            return True
        self._tidy()
        idle = [p for p in self._pieces.values() if p.used < self._now]
        idle = [p for p in idle if p.end - p.start >= self._room // SMALL]
        idle.sort(key=lambda piece: piece.used)
        for kept in (self._kept, 0):
            for piece in idle:
                if self._bytes + nbytes <= self._room:
                    return True
                self._bytes -= piece.nbytes
                held = [w for w, copy in enumerate(piece.copies) if copy is not None]
                piece.lose(w for w in held if w >= kept)
                self._bytes += piece.nbytes
        return self._bytes + nbytes <= self._room


def room_for(tensor: Tensor) -> int:
    """How many bytes worlds may take where a tensor is.

    >>> room_for(torch.zeros(1)) == HOST_BYTES
    True
    """
    if not tensor.is_cuda:
        return HOST_BYTES
    free, total = torch.cuda.mem_get_info(tensor.device)
    return min(free // 2, max(HOST_BYTES, total // DEVICE_SHARE))


def key_of(tensor: Tensor) -> int:
    """What names the memory that a tensor is in."""
    return storage_key(tensor.untyped_storage())


def extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its memory, and the one after its last.

    >>> extent(torch.zeros(10)[2:5])
    (8, 20)
    """
    start = int(tensor.storage_offset())
    last = sum([(n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)])
    length = last + 1 if tensor.numel() else 0
    return start * tensor.itemsize, (start + length) * tensor.itemsize


def _copy(real: UntypedStorage, start: int, end: int) -> UntypedStorage:
    held = torch.empty(0, dtype=torch.uint8, device=real.device).set_(real)
    copy: UntypedStorage = held[start:end].clone().untyped_storage()
    return copy
