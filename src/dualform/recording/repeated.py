"""Summaries of calls that are made again and again, in a few products each.

A training loop makes the same calls in every step. What a `Reducer` finds out of the shapes of one
call holds for the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dualform.ledger import Stream, Term
from dualform.memory.summary import Bases
from dualform.recording.bases import BookBases
from dualform.recording.contraction import errors_along, summaries_of
from dualform.recording.pages import Order
from dualform.recording.patch_products import Products, patch_products

ALIGNED, WIDE = 16, 4096
"""Where rows of at least so many numbers do not begin at multiples of so many bytes, see `aligned`.
"""


class Reduced(NamedTuple):
    """What is kept of the rows of one use for one book."""

    book: str
    term: Term
    keys: Tensor
    values: Tensor
    order: Order
    key_dims: int
    value_dims: int
    bases: Bases | None
    """None for sums of an offset or a scale."""
    numbers: str
    """The policy by which the records are stored."""
    reach: Tensor | None = None
    """The sum of the sizes of all terms, number by number, of an offset or a scale."""
    is_made: bool = True
    """Whether keys and values were made for this record, and are nobody else's."""


class Repeated(NamedTuple):
    """How a use of a weight is reduced if the one before it had the same shapes and bases."""

    shape: tuple[torch.Size, torch.Size, torch.dtype, Order]
    """Shapes of keys and values, their type, and the order of rows."""
    like: Reduced
    """The last record, without its summaries."""
    offsets: tuple[Reduced, ...]
    """Those of offsets that are kept along the same errors."""
    stream: Stream
    U: Tensor | None
    V: Tensor | None
    together: tuple[int, int] = (1, 1)
    """How many errors, and how many inputs, the bases are for: see `aligned`."""
    products: Products | None = None
    """What makes both errors along U and summaries, of a convolution."""
    by_row: bool = False
    """Whether rows are kept along the bases, and not summaries."""

    def records(
        self, keys: Tensor, values: Tensor, order: Order, bases: BookBases
    ) -> list[Reduced] | None:
        """The records of a use; None where it has to be looked at anew."""
        book, like = self.like.book, self.like
        if self.shape != (keys.shape, values.shape, values.dtype, order):
            return None
        if keys.dtype != values.dtype or book in bases.stale or bases.found[book] is not like.bases:
            return None
        made = like
        if self.by_row:
            assert self.V is not None
            errors = errors_along(self.stream, values, self.U, order[0])
            along = keys.reshape(-1, len(self.V)) @ self.V
            made = like._replace(keys=along)
            summaries = errors.flatten(0, 1)
        elif self.products is not None:
            errors, summaries = self.products(keys, values)
        else:
            errors = errors_along(self.stream, values, self.U, order[0], self.together[0])
            summaries = summaries_of(self.stream, keys, errors, self.V, self.together[1])
        offsets = [offset._replace(values=errors.sum(1)[..., None]) for offset in self.offsets]
        return [made._replace(values=summaries), *offsets]


def repeated(
    keys: Tensor,
    values: Tensor,
    order: Order,
    found: Sequence[Reduced],
    own: Bases,
    sides: tuple[int, int],
    stream: Stream,
) -> Repeated | None:
    """How the next use can be reduced, after one of which these records were made.

    `own` are the bases as far as a row reaches, in the type of the errors, and `sides` the height
    and width of the block that a row adds. None where the records are more than one summary a
    sample, or its rows along U and V, and its offsets along U, or rows have to be sorted first.
    """
    part, *offsets = found
    bases, (samples, stretch) = part.bases, order
    by_row = part.value_dims == 1
    if by_row and (stream.layout or own.outputs is None or own.inputs is None):
        return None
    if part.term.groups > 1:
        return None
    if bases is None or bases.is_whole or keys.dtype != values.dtype:
        return None
    kept = (part.values.shape[1], part.keys.shape[1]) if by_row else tuple(part.values.shape[1:])
    if own.size(sides) != kept:  # a row reaches a part of its weight
        return None
    if any(other.bases is None or other.bases.outputs is not bases.outputs for other in offsets):
        return None
    rows = len(values) if stream.layout else values.numel() // values.shape[-1]
    if samples * stretch != rows:
        return None
    U, V, errors, inputs = own.outputs, own.inputs, 1, 1
    if U is not None and V is not None and not stream.layout and not by_row:
        (U, errors), (V, inputs) = aligned(U, rows), aligned(V, rows)
    shape = (keys.shape, values.shape, values.dtype, order)
    like = part._replace(keys=part.keys[:0] if by_row else part.keys, values=part.values[:0])
    along = tuple([other._replace(values=other.values[:0], reach=None) for other in offsets])
    products = patch_products(stream, keys, values, U, V, samples)
    return Repeated(shape, like, along, stream, U, V, (errors, inputs), products, by_row)


def aligned(basis: Tensor, rows: int) -> tuple[Tensor, int]:
    """A basis for several rows at once, and for how many; on a GPU, where that is faster.

    A GPU multiplies 16-bit rows several times as fast if each begins at a multiple of 16 bytes.
    Rows of 50,257 words do not, but every eighth does: as one long row, eight of them are
    multiplied by a matrix that has the basis eight times along its diagonal.

    >>> aligned(torch.ones(3, 2), 8)[1]
    1
    """
    together = ALIGNED // math.gcd(ALIGNED, len(basis) * basis.itemsize)
    if not basis.is_cuda or basis.itemsize > 2 or len(basis) < WIDE or rows % together:
        return basis, 1
    return torch.block_diag(*[basis] * together), together  # type: ignore[no-untyped-call]
