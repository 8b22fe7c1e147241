"""The ledger as a matrix: samples × parameters, never in memory as a whole.

`C[i]` is everything the rows of sample i have added to the parameters, with what the optimizer made
of them. `C` is gone through some columns at a time; whatever is asked of it (its product with
directions, its Gram matrix, its leading directions) is a sum over those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor

from dualform.ledger import Book, Term
from dualform.memory.blocks import Sides, as_matrix, from_matrix, matrix_shape, through_views
from dualform.read.coefficients import Accounting, Span
from dualform.read.grouped import Grouping, Records, add_groups, add_records
from dualform.read.scan import Chunk, Scan, row_sides
from dualform.record.optimizers import BY_ROW, Modewise, Operator, ScalarRule, Sided, Turned

COLUMN_BYTES = 256 << 20
"""How large the columns that are held at a time may be."""

Weighing = Callable[[Book, Records], Tensor]
"""One number for each record: how much it counts."""
Turn = Callable[[Book, Sides], Sides]
"""Rows of a book as they are to be added, such as in another basis."""


@dataclass(frozen=True)
class Columns:
    """Some columns of the matrix: what each group added to some rows of one parameter's matrix."""

    book: Book
    term: Term
    rows: slice
    values: Tensor
    """(groups, columns)."""
    scale: Tensor | float = 1.0
    """(columns,): what they were divided by, so that directions must be multiplied by it."""

    def of(self, directions: Tensor) -> Tensor:
        """(directions, columns): the same part of directions (directions, *shape of the book)."""
        return self.matrices(directions)[:, self.rows].flatten(1).to(self.values) * self.scale

    def divided(self, scale: Tensor | float) -> Columns:
        """The same in other units, in place."""
        self.values.div_(scale)
        return replace(self, scale=scale)

    def matrices(self, directions: Tensor) -> Tensor:
        """(directions, height, width): directions as the matrices that the columns are from."""
        view, groups = self.term.view, self.term.groups
        if view == "swapped":
            return torch.stack([as_matrix(direction, view, groups) for direction in directions])
        return directions.reshape(len(directions), *matrix_shape(self.book.shape, view, groups))


