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
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

from dualform.ledger import Book, Term
from dualform.memory.blocks import Sides, as_matrix, from_matrix, matrix_shape, through_views
from dualform.read.coefficients import Accounting
from dualform.read.grouped import Grouping, Records, Region, add_groups, add_records
from dualform.read.replay import step_gradients
from dualform.read.scan import Chunk, Scan, row_sides
from dualform.read.turning import Chain, Later
from dualform.record.optimizers import BY_ROW, Modewise, Operator, ScalarRule, Sided, Turned

COLUMN_BYTES = 256 << 20
"""How large the columns that are held at a time may be."""

Weighing = Callable[[Book, Records], Tensor]
"""One number for each record: how much it counts."""
Turn = Callable[[Book, Sides], Sides]
"""Rows of a book as they are to be added, such as in another basis."""


@dataclass(frozen=True)
class Columns:
    """Some columns of the matrix: what each group added to a part of one parameter's matrix."""

    book: Book
    term: Term
    region: Region
    values: Tensor
    """(groups, columns)."""
    scale: Tensor | float = 1.0
    """(columns,): what they were divided by, so that directions must be multiplied by it."""

    def of(self, directions: Tensor) -> Tensor:
        """(directions, columns): the same part of directions (directions, *shape of the book)."""
        part = self.region.of(self.matrices(directions))
        return part.flatten(1).to(self.values) * self.scale

    def lines(self, columns: Tensor) -> tuple[Tensor, ...]:
        """(…, columns) as one (…, side) for each line along the matrix's longer side."""
        height, width = _shape(self.book, self.term)
        matrices = columns.reshape(len(columns), *self.region.shape)
        return matrices.unbind(1 if height <= width else 2)

    def joined(self, lines: Sequence[Tensor]) -> Tensor:
        """The inverse of `lines`."""
        height, width = _shape(self.book, self.term)
        return torch.stack(list(lines), 1 if height <= width else 2).flatten(1)

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

    def columns(self, books: Sequence[Book] | None = None) -> Iterator[Columns]:
        """All columns (of some books), some at a time; each is valid until the next."""
        buffer = torch.empty(0, device=self._accounting.device)
        for book in self.books if books is None else books:
            term = next(iter(book.terms.values()))
            for region in self._parts(book, term):
                shape = (self.groups, *region.shape)
                if buffer.numel() < math.prod(shape):
                    buffer = buffer.new_empty(math.prod(shape))
                values = buffer[: math.prod(shape)].view(shape).zero_()
                for stream, own in book.terms.items():
                    self._add(values, book, term, stream, own, region)
                yield Columns(book, term, region, values.flatten(1))

    def _parts(self, book: Book, term: Term) -> list[Region]:
        """The book's matrix in parts that fit into memory: lines of the longer side, or of one."""
        height, width = _shape(book, term)
        shorter, longer = sorted((height, width))
        if not all(_alike(term, own) for own in book.terms.values()):
            return [Region.whole(height, width)]  # seen as other matrices, parts are not the same
        most = max(1, self._memory // (4 * max(1, self.groups)))
        pairs = product(_cut(shorter, max(1, most // longer)), _cut(longer, most))
        return [Region(*(pair if height <= width else pair[::-1])) for pair in pairs]

    def _add(
        self, into: Tensor, book: Book, term: Term, stream: str, own: Term, region: Region
    ) -> None:
        """Adds the rows of one stream."""
        add = self._add_weighed if self._weighing else self._add_replayed
        if _alike(term, own):
            add(into, book, stream, own, region)
            return
        turned = into.new_zeros(self.groups, *_shape(book, own))
        add(turned, book, stream, own, Region.whole(*_shape(book, own)))
        into += _turned(turned, book, own, term)

    def _add_weighed(
        self, into: Tensor, book: Book, stream: str, term: Term, region: Region
    ) -> None:
        assert self._weighing is not None
        records, turn = self.records[stream], partial(self._turn, book) if self._turn else None
        weights = self._weighing(book, records)
        add_records(into, records, term, self._grouping, weights, region, turn)

    def _add_replayed(
        self, into: Tensor, book: Book, stream: str, term: Term, region: Region
    ) -> None:
        """In the order of time, since what a step made of its rows is an operator of its own.

        What later bases share is applied once a basis, if all groups fit into memory as they are.
        """
        later = Later() if 4 * self.groups * book.size <= self._memory else None
        for span in self._accounting.spans([book]):
            operators = span.coefficients[book.name]
            assert isinstance(operators, dict)
            if later is not None:
                operators = {step: later.own(step, found) for step, found in operators.items()}
            self._add_steps(into, book, stream, term, region, operators)
        for chain in later.chains() if later is not None else ():
            self._add_chain(into, book, stream, term, region, chain)

    def _add_chain(
        self, into: Tensor, book: Book, stream: str, term: Term, region: Region, chain: Chain
    ) -> None:
        """What each basis makes of all that came before it, as far as it has not faded."""
        whole = Region.whole(*_shape(book, term))
        sums = into.new_zeros(self.groups, *whole.shape)
        for tail, numbers in chain:
            self._add_steps(sums, book, stream, term, whole, numbers)
            into += region.of(through_views(tail.part, sums, book.shape, term.view, term.groups))
            sums *= tail.rest

    def _add_steps(
        self,
        into: Tensor,
        book: Book,
        stream: str,
        term: Term,
        region: Region,
        operators: Mapping[int, Operator],
    ) -> None:
        """Adds the rows of some steps through their operators."""
        ledger = self._accounting.ledger
        first, last = min(operators, default=1), max(operators, default=0)
        for chunk in Scan(ledger, ledger.info.stream(stream), last, into.device, first):
            self._add_chunk(into, chunk, book, term, region, operators)

    def _add_chunk(
        self,
        into: Tensor,
        chunk: Chunk,
        book: Book,
        term: Term,
        region: Region,
        operators: Mapping[int, Operator],
    ) -> None:
        sides, whole = row_sides(chunk, term), Region.whole(*_shape(book, term))
        columns = [c.cpu() for c in (chunk.steps, chunk.samples, chunk.positions)]
        groups, numbers = torch.unique(self._grouping.of(*columns), return_inverse=True)
        for step, some in chunk.by_step():
            if step not in operators:
                continue
            operator = _Matrixwise(operators[step], term, region, whole)
            here, places = torch.unique(numbers[some], return_inverse=True)
            sums = into.new_zeros(len(here), *operator.needs.shape)
            add_groups(sums, sides[some], places, operator.needs)
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


class Natural:
    """`C h^(−½)`: contributions in the metric of the optimizer, which moved parameters by it.

    `h` is how far a parameter moves for a gradient of size 1, relative to the learning rate. Where
    a step's coefficients are one for each element, contributions are taken for `h` times the
    gradients, each with its step's learning rate: their change over time is left out, which spares
    applying every step's coefficients to every sample.
    """

    def __init__(self, accounting: Accounting, grouping: Grouping) -> None:
        self.groups, self._accounting = grouping.count, accounting
        self._exact = Contributions(accounting, grouping)
        self._rated = Contributions(accounting, grouping, None, self._weights)
        self._sizes: dict[str, Tensor | None] = {}

    def columns(self) -> Iterator[Columns]:
        """All columns, some at a time; each is valid until the next."""
        if isinstance(self._accounting.rule, ScalarRule):
            yield from self._exact.columns()
            return
        for book in self._exact.books:
            h = self._size(book)
            if h is None:
                yield from self._turned(book)
            else:
                yield from (_stretched(c, h) for c in self._rated.columns([book]))

    def _turned(self, book: Book) -> Iterator[Columns]:
        """Where a step turns gradients, how far it moves a parameter is seen from both."""
        pairs = zip(self._exact.columns([book]), self._rated.columns([book]), strict=True)
        for columns, rated in pairs:
            moved, gradient = (c.values.square().mean(0).sqrt_() for c in (columns, rated))
            h = torch.where(gradient > 0, moved / gradient, 1.0).clamp_min_(1e-12)
            yield _divided(columns, h.sqrt_())

    def _weights(self, book: Book, records: Records) -> Tensor:
        """Gradients as the optimizer saw them, times its learning rate."""
        return -self._rates(book)[records.steps - 1]

    def _rates(self, book: Book) -> Tensor:
        """(T,): the rate and the factor of each step's rows."""
        by_row = torch.from_numpy(self._accounting.states(book) == BY_ROW)
        history = self._accounting.history(book)
        rates = torch.from_numpy(history.hyper[:, history.fields.index("lr")])
        return torch.where(by_row, rates * torch.from_numpy(self._accounting.factors(book)), 0.0)

    def _size(self, book: Book) -> Tensor | None:
        """h, one for each element, or None where a step turns gradients."""
        if book.name not in self._sizes:
            self._sizes[book.name] = self._measured(book)
        return self._sizes[book.name]

    def _measured(self, book: Book) -> Tensor | None:
        """`h² = Σ (H g)² / Σ (η g)²` over the steps and their gradients g."""
        accounting, rates = self._accounting, self._rates(book).tolist()
        moved = torch.zeros(book.shape, dtype=torch.float64, device=accounting.device)
        rated = torch.zeros_like(moved)
        for span in accounting.spans([book]):
            operators = span.coefficients[book.name]
            assert isinstance(operators, dict)
            found = step_gradients(
                accounting.ledger, book, span.first, span.last, accounting.device
            )
            for step, gradient in found.items():
                operator = operators.get(step, 0.0)
                if isinstance(operator, Sided | Modewise | Turned):
                    return None
                moved += (operator * gradient).square_()
                rated += (rates[step - 1] * gradient).square_()
        return torch.where(rated > 0, moved / rated, 1.0).sqrt_().clamp_min_(1e-12)


def _divided(columns: Columns, scale: Tensor | float) -> Columns:
    """The same in other units, in place."""
    columns.values.div_(scale)
    return replace(columns, scale=scale)


def _stretched(columns: Columns, h: Tensor) -> Columns:
    """Columns of gradients as contributions `h` times as large, divided by `h^(½)`; in place."""
    scale = columns.of(h[None].sqrt())[0]
    columns.values.mul_(scale)
    return replace(columns, scale=scale)


class _Matrixwise:
    """A step's operator, applied to a part of many gradients, seen as matrices."""

    def __init__(self, operator: Operator, term: Term, region: Region, whole: Region) -> None:
        self._operator, self._term, self._region = operator, term, region
        self.needs = self._needed(whole)
        """The part of a gradient that it takes to know that part of the result."""

    def __call__(self, dense: Tensor) -> Tensor:
        operator, view, groups = self._operator, self._term.view, self._term.groups
        if isinstance(operator, Modewise | Turned):
            return self._region.of(through_views(operator, dense, operator.shape, view, groups))
        if isinstance(operator, Sided):
            matrix, left = self._sided(operator)
            matrix = matrix.to(dense)
            rows, columns = self._region.rows, self._region.columns
            return matrix[rows] @ dense if left else dense @ matrix[:, columns]
        if isinstance(operator, Tensor):
            return dense.mul_(self._region.of(as_matrix(operator, view, groups)).to(dense))
        return dense.mul_(operator)

    def _needed(self, whole: Region) -> Region:
        if isinstance(self._operator, Modewise | Turned):
            return whole
        if isinstance(self._operator, Sided):
            left = self._sided(self._operator)[1]
            across, down = (whole.rows, self._region.columns), (self._region.rows, whole.columns)
            return Region(*(across if left else down))
        return self._region

    def _sided(self, operator: Sided) -> tuple[Tensor, bool]:
        """The matrix as the term sees the parameter, and whether it stands left of it."""
        if self._term.view == "swapped":
            return operator.matrix.T, not operator.left
        return operator.matrix, operator.left


def _shape(book: Book, term: Term) -> tuple[int, int]:
    return matrix_shape(book.shape, term.view, term.groups)


def _cut(length: int, each: int) -> list[slice]:
    return [slice(at, min(at + each, length)) for at in range(0, length, each)]


def longest(book: Book) -> int:
    """The longer side of the book's matrix."""
    return max(_shape(book, next(iter(book.terms.values()))))


def _alike(term: Term, other: Term) -> bool:
    """Whether they see the parameter as the same matrix."""
    same_groups = term.groups == other.groups or term.view != "swapped"
    return term.view == other.view and same_groups


def _turned(dense: Tensor, book: Book, own: Term, term: Term) -> Tensor:
    """Whole matrices of one view as those of another."""
    parameters = [from_matrix(d, book.shape, own.view, own.groups) for d in dense]
    return torch.stack([as_matrix(p, term.view, term.groups) for p in parameters])
