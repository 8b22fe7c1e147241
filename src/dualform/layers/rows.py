"""From stored records to rows: most records are one row, a convolution's are many."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dualform.layers.conv import at_positions, patches, responses
from dualform.ledger import Stream
from dualform.memory.blocks import by_group


def positions(stream: Stream) -> int:
    """How many rows there are in one record.

    >>> positions(Stream("conv", (3, 8, 8), (16, 6, 6), {"kind": "patches"}))
    36
    """
    return math.prod(stream.values[1:]) if stream.layout else 1


def expand(stream: Stream, keys: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Records as rows: (rows, width) of keys, and of values where there are any.

    >>> expand(Stream("fc", (3,), (2,)), torch.zeros(5, 3), torch.zeros(5, 2))[0].shape
    torch.Size([5, 3])
    """
    if not stream.layout:
        return keys, values
    if values is not None:
        values = at_positions(stream, values).flatten(0, 1)
    return patches(stream, keys).flatten(0, 1), values


def inner_products(stream: Stream, keys: Tensor, vectors: Tensor) -> Tensor:
    """(rows, groups, vectors): what the keys of an outer term give with some vectors.

    >>> stream, keys, vectors = Stream("fc", (3,), (2,)), torch.ones(5, 3), torch.ones(3, 4)
    >>> inner_products(stream, keys, vectors).shape
    torch.Size([5, 1, 4])
    """
    if stream.layout:
        return responses(stream, keys, vectors)
    return torch.matmul(by_group(keys, keys.shape[1] // len(vectors)), vectors)
