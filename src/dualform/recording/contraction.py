"""Summaries of a layer's rows: `Uᵀ (Σ e ⊗ x) V` of each sample, by the cheapest order of products.

Errors are taken along U first. Then either these few are multiplied with whole inputs, which gives
each sample's gradient of as many outputs as U has directions, and that is taken along V; or inputs
are taken along V row by row. The first is cheaper where a sample has many rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualform.layers.patches import convolved, filter_gradients
from dualform.ledger import Stream


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
    first = V is None or is_cheaper_first(rows, outputs, *V.shape)
    if stream.layout:
        return _of_patches(stream, keys, errors, V, first)
    width = keys.shape[-1]
    if V is None or (first and together == 1):
        sums = errors.mT @ keys.reshape(samples, -1, width)
        return sums if V is None else sums @ V
    return errors.mT @ (keys.reshape(-1, len(V)) @ V).view(samples, rows, -1)


def is_cheaper_first(rows: int, outputs: int, width: int, inputs: int) -> bool:
    """Whether errors times whole inputs, then along V, take fewer products.

    >>> is_cheaper_first(1, 8, 64, 16), is_cheaper_first(1000, 8, 64, 16)
    (False, True)
    """
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
