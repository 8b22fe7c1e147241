"""Summaries of a layer's rows: `Uᵀ (Σ e ⊗ x) V` of each sample, by the cheapest order of products.

Errors are taken along U first. Then either these few are multiplied with whole inputs, which gives
each sample's gradient of as many outputs as U has directions, and that is taken along V; or inputs
are taken along V row by row. The first is cheaper where a sample has many rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualform.layers import inner_products
from dualform.layers.patches import filter_gradients
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
    if V is None:
        return _sums(stream, keys, errors)
    (samples, rows, outputs), (width, inputs) = errors.shape, V.shape
    first = outputs * width * (rows + inputs) < rows * inputs * (width + outputs)
    if first and together == 1:
        return _sums(stream, keys, errors) @ V
    if stream.layout:
        records = keys.reshape(-1, *stream.keys)
        return errors.mT @ inner_products(stream, records, V)[:, 0].reshape(samples, rows, inputs)
    return errors.mT @ (keys.reshape(-1, width) @ V).view(samples, rows, inputs // together)


def _sums(stream: Stream, keys: Tensor, errors: Tensor) -> Tensor:
    """(samples, k_o, width): errors times inputs, summed over the rows of a sample."""
    samples, _, outputs = errors.shape
    if not stream.layout:
        return errors.mT @ keys.reshape(samples, -1, keys.shape[-1])
    records = keys.reshape(-1, *stream.keys)
    by_channel = errors.reshape(len(records), -1, outputs).mT
    found = filter_gradients(stream, records, by_channel)
    if len(records) == samples:
        return found
    return found.view(samples, -1, *found.shape[1:]).sum(1)
