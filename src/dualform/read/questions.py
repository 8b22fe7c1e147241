"""From a layer's inputs and an output to linear questions about its parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from dualform.ledger import Book, Stream, Term
from dualform.memory.blocks import (
    Bilinear,
    Functional,
    as_matrix,
    by_group,
    matrix_shape,
)
from dualform.memory.views import View


def seen_as(book: Book, term: Term) -> View:
    """How a term sees its parameter as a matrix."""
    return View(book.shape, term.view, term.groups)


def layer_output(
    stream: Stream, terms: Mapping[str, Term], parameters: Mapping[str, Tensor], keys: Tensor
) -> Tensor:
    """(queries, outputs): what a stream's parameters make of its keys, in float64."""
    width = stream.values[0] if stream.layout else math.prod(stream.values)
    total = torch.zeros(len(keys), width, dtype=torch.float64)
    for book, term in terms.items():
        matrix = as_matrix(parameters[book].double(), term.view, term.groups)
        total += term_output(term, matrix, keys, width)
    return total


def term_output(term: Term, matrix: Tensor, keys: Tensor, width: int) -> Tensor:
    """(queries, outputs), or one for all: what one parameter, seen as a matrix, makes of keys."""
    top, left = term.at
    if term.form == "lookup":
        return matrix[keys[:, 0] + top, left : left + width]
    keys = keys.double()
    if term.form == "sum":
        return matrix[top : top + width, 0]
    if term.form == "scale":
        return keys * matrix[top : top + keys.shape[1], 0]
    if term.groups == 1:
        return keys @ matrix[top : top + width, left : left + keys.shape[1]].T
    weight = by_group(matrix[None], term.groups)[0]
    return torch.einsum("goi,qgi->qgo", weight, by_group(keys, term.groups)).flatten(1)


def functional(
    book: Book, term: Term, keys: Tensor, directions: Tensor, units: Tensor | None
) -> Functional | Bilinear:
    """The question that queries put to one parameter.

    `units` are the outputs asked about, where every direction is a single one.
    """
    height, width = matrix_shape(book.shape, term.view, term.groups)
    top, left = term.at
    if term.form == "lookup":
        return Functional(keys[:, 0] + top, _placed(directions, left, width))
    keys = keys.double()
    if term.form == "outer" and term.groups > 1:
        return _grouped(term, keys, directions, units)
    if term.form == "outer":
        beta = _placed(keys, left, width)
    else:
        beta = torch.ones(len(directions), 1, dtype=torch.float64)
    if term.form == "scale":
        if units is None:
            directions = directions * keys
        else:
            beta = keys.gather(1, units[:, None])
    alpha = _placed(directions, top, height) if units is None else units + top
    return Functional(alpha, beta)


def _grouped(
    term: Term, keys: Tensor, directions: Tensor, units: Tensor | None
) -> Functional | Bilinear:
    grouped = by_group(keys, term.groups)
    size = directions.shape[1] // term.groups
    if units is not None:
        return Functional(units, grouped[torch.arange(len(units)), units // size])
    asked = by_group(directions, term.groups)
    return Bilinear((asked[:, :, :, None] * grouped[:, :, None, :]).flatten(1, 2))


def _placed(part: Tensor, start: int, size: int) -> Tensor:
    """Rows of a block in the width of the whole."""
    return F.pad(part, (start, size - start - part.shape[1]))
