"""Rows: sample by sample, and from stored records, of which a convolution's are many rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dualform.layers.patches import at_positions, patches, responses
from dualform.layers.use import Rows
from dualform.ledger import Stream
from dualform.memory.products import by_group


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


def by_sample(rows: Rows, samples: int, usual: int = 0) -> tuple[Tensor, Tensor] | None:
    """Keys and values of a use, row by row, sorted by sample; None where nothing counts samples.

    `usual` is the dimension that counts samples where shapes leave it open.
    """
    assert rows.values is not None
    # A view of a tensor with a history would keep all of that history alive.
    site, keys, values = rows.site, rows.keys.detach(), rows.values.detach()
    lead = tuple(keys.shape[: keys.ndim - site.key_dims])
    stretch = arrangement(lead, samples, site.axis, site.key_dims > 0, usual)
    if stretch is None:
        return None
    sided = ((keys, site.key_dims), (values, site.value_dims))
    shapes = [tuple(t.shape[t.ndim - d :]) or (1,) for t, d in sided]
    stream = Stream(site.label, shapes[0], shapes[1], dict(site.layout))
    x, e = expand(stream, *(sample_major(t[None], samples, stretch, d) for t, d in sided))
    assert e is not None
    return x, e


def arrangement(
    lead: tuple[int, ...], samples: int, axis: int | None, folded: bool, usual: int = 0
) -> int | None:
    """How many neighboring rows a shape proposes for each sample; None where it proposes nothing.

    Several positions may be folded into the first dimension, sample by sample (or position by
    position, where `usual` or `axis` says that samples come second).

    >>> arrangement((8, 5), 8, None, True), arrangement((5, 8), 8, None, True)
    (5, 1)
    >>> arrangement((40,), 8, None, True), arrangement((1, 5), 8, None, True)
    (5, None)
    >>> arrangement((1, 5), 1, None, False)  # all rows are those of a single sample
    5
    """
    rows = math.prod(lead)
    if samples == 1:
        return rows
    if not lead or samples == 0:
        return None
    wanted = usual if axis is None else axis
    if axis is None and lead[0] == samples and not (usual and len(lead) > 1 and lead[1] == samples):
        return rows // samples
    if len(lead) > 1 and lead[1] == samples and (wanted == 1 or lead[0] > 1) and axis != 0:
        return math.prod(lead[2:])
    fits = lead[0] % samples == 0 and (folded or lead[0] == samples)
    if not fits:
        return None
    return 1 if wanted == 1 and len(lead) == 1 else rows // samples


def sample_major(slots: Tensor, samples: int, stretch: int, dims: int) -> Tensor:
    """(slots × rows, …): slots whose rows are brought into the order of samples, then flattened.

    `stretch` is how many neighboring rows belong to one sample.

    >>> import torch
    >>> slots = torch.arange(6).reshape(1, 3, 2, 1)  # one slot: 3 positions, 2 samples
    >>> sample_major(slots, 2, stretch=1, dims=1).flatten()
    tensor([0, 2, 4, 1, 3, 5])
    """
    cut = slots.ndim - dims
    rows, width = math.prod(slots.shape[1:cut]), math.prod(slots.shape[cut:])
    around = rows // max(1, samples * stretch)
    if around > 1:
        slots = slots.reshape(len(slots), around, samples, stretch, width).transpose(1, 2)
    return slots.reshape(len(slots) * rows, width)
