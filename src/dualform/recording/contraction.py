"""Summaries of a layer's rows: `Uᵀ (Σ e ⊗ x) V` of each sample, by the cheapest order of products.

Errors are taken along U first. Then either these few are multiplied with whole inputs, which gives
each sample's gradient of as many outputs as U has directions, and that is taken along V; or inputs
are taken along V row by row. The first is cheaper where a sample has many rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from dualform.layers.patches import convolved, errors_at_inputs, filter_gradients, patches
from dualform.ledger import Stream

Products: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Of keys and values: errors along U, (samples, rows, k_o), and summaries."""


def errors_along(
    stream: Stream, values: Tensor, U: Tensor | None, samples: int, together: int = 1
) -> Tensor:
    """(samples, rows, k_o): errors in the directions of U, of rows in the order of samples.

    U is for so many rows `together`, see `repeated.aligned`.

    >>> errors_along(Stream("fc", (3,), (2,)), torch.ones(4, 2), torch.ones(2, 1), 2).tolist()
    [[[2.0], [2.0]], [[2.0], [2.0]]]
    """
    if stream.layout:
        by_channel = values.reshape(len(values), stream.values[0], -1)
        if U is not None:
            by_channel = torch.bmm(U.T.expand(len(values), -1, -1), by_channel)
        return by_channel.mT.reshape(samples, -1, by_channel.shape[1])
    if U is None:
        return values.reshape(samples, -1, values.shape[-1])
    return (values.reshape(-1, len(U)) @ U).view(samples, -1, U.shape[1] // together)


def summaries_of(
    stream: Stream, keys: Tensor, errors: Tensor, V: Tensor | None, together: int = 1
) -> Tensor:
    """(samples, k_o, k_i): what errors (samples, rows, k_o) give with inputs along V.

    >>> stream, rows = Stream("fc", (3,), (2,)), torch.ones(4, 3)
    >>> summaries_of(stream, rows, torch.ones(2, 2, 1), torch.ones(3, 1)).tolist()
    [[[6.0]], [[6.0]]]
    """
    samples, rows, outputs = errors.shape
    first = V is None or _is_cheaper_first(rows, outputs, *V.shape)
    if stream.layout:
        return _of_patches(stream, keys, errors, V, first)
    width = keys.shape[-1]
    if V is None or (first and together == 1):
        sums = errors.mT @ keys.reshape(samples, -1, width)
        return sums if V is None else sums @ V
    return errors.mT @ (keys.reshape(-1, len(V)) @ V).view(samples, rows, -1)


def _is_cheaper_first(rows: int, outputs: int, width: int, inputs: int) -> bool:
    """Whether errors times whole inputs, then along V, take fewer products."""
    return outputs * width * (rows + inputs) < rows * inputs * (width + outputs)


def _of_patches(
    stream: Stream, keys: Tensor, errors: Tensor, V: Tensor | None, first: bool
) -> Tensor:
    samples, _, outputs = errors.shape
    records = keys.reshape(-1, *stream.keys)
    by_channel = errors.reshape(len(records), -1, outputs).mT
    if V is None or first:
        found = filter_gradients(stream, records, by_channel)
    else:
        found = by_channel @ convolved(stream, records, V).flatten(2).mT
    if len(records) > samples:
        found = found.view(samples, -1, *found.shape[1:]).sum(1)
    return found if V is None or not first else found @ V


def patch_products(
    stream: Stream, keys: Tensor, values: Tensor, U: Tensor | None, V: Tensor | None, samples: int
) -> Products | None:
    """What makes summaries of a convolution with keys and values like these, in few calls of torch.

    On a GPU a step of a convolutional network waits for the interpreter, and so for the number of
    calls. None where samples have several records, or `summaries_of` has to look closer.
    """
    layout = stream.layout
    if U is None or V is None or not layout or "stuffing" in layout or layout["groups"] > 1:
        return None
    if len(keys) != samples or len(values) != samples:
        return None
    inputs, (channels, *before) = stream.keys, stream.keys
    places = math.prod(stream.values[1:])
    first = _is_cheaper_first(places, U.shape[1], *V.shape)
    onto = U.T.contiguous().expand(samples, -1, -1)
    pointwise = all(size == 1 for size in layout["kernel"]) and not _pads(layout)
    every: list[Any] = [slice(None, None, stride) for stride in layout["stride"]]
    strided = any(stride > 1 for stride in layout["stride"])

    def at_places(keys: Tensor) -> Tensor:
        """(samples, channels, positions): what a convolution of kernel 1 reads."""
        x = keys.reshape(samples, *inputs) if strided else keys
        return (x[(..., *every)] if strided else x).reshape(samples, channels, -1)

    if pointwise:
        along = V.T.contiguous().expand(samples, -1, -1)

        def summarize(errors: Tensor, keys: Tensor) -> Tensor:
            x = at_places(keys)
            if first:
                return torch.bmm(errors, x.mT) @ V
            return torch.bmm(errors, torch.bmm(along, x).mT)

    elif not first:
        kernel = V.T.reshape(-1, channels, *layout["kernel"]).contiguous()
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(before) - 1]
        around = [pair[0] for pair in layout["padding"]]
        if any(pair[0] != pair[1] for pair in layout["padding"]):
            return None

        def summarize(errors: Tensor, keys: Tensor) -> Tensor:
            x = keys.reshape(samples, *inputs)
            seen = convolve(x, kernel, None, layout["stride"], around, layout["dilation"])
            return torch.bmm(errors, seen.flatten(2).mT)

    elif channels * places < U.shape[1] * math.prod(before):

        def summarize(errors: Tensor, keys: Tensor) -> Tensor:
            return torch.bmm(errors, patches(stream, keys)) @ V

    else:
        # Offsets in a patch are counted from the last, and channels go last.
        turned = V.view(channels, -1, V.shape[1]).flip(1).transpose(0, 1).reshape(V.shape)

        def summarize(errors: Tensor, keys: Tensor) -> Tensor:
            seen = errors_at_inputs(stream, errors)
            found = torch.bmm(seen, keys.reshape(samples, channels, -1).mT)
            return found.view(samples, errors.shape[1], -1) @ turned

    def products(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        errors = torch.bmm(onto, values.reshape(samples, len(U), -1))
        return errors.mT, summarize(errors, keys)

    return products


def _pads(layout: Any) -> bool:
    return any(number for pair in layout["padding"] for number in pair)
