"""Some columns of the matrix samples × parameters, and the lines that they consist of."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from dualform.ledger import Book, Term
from dualform.memory.blocks import as_matrix, from_matrix, keeps_order, matrix_shape
from dualform.memory.views import Region

Key: TypeAlias = tuple[str, int, int]
"""What tells parts of books apart: the book, and where its matrix begins."""


@dataclass(frozen=True)
class Columns:
    """Some columns of the matrix: what each group added to a part of one parameter's matrix."""

    book: Book
    term: Term
    region: Region
    values: Tensor
    """(groups, columns): one line along the matrix's longer side after the other."""
    scale: Tensor | float = 1.0
    """(columns,): what they were divided by, so that directions must be multiplied by it."""
    groups: slice = field(default_factory=lambda: slice(None))
    """Which groups the values are of, where it is not all of them."""

    def of(self, directions: Tensor) -> Tensor:
        """(directions, columns): the same part of directions (directions, *shape of the book)."""
        return self.lines_of(directions).flatten(1)

    def lines_of(self, directions: Tensor) -> Tensor:
        """(directions, lines, side): the same, line by line."""
        part = self.part(self.matrices(directions)).to(self.values)
        scale = self.lines(self.scale) if isinstance(self.scale, Tensor) else self.scale
        return torch.mul(part, scale, out=part.new_empty(part.shape))

    def back(self, lines: Tensor) -> Tensor:
        """(directions, *shape of the book): `lines` where the columns are, and 0 elsewhere.

        In units in which the columns were not divided: the adjoint of `of`.
        """
        height, width = shape_of(self.book, self.term)
        scaled = lines.flatten(1) * self.scale
        whole = scaled.new_zeros(len(lines), height, width)
        self.part(whole).copy_(self.lines(scaled))
        view, groups = self.term.view, self.term.groups
        return torch.stack([from_matrix(m, self.book.shape, view, groups) for m in whole])

    def part(self, matrices: Tensor) -> Tensor:
        """(…, lines, side): the same part of whole matrices (…, height, width)."""
        part = matrices[..., self.region.rows, self.region.columns]
        return part.mT if self.tall else part

    def dense(self) -> Tensor:
        """(groups, height, width): the values as parts of matrices, in the same memory."""
        lines = self.lines(self.values)
        return lines.mT if self.tall else lines

    def lines(self, columns: Tensor) -> Tensor:
        """(…, columns) as (…, lines, side)."""
        shape = self.region.shape
        return columns.reshape(*columns.shape[:-1], *(shape[::-1] if self.tall else shape))

    @property
    def width(self) -> int:
        """How many columns there are."""
        return math.prod(self.region.shape)

    @property
    def key(self) -> Key:
        """What tells parts of books apart."""
        return self.book.name, self.region.rows.start, self.region.columns.start

    def scale_of(self, region: Region) -> Tensor | float:
        """The scale of a part of a whole book's columns."""
        if not isinstance(self.scale, Tensor):
            return self.scale
        lines = self.lines(self.scale)
        part = region.of(lines.mT if self.tall else lines)
        return (part.mT if self.tall else part).flatten()

    @property
    def tall(self) -> bool:
        """Whether lines are the columns of the matrix, since it is higher than wide."""
        height, width = shape_of(self.book, self.term)
        return height > width

    def matrices(self, directions: Tensor) -> Tensor:
        """(directions, height, width): directions as the matrices that the columns are from."""
        view, groups = self.term.view, self.term.groups
        if not keeps_order(view):
            return torch.stack([as_matrix(direction, view, groups) for direction in directions])
        return directions.reshape(len(directions), *matrix_shape(self.book.shape, view, groups))


def shape_of(book: Book, term: Term) -> tuple[int, int]:
    """Height and width of a book's matrix, as a term sees it."""
    return matrix_shape(book.shape, term.view, term.groups)


def longest(book: Book) -> int:
    """The longer side of the book's matrix."""
    return max(shape_of(book, next(iter(book.terms.values()))))
