"""From a layer's inputs and an output to linear questions about its parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dualform.ledger import Book, Stream, Term
from dualform.memory.blocks import BilinearFunctional, Functional, as_matrix
from dualform.memory.forms import form_named
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
    return form_named(term.form).output(matrix, keys, width, term.groups, term.at)


def functional(
    book: Book, term: Term, keys: Tensor, directions: Tensor, units: Tensor | None
) -> Functional | BilinearFunctional:
    """The question that queries put to one parameter.

    `units` are the outputs asked about, where every direction is a single one.
    """
    size = seen_as(book, term).size
    return form_named(term.form).question(size, keys, directions, units, term.groups, term.at)
