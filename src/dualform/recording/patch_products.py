"""Summaries of a convolution in few calls of torch.

They are those of `contraction.py`. On a GPU a step of a convolutional network waits for the
interpreter, and so for the number of calls. What does not change from step to step is therefore
made once: a convolution whose keys and values have the shapes of before is summarized by a function
that knows how.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from dualform.layers.patches import errors_at_inputs, patches
from dualform.ledger import Stream
from dualform.recording.contraction import is_cheaper_first

Products: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Of keys and values: errors along U, (samples, rows, k_o), and summaries."""
Summarize: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Of errors along U, (samples, k_o, rows), and keys: summaries."""
CONVOLVE = (F.conv1d, F.conv2d, F.conv3d)


def patch_products(
    stream: Stream, keys: Tensor, values: Tensor, U: Tensor | None, V: Tensor | None, samples: int
) -> Products | None:
    """What makes summaries of a convolution with keys and values like these.

    None where samples have several records, or `summaries_of` has to look closer.

    >>> layout = dict(kernel=[1], stride=[1], dilation=[1], groups=1, padding=[[0, 0]])
    >>> line = Stream("conv", (1, 4), (1, 4), dict(kind="patches", **layout))
    >>> x, one = torch.arange(4.0)[None], torch.ones(1, 1)
    >>> errors, summaries = patch_products(line, x, x, one, one, 1)(x, x)
    >>> summaries.tolist()
    [[[14.0]]]
    """
    layout = stream.layout
    if not layout or "stuffing" in layout or layout["groups"] > 1:
        return None
    if len(keys) != samples or len(values) != samples:
        return None
    height = stream.values[0]
    summarize = _summarize(stream, height if U is None else U.shape[1], V, samples)
    if summarize is None:
        return None
    onto = None if U is None else U.T.contiguous().expand(samples, -1, -1)

    def products(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        errors = values.reshape(samples, height, -1)
        if onto is not None:
            errors = torch.bmm(onto, errors)
        return errors.mT, summarize(errors, keys)

    return products


def _summarize(stream: Stream, outputs: int, V: Tensor | None, samples: int) -> Summarize | None:
    """The cheapest way to bring the errors of a convolution and its inputs together."""
    layout, (channels, *before) = stream.layout, stream.keys
    places = math.prod(stream.values[1:])
    errors_first = V is None or is_cheaper_first(places, outputs, *V.shape)
    padded = any(number for pair in layout["padding"] for number in pair)
    if all(size == 1 for size in layout["kernel"]) and not padded:
        return _of_points(stream, V, samples, errors_first)
    if V is None:
        return None
    if not errors_first:
        even = all(pair[0] == pair[1] for pair in layout["padding"])
        return _of_convolved_inputs(stream, V, samples) if even else None
    if channels * places < outputs * math.prod(before):
        return lambda errors, keys: torch.bmm(errors, patches(stream, keys)) @ V
    return _of_moved_errors(stream, V, samples)


def _of_points(stream: Stream, V: Tensor | None, samples: int, errors_first: bool) -> Summarize:
    """Of a kernel of 1: a matrix product at each place that is looked at."""
    channels, strides = stream.keys[0], stream.layout["stride"]
    every: list[Any] = [slice(None, None, stride) for stride in strides]
    strided = any(stride > 1 for stride in strides)
    along = None if V is None else V.T.contiguous().expand(samples, -1, -1)

    def summarize(errors: Tensor, keys: Tensor) -> Tensor:
        x = keys.reshape(samples, *stream.keys)[(..., *every)] if strided else keys
        x = x.reshape(samples, channels, -1)
        if V is None or along is None:
            return torch.bmm(errors, x.mT)
        if errors_first:
            return torch.bmm(errors, x.mT) @ V
        return torch.bmm(errors, torch.bmm(along, x).mT)

    return summarize


def _of_convolved_inputs(stream: Stream, V: Tensor, samples: int) -> Summarize:
    """Patches along V are what a convolution with V gives."""
    layout, channels = stream.layout, stream.keys[0]
    kernel = V.T.reshape(-1, channels, *layout["kernel"]).contiguous()
    convolve = CONVOLVE[len(layout["kernel"]) - 1]
    around = [pair[0] for pair in layout["padding"]]

    def summarize(errors: Tensor, keys: Tensor) -> Tensor:
        x = keys.reshape(samples, *stream.keys)
        seen = convolve(x, kernel, None, layout["stride"], around, layout["dilation"])
        return torch.bmm(errors, seen.flatten(2).mT)

    return summarize


def _of_moved_errors(stream: Stream, V: Tensor, samples: int) -> Summarize:
    """Errors are moved to the inputs that they come of, offset by offset, and V is turned to them.

    Offsets are counted from the last number of a patch, and channels go last.
    """
    channels = stream.keys[0]
    turned = V.view(channels, -1, V.shape[1]).flip(1).transpose(0, 1).reshape(V.shape)

    def summarize(errors: Tensor, keys: Tensor) -> Tensor:
        seen = errors_at_inputs(stream, errors)
        found = torch.bmm(seen, keys.reshape(samples, channels, -1).mT)
        return found.view(samples, errors.shape[1], -1) @ turned

    return summarize
