"""What the records of a convolution hold: patches, positions, and products without unfolding.

A record is a sample's whole input, beside its errors at all positions.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from dualform.ledger import Stream
from dualform.memory.products import by_group


def patches(stream: Stream, records: Tensor) -> Tensor:
    """(records, positions, channels × kernel): what each output position saw.

    >>> import torch
    >>> layout = dict(kernel=[2], stride=[1], dilation=[1], groups=1, padding=[[0, 0]])
    >>> line = Stream("conv", (1, 4), (1, 3), dict(kind="patches", **layout))
    >>> patches(line, torch.tensor([[1.0, 2.0, 3.0, 4.0]])).tolist()
    [[[1.0, 2.0], [2.0, 3.0], [3.0, 4.0]]]
    """
    layout = stream.layout
    if not stream.keys[0]:  # the stream of an offset
        return records.new_empty(len(records), math.prod(stream.values[1:]), 0)
    if _is_pointwise(stream):
        return _at_strides(stream, records).mT
    x = _prepared(stream, records)
    spans = zip(layout["kernel"], layout["stride"], layout["dilation"], strict=True)
    for axis, (kernel, stride, dilation) in enumerate(spans, start=2):
        x = x.unfold(axis, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
    dims = len(layout["kernel"])
    if "stuffing" in layout:
        x = x.flip(list(range(2 + dims, 2 + 2 * dims)))
    return x.movedim(1, 1 + dims).flatten(1 + dims).flatten(1, dims)


def _is_pointwise(stream: Stream) -> bool:
    """Whether each patch is the channels at one place."""
    return all(size == 1 for size in stream.layout["kernel"])


def _at_strides(stream: Stream, records: Tensor) -> Tensor:
    """(records, channels, positions): the inputs that a convolution of kernel 1 reads."""
    x = _prepared(stream, records)
    every: list[Any] = [slice(None, None, stride) for stride in stream.layout["stride"]]
    return x[(..., *every)].flatten(2)


def _prepared(stream: Stream, records: Tensor) -> Tensor:
    """The inputs with zeros put in between and around."""
    x, layout = records.reshape(-1, *stream.keys), stream.layout
    if "stuffing" in layout:
        x = _stuff(x, layout["stuffing"])
    around = [p for pair in reversed(layout["padding"]) for p in pair]
    return F.pad(x, around) if any(around) else x


def _stuff(x: Tensor, stuffing: list[int]) -> Tensor:
    sizes = [s * (n - 1) + 1 for s, n in zip(stuffing, x.shape[2:], strict=True)]
    stuffed = x.new_zeros(*x.shape[:2], *sizes)
    every: list[Any] = [slice(None, None, s) for s in stuffing]
    stuffed[(..., *every)] = x
    return stuffed


def at_positions(stream: Stream, records: Tensor) -> Tensor:
    """(records, positions, channels): values of a convolution, position by position.

    >>> import torch
    >>> at_positions(Stream("conv", (1, 4), (2, 3)), torch.arange(6.0)[None]).shape
    torch.Size([1, 3, 2])
    """
    return records.reshape(len(records), stream.values[0], -1).movedim(1, 2)


def filter_gradients(stream: Stream, records: Tensor, errors: Tensor) -> Tensor:
    """(records, filters, width): what errors (records, filters, positions) add to a weight.

    Either the patches of the inputs are unfolded, or errors are: whichever has fewer numbers. The
    weight is one without groups.

    >>> import torch
    >>> layout = dict(kernel=[2], stride=[1], dilation=[1], groups=1, padding=[[0, 0]])
    >>> line = Stream("conv", (1, 4), (1, 3), dict(kind="patches", **layout))
    >>> filter_gradients(line, torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.ones(1, 1, 3))
    tensor([[[6., 9.]]])
    """
    before, after = stream.keys[1:], stream.values[1:]
    fewer = stream.keys[0] * math.prod(after) < errors.shape[1] * math.prod(before)
    if fewer or "stuffing" in stream.layout or _is_pointwise(stream):
        return errors @ patches(stream, records)
    x = records.reshape(len(records), stream.keys[0], -1)
    seen = errors_at_inputs(stream, errors)
    found = (seen @ x.mT).view(*errors.shape[:2], *stream.layout["kernel"], -1)
    found = found.flip(list(range(2, 2 + len(before))))  # offsets were counted from the last
    return found.movedim(-1, 2).flatten(2)


def errors_at_inputs(stream: Stream, errors: Tensor) -> Tensor:
    """(records, filters × kernel, inputs): the error at the patch that has an input at an offset.

    Offsets in a patch are counted from its last number.

    >>> import torch
    >>> layout = dict(kernel=[2], stride=[1], dilation=[1], groups=1, padding=[[0, 0]])
    >>> line = Stream("conv", (1, 4), (1, 3), dict(kind="patches", **layout))
    >>> errors_at_inputs(line, torch.tensor([[[1.0, 2.0, 3.0]]])).tolist()
    [[[0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 0.0]]]
    """
    layout, before = stream.layout, stream.keys[1:]
    spread = errors.reshape(*errors.shape[:2], *stream.values[1:])
    if any(stride > 1 for stride in layout["stride"]):
        spread = _stuff(spread, layout["stride"])
    reaches = [d * (k - 1) for d, k in zip(layout["dilation"], layout["kernel"], strict=True)]
    around: list[int] = []
    for size, reach, padding, kept in zip(
        before, reaches, layout["padding"], spread.shape[2:], strict=True
    ):
        left = reach - padding[0]
        around = [left, size + reach - left - kept, *around]
    if any(around):
        spread = F.pad(spread, around)
    for axis, (size, dilation) in enumerate(zip(before, layout["dilation"], strict=True), start=2):
        spread = spread.unfold(axis, size, dilation)
    return spread.reshape(len(errors), -1, math.prod(before))


def gradient_row(stream: Stream, records: Tensor, values: Tensor, channel: int) -> Tensor:
    """(channels × kernel,): the rows' sum for one output channel, found without unfolding.

    >>> import torch
    >>> layout = dict(kernel=[2], stride=[1], dilation=[1], groups=1, padding=[[0, 0]])
    >>> line = Stream("conv", (1, 4), (1, 3), dict(kind="patches", **layout))
    >>> gradient_row(line, torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.ones(1, 3), 0)
    tensor([6., 9.])
    """
    layout, dims = stream.layout, len(stream.keys) - 1
    width = stream.keys[0] // layout["groups"]
    first = channel * layout["groups"] // stream.values[0] * width
    errors = values.reshape(-1, *stream.values)[:, channel : channel + 1]
    weight = (conv1d_weight, conv2d_weight, conv3d_weight)[dims - 1]
    found: Tensor = weight(  # type: ignore[no-untyped-call]
        _prepared(stream, records)[:, first : first + width],
        (1, width, *layout["kernel"]),
        errors,
        stride=layout["stride"],
        dilation=layout["dilation"],
    )
    if "stuffing" in layout:
        found = found.flip(list(range(2, 2 + dims)))
    return found.flatten()


def responses(stream: Stream, records: Tensor, vectors: Tensor) -> Tensor:
    """(rows, groups, vectors): each patch times some vectors, found without unfolding.

    >>> import torch
    >>> layout = dict(kernel=[2], stride=[1], dilation=[1], groups=1, padding=[[0, 0]])
    >>> line = Stream("conv", (1, 4), (1, 3), dict(kind="patches", **layout))
    >>> responses(line, torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.ones(2, 1)).flatten()
    tensor([3., 5., 7.])
    """
    out = convolved(stream, records, vectors).flatten(2)
    found: Tensor = by_group(out, stream.layout["groups"]).permute(0, 3, 1, 2).flatten(0, 1)
    return found


def convolved(stream: Stream, records: Tensor, vectors: Tensor) -> Tensor:
    """(records, groups × vectors, *positions): the same as a convolution gives it.

    >>> import torch
    >>> layout = dict(kernel=[2], stride=[1], dilation=[1], groups=1, padding=[[0, 0]])
    >>> line = Stream("conv", (1, 4), (1, 3), dict(kind="patches", **layout))
    >>> convolved(line, torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.ones(2, 1))
    tensor([[[3., 5., 7.]]])
    """
    layout, dims, groups = stream.layout, len(stream.keys) - 1, stream.layout["groups"]
    if groups == 1 and _is_pointwise(stream):
        return (vectors.T @ _at_strides(stream, records)).view(len(records), -1, *stream.values[1:])
    kernel = vectors.T.reshape(-1, stream.keys[0] // groups, *layout["kernel"])
    if "stuffing" in layout:
        kernel = kernel.flip(list(range(2, 2 + dims)))
    convolve = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    return convolve(
        _prepared(stream, records),
        kernel.repeat(groups, *[1] * (dims + 1)),
        stride=layout["stride"],
        dilation=layout["dilation"],
        groups=groups,
    )