class Contributions:
    """`C`: groups × parameters, for some books; from the ledger, or of rows weighed otherwise."""

    def __init__(
        self,
        accounting: Accounting,
        grouping: Grouping,
        books: Sequence[Book] | None = None,
        weighing: Weighing | None = None,
        turn: Turn | None = None,
        memory: int = COLUMN_BYTES,
    ) -> None:
        self._accounting, self._grouping, self._memory = accounting, grouping, memory
        self._turn = turn
        ledger = accounting.ledger
        self.books = [book for book in (books or ledger.info.books) if book.terms]
        self._weighing = weighing or (
            self._coefficients if isinstance(accounting.rule, ScalarRule) else None
        )

    @property
    def groups(self) -> int:
        """How many rows the matrix has."""
        return self._grouping.count

    def columns(self) -> Iterator[Columns]:
        """All columns, some at a time; each is valid until the next."""
        buffer = torch.empty(0, device=self._accounting.device)
        for book in self.books:
            term = next(iter(book.terms.values()))
            for rows in self._parts(book, term):
                shape = (self.groups, rows.stop - rows.start, _shape(book, term)[1])
                if buffer.numel() < math.prod(shape):
                    buffer = buffer.new_empty(math.prod(shape))
                values = buffer[: math.prod(shape)].view(shape).zero_()
                for stream, own in book.terms.items():
                    self._add(values, book, term, stream, own, rows)
                yield Columns(book, term, rows, values.flatten(1))

    def _parts(self, book: Book, term: Term) -> list[slice]:
        """The rows of the book's matrix in parts whose columns fit into memory."""
        height, width = _shape(book, term)
        step = max(1, self._memory // (4 * max(1, self.groups) * width))
        if not all(_alike(term, own) for own in book.terms.values()):
            step = height  # uses that see it as different matrices have no rows in common
        return [slice(at, min(at + step, height)) for at in range(0, height, step)]

    def _add(
        self, into: Tensor, book: Book, term: Term, stream: str, own: Term, rows: slice
    ) -> None:
        """Adds the rows of one stream."""
        add = self._add_weighed if self._weighing else self._add_replayed
        if _alike(term, own):
            add(into, book, stream, own, rows)
            return
        turned = into.new_zeros(self.groups, *_shape(book, own))
        add(turned, book, stream, own, slice(0, turned.shape[1]))
        into += _turned(turned, book, own, term)

    def _add_weighed(self, into: Tensor, book: Book, stream: str, term: Term, rows: slice) -> None:
        assert self._weighing is not None
        records, turn = self.records[stream], partial(self._turn, book) if self._turn else None
        weights = self._weighing(book, records)
        add_records(into, records, term, self._grouping, weights, rows, turn)

    def _add_replayed(self, into: Tensor, book: Book, stream: str, term: Term, rows: slice) -> None:
        """In the order of time, since what a step made of its rows is an operator of its own."""
        accounting = self._accounting
        found = accounting.ledger.info.stream(stream)
        for span in accounting.spans([book]):
            for chunk in Scan(accounting.ledger, found, span.last, into.device, span.first):
                self._add_chunk(into, chunk, book, term, rows, span)

    def _add_chunk(
        self, into: Tensor, chunk: Chunk, book: Book, term: Term, rows: slice, span: Span
    ) -> None:
        operators = span.coefficients[book.name]
        assert isinstance(operators, dict)
        sides, (height, width) = row_sides(chunk, term), _shape(book, term)
        columns = [c.cpu() for c in (chunk.steps, chunk.samples, chunk.positions)]
        groups, numbers = torch.unique(self._grouping.of(*columns), return_inverse=True)
        for step, some in chunk.by_step():
            if step not in operators:
                continue
            operator = _Matrixwise(operators[step], term, rows, height)
            here, places = torch.unique(numbers[some], return_inverse=True)
            needs = operator.needs
            sums = into.new_zeros(len(here), needs.stop - needs.start, width)
            add_groups(sums, sides[some], places, needs)
            into.index_add_(0, groups[here].to(into.device), operator(sums))

    @cached_property
    def records(self) -> dict[str, Records]:
        """The records of each stream that feeds these books."""
        ledger, until = self._accounting.ledger, self._accounting.until
        names = {name for book in self.books for name in book.terms}
        return {s.name: Records(ledger, s, until) for s in ledger.info.streams if s.name in names}

    def _coefficients(self, book: Book, records: Records) -> Tensor:
        (span,) = self._accounting.spans([book])
        numbers = span.coefficients[book.name]
        assert isinstance(numbers, Tensor)
        return numbers.cpu()[records.steps]


class Matrix(Protocol):
    """Groups × parameters, some columns at a time."""

    @property
    def groups(self) -> int:
        """How many rows it has."""

    def columns(self) -> Iterator[Columns]:
        """All columns; each is valid until the next."""


def times(matrix: Matrix, directions: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """(groups, directions) for each book: `C d`, by the book's share of it, in float64."""
    found: dict[str, Tensor] = {}
    for columns in matrix.columns():
        name = columns.book.name
        part = (columns.values @ columns.of(directions[name]).T).double().cpu()
        found[name] = found[name] + part if name in found else part
    return found


class Kept:
    """A matrix that is gone through several times, in memory."""

    def __init__(self, matrix: Matrix) -> None:
        self.groups = matrix.groups
        self._columns = [replace(c, values=c.values.clone()) for c in matrix.columns()]

    def columns(self) -> Iterator[Columns]:
        """All columns."""
        return iter(self._columns)


class Natural:
    """`C h^(−½)`: contributions in the metric of the optimizer, which moved parameters by it.

    `h` is how far a parameter moves for a gradient of size 1: the size of the contributions to it,
    relative to the gradients they were made of. Where all parameters move alike, it is one number.
    """

    def __init__(self, accounting: Accounting, grouping: Grouping) -> None:
        self.groups = grouping.count
        half = COLUMN_BYTES // 2
        self._matrix = Contributions(accounting, grouping, memory=half)
        self._plain = Contributions(accounting, grouping, None, self._factors, memory=half)
        self._accounting = accounting

    def columns(self) -> Iterator[Columns]:
        """All columns, some at a time; each is valid until the next."""
        if isinstance(self._accounting.rule, ScalarRule):
            for columns in self._matrix.columns():
                yield columns.divided(self._size(columns.book) ** 0.5)
            return
        for columns, plain in zip(self._matrix.columns(), self._plain.columns(), strict=True):
            moved, gradient = (c.values.square().mean(0).sqrt_() for c in (columns, plain))
            h = torch.where(gradient > 0, moved / gradient, 1.0).clamp_min_(1e-12)
            yield columns.divided(h.sqrt_())

    def _factors(self, book: Book, records: Records) -> Tensor:
        """Gradients as the optimizer saw them."""
        by_row = torch.from_numpy(self._accounting.states(book) == BY_ROW)
        factors = torch.from_numpy(self._accounting.factors(book))
        return torch.where(by_row, factors, 0.0)[records.steps - 1]

    def _size(self, book: Book) -> float:
        (span,) = self._accounting.spans([book])
        numbers = span.coefficients[book.name]
        assert isinstance(numbers, Tensor)
        factors = torch.from_numpy(self._accounting.factors(book)).to(numbers)
        moved, gradient = numbers.square().sum(), factors.square().sum()
        return float((moved / gradient.clamp_min(1e-30)).sqrt()) or 1.0


class _Matrixwise:
    """A step's operator, applied to some rows of many gradients, seen as matrices."""

    def __init__(self, operator: Operator, term: Term, rows: slice, height: int) -> None:
        self._operator, self._term, self._rows = operator, term, rows
        whole = isinstance(operator, Sided | Modewise | Turned)
        self.needs = slice(0, height) if whole else rows
        """The rows of a gradient that it takes to know those rows of the result."""

    def __call__(self, dense: Tensor) -> Tensor:
        operator, view, groups = self._operator, self._term.view, self._term.groups
        if isinstance(operator, Modewise | Turned):
            return through_views(operator, dense, operator.shape, view, groups)[:, self._rows]
        if isinstance(operator, Sided):
            return self._sided(operator, dense)
        if isinstance(operator, Tensor):
            return dense.mul_(as_matrix(operator, view, groups)[self._rows].to(dense))
        return dense.mul_(operator)

    def _sided(self, operator: Sided, dense: Tensor) -> Tensor:
        matrix, left = operator.matrix.to(dense), operator.left
        if self._term.view == "swapped":
            matrix, left = matrix.T, not left
        return matrix[self._rows] @ dense if left else dense[:, self._rows] @ matrix


def _shape(book: Book, term: Term) -> tuple[int, int]:
    return matrix_shape(book.shape, term.view, term.groups)


def _alike(term: Term, other: Term) -> bool:
    """Whether they see the parameter as the same matrix."""
    same_groups = term.groups == other.groups or term.view != "swapped"
    return term.view == other.view and same_groups


def _turned(dense: Tensor, book: Book, own: Term, term: Term) -> Tensor:
    """Whole matrices of one view as those of another."""
    parameters = [from_matrix(d, book.shape, own.view, own.groups) for d in dense]
    return torch.stack([as_matrix(p, term.view, term.groups) for p in parameters])
