"""From a GPU to main memory, through a small piece of pinned memory that is used again and again.

A GPU copies to pinned memory several times as fast as to other memory. But to pin memory takes
longer than to copy to it, and holds up whoever calls the GPU meanwhile: the training loop.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

STAGED_BYTES = 32 << 20


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
    if not _STAGING:
        _STAGING.append(_Staging())
    staging, stream = _STAGING[0].memory, torch.cuda.current_stream(array.device)
    host = torch.empty(array.shape, dtype=array.dtype, device="cpu")
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
