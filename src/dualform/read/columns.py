"""Some columns of the matrix samples × parameters, and the lines that they consist of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.ledger import Book, Term
from dualform.memory.blocks import as_matrix, keeps_order, matrix_shape
from dualform.read.grouped import Region


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

    def of(self, directions: Tensor) -> Tensor:
        """(directions, columns): the same part of directions (directions, *shape of the book)."""
        part = self.part(self.matrices(directions)).to(self.values)
        scale = self.lines(self.scale) if isinstance(self.scale, Tensor) else self.scale
        return torch.mul(part, scale, out=part.new_empty(part.shape)).flatten(1)

    def part(self, matrices: Tensor) -> Tensor:
        """(…, lines, side): the same part of whole matrices (…, height, width)."""
        part = self.region.of(matrices)
        return part.mT if self._tall else part

    def dense(self) -> Tensor:
        """(groups, height, width): the values as parts of matrices, in the same memory."""
        lines = self.lines(self.values)
        return lines.mT if self._tall else lines

    def lines(self, columns: Tensor) -> Tensor:
        """(…, columns) as (…, lines, side)."""
        shape = self.region.shape
        return columns.reshape(*columns.shape[:-1], *(shape[::-1] if self._tall else shape))

    @property
    def _tall(self) -> bool:
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
