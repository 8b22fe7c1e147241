"""EK-FAC from the rows: gradients in the eigenbases of keys and errors, divided by their size.

The samples' gradients are taken as training last saw them. In the eigenbases of `E[a aᵀ]` and
`E[b bᵀ]` the Fisher matrix of a layer is nearly diagonal; its diagonal is the mean square of the
samples' gradients in that basis.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dualform.ledger import Book
from dualform.memory.blocks import Sides, matrix_shape
from dualform.memory.forms import form_named
from dualform.read.columns import Columns
from dualform.read.matrix import Contributions, Weighing
from dualform.read.targets import Parameters
from dualform.read.visits import Visits


class EigenBases:
    """The eigenbases of both sides of each book's rows; None where a side is left as it is."""

    def __init__(self, matrix: Contributions, weighing: Weighing) -> None:
        self._known = {
            book.name: _bases(book, matrix.visits, weighing) if _whole(book) else (None, None)
            for book in matrix.books
        }

    def turn(self, book: Book, sides: Sides) -> Sides:
        """Rows in the eigenbases."""
        on_a, on_b = self._known[book.name]
        a = sides.a if on_a is None else sides.a @ on_a.to(sides.a)
        b = sides.b if on_b is None or sides.b is None else sides.b @ on_b.to(sides.b)
        return Sides(a, b, sides.at)

    def turned(self, columns: Columns, directions: Parameters) -> Tensor:
        """(directions, columns): the same part of directions, in the eigenbases."""
        on_a, on_b = self._known[columns.book.name]
        matrices = columns.matrices(directions[columns.book.name])
        if on_a is not None:
            matrices = on_a.T.to(matrices) @ matrices
        if on_b is not None:
            matrices = matrices @ on_b.to(matrices)
        return columns.part(matrices).flatten(1).to(columns.values)


def ekfac(
    matrix: Contributions, bases: EigenBases, directions: Parameters, damping: float
) -> Tensor:
    """(groups, directions): `C (Λ + λ)⁻¹ g` in the eigenbases, λ in units of the book's mean Λ."""
    squares = {book.name: torch.zeros(matrix.whole(book).region.shape) for book in matrix.books}
    for columns in matrix.pieces(matrix.books):
        part = columns.part(squares[columns.book.name])
        part += columns.lines(columns.values.square().sum(0)).cpu() / matrix.groups
    count = len(next(iter(directions.values())))
    total = torch.zeros(matrix.groups, count, dtype=torch.float64)
    for columns in matrix.pieces(matrix.books):
        whole = squares[columns.book.name]
        size = columns.part(whole).flatten() + damping * float(whole.mean(dtype=torch.float64))
        asked = bases.turned(columns, directions) / size.clamp_min(1e-30).to(columns.values)
        total[columns.groups] += (columns.values @ asked.T).double().cpu()
    return total


def _whole(book: Book) -> bool:
    """Whether every row is about the whole matrix, so that its sides can be turned."""
    terms = list(book.terms.values())
    shapes = {matrix_shape(book.shape, term.view, term.groups) for term in terms}
    plain = all(term.at == (0, 0) and term.groups == 1 for term in terms)
    return plain and len(shapes) == 1 and all(form_named(term.form).has_sides for term in terms)


def _bases(
    book: Book, visits: dict[str, Visits], weighing: Weighing
) -> tuple[Tensor | None, Tensor | None]:
    height, width = matrix_shape(book.shape, *_view(book))
    on_a = torch.zeros(height, height, dtype=torch.float64)
    on_b = torch.zeros(width, width, dtype=torch.float64)
    for stream, term in book.terms.items():
        if visits[stream].stream.shared:
            return None, None  # no sides of their own
        chosen = torch.nonzero(weighing(book, visits[stream])).flatten()
        for rows in _rows(visits[stream], chosen):
            sides = form_named(term.form).rows(*rows, term.groups, term.at)
            if sides.a.shape[1] != height:
                return None, None  # rows of a part of the matrix
            on_a += (sides.a.T @ sides.a).double()
            if sides.b is not None:
                on_b += (sides.b.T @ sides.b).double()
    has_b = any(form_named(term.form).is_product for term in book.terms.values())
    return torch.linalg.eigh(on_a).eigenvectors, torch.linalg.eigh(on_b)[1] if has_b else None


def _rows(visits: Visits, chosen: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of some visits, some at a time."""
    for part in torch.split(chosen, visits.together) if len(chosen) else ():
        yield from visits.gather(torch.split(part, visits.cached))


def _view(book: Book) -> tuple[str, int]:
    term = next(iter(book.terms.values()))
    return term.view, term.groups
