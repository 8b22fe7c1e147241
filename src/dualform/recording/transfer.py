"""From a GPU to main memory, through a small piece of pinned memory that is used again and again.

A GPU copies to pinned memory several times as fast as to other memory. But to pin memory takes
longer than to copy to it, and holds up whoever calls the GPU meanwhile: the training loop.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

STAGED_BYTES = 32 << 20
PIECE_BYTES = 64 << 20
"""Memory that is used again comes in pieces of at least so many bytes."""
MOST_FREE = 16
"""So many pieces wait to be used again."""
ALIGNED = 64


class _Staging(threading.local):
    """The pinned memory of a thread."""

    def __init__(self) -> None:
        self.memory = torch.empty(STAGED_BYTES, dtype=torch.uint8, pin_memory=True)


_STAGING: list[_Staging] = []


def to_host(array: Tensor) -> Tensor:
    """The array in main memory.

    >>> to_host(torch.ones(2))
    tensor([1., 1.])
    """
    if not array.is_cuda:
        return array.cpu()
    return _copied(array, torch.empty(array.shape, dtype=array.dtype, device="cpu"))


def _copied(array: Tensor, host: Tensor) -> Tensor:
    """An array of a GPU, copied to this memory."""
    if not _STAGING:
        _STAGING.append(_Staging())
    staging, stream = _STAGING[0].memory, torch.cuda.current_stream(array.device)
    source, target = (t.reshape(-1).view(torch.uint8) for t in (array.contiguous(), host))
    for start in range(0, len(source), STAGED_BYTES):
        piece = source[start : start + STAGED_BYTES]
        staged = staging[: len(piece)].copy_(piece, non_blocking=True)
        stream.synchronize()
        target[start : start + STAGED_BYTES].copy_(staged)
    return host


def host_copy(tensor: Tensor) -> Tensor:
    """A copy in main memory, also of what is there already.

    >>> x = torch.ones(2)
    >>> copy = host_copy(x)
    >>> x += 1
    >>> copy
    tensor([1., 1.])
    """
    return to_host(tensor) if tensor.is_cuda else tensor.cpu().clone()


class HostMemory:
    """Main memory for what is on its way from a GPU to a file, used again when it is written.

    The system clears new memory page by page, which takes longer than to copy to it. `copy` and
    `taken` are for one thread; `give_back` is for any.

    >>> memory = HostMemory()
    >>> room = memory.room(1000)
    >>> memory.give_back(memory.taken())
    >>> memory.room(1000).data_ptr() == room.data_ptr()
    True
    """

    def __init__(self) -> None:
        self._free: deque[Tensor] = deque()
        self._taken: list[Tensor] = []
        self._end = 0
        """How much of the last of them is used."""

    def copy(self, array: Tensor) -> Tensor:
        """The array in main memory; in memory that is used again, if it comes from a GPU."""
        if not array.is_cuda:
            return array.cpu()
        return _copied(array, self.room(array.nbytes).view(array.dtype).view(array.shape))

    def room(self, size: int) -> Tensor:
        """(size,): some bytes."""
        start = -(-self._end // ALIGNED) * ALIGNED
        if not self._taken or start + size > len(self._taken[-1]):
            self._taken.append(self._piece(size))
            start = 0
        self._end = start + size
        return self._taken[-1][start : self._end]

    def _piece(self, size: int) -> Tensor:
        for _ in range(len(self._free)):
            piece = self._free.popleft()
            if len(piece) >= size:
                return piece
            self._free.append(piece)
        return torch.empty(max(size, PIECE_BYTES), dtype=torch.uint8, device="cpu")

    def taken(self) -> list[Tensor]:
        """The pieces that were used since the last call; the next room is in others."""
        taken, self._taken, self._end = self._taken, [], 0
        return taken

    def give_back(self, pieces: Iterable[Tensor]) -> None:
        """What was in these pieces is written."""
        for piece in pieces:
            if len(self._free) < MOST_FREE:
                self._free.append(piece)
