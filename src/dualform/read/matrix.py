"""The ledger as a matrix: samples × parameters, never in memory as a whole.

`C[i]` is everything the rows of sample i have added to the parameters, with what the optimizer made
of them. `C` is gone through some columns at a time; whatever is asked of it (its product with
directions, its Gram matrix, its leading directions) is a sum over those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

from dualform.ledger import Book, Term
from dualform.memory.blocks import Sides, as_matrix, from_matrix, through_views
from dualform.read.coefficients import Accounting, Span
from dualform.read.columns import Columns, shape_of
from dualform.read.grouped import Grouping, Receiver, Region, add_groups, add_visits
from dualform.read.scan import Chunk, Scan, row_sides
from dualform.read.turning import Chain, Later
from dualform.read.visits import Reused, Visits
from dualform.record.optimizers import Modewise, Operator, ScalarRule, Sided, Turned

COLUMN_BYTES = 256 << 20
"""How large the columns that are held at a time may be."""

REPLAYED_BYTES = 512 << 20
"""How large the coefficients may be that are kept while one parameter's columns are made."""

Weighing = Callable[[Book, Visits], Tensor]
"""One number for each record: how much it counts."""
Turn = Callable[[Book, Sides], Sides]
"""Rows of a book as they are to be added, such as in another basis."""


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
        self._turn, self._gathered = turn, Reused()
        self._replayed: tuple[str, list[Span]] = ("", [])
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
        batches = list(self._batches(self.books if books is None else books))
        widths = [sum(math.prod(part.region.shape) for part in parts) for parts in batches]
        most = self.groups * max(widths, default=0)
        buffer = torch.empty(most, device=self._accounting.device)
        for parts in batches:
            sizes = [self.groups * math.prod(part.region.shape) for part in parts]
            views = torch.split(buffer[: sum(sizes)].zero_(), sizes)
            filled = [
                replace(p, values=v.view(self.groups, -1))
                for p, v in zip(parts, views, strict=True)
            ]
            self._fill(filled)
            yield from filled
        self._gathered.clear()

    def _batches(self, books: Sequence[Book]) -> Iterator[list[Columns]]:
        """Parts that are made of the same streams, as many as fit into memory together."""
        batch: list[Columns] = []
        for part in (part for book in books for part in self._parts(book)):
            width = sum(math.prod(p.region.shape) for p in (*batch, part))
            alike = batch and batch[-1].book.terms.keys() == part.book.terms.keys()
            if batch and not (alike and 4 * self.groups * width <= self._memory):
                yield batch
                batch = []
            batch.append(part)
        if batch:
            yield batch

    def _parts(self, book: Book) -> list[Columns]:
        """The book's matrix in parts that fit into memory: lines of the longer side, or of one."""
        term = next(iter(book.terms.values()))
        height, width = shape_of(book, term)
        shorter, longer = sorted((height, width))
        most = max(1, self._memory // (4 * max(1, self.groups)))
        regions = [Region.whole(height, width)]  # seen as other matrices, parts are not the same
        if all(_alike(term, own) for own in book.terms.values()):
            pairs = product(_cut(shorter, max(1, most // longer)), _cut(longer, most))
            regions = [Region(*(pair if height <= width else pair[::-1])) for pair in pairs]
        return [Columns(book, term, region, torch.empty(0)) for region in regions]

    def _fill(self, parts: Sequence[Columns]) -> None:
        """Adds all rows, stream by stream."""
        for stream in parts[0].book.terms:
            targets = [self._target(part, part.book.terms[stream]) for part in parts]
            if self._weighing is not None:
                self._add_weighed(stream, parts, targets)
            else:
                for part, (into, region) in zip(parts, targets, strict=True):
                    self._add_replayed(into, part.book, stream, region)
            for part, (into, _) in zip(parts, targets, strict=True):
                own = part.book.terms[stream]
                if not _alike(part.term, own):
                    part.dense().add_(_turned(into, part.book, own, part.term))

    def _target(self, part: Columns, own: Term) -> tuple[Tensor, Region]:
        """Where rows are added: the part itself, or a matrix as they see it."""
        if _alike(part.term, own):
            return part.dense(), part.region
        shape = shape_of(part.book, own)
        return part.values.new_zeros(self.groups, *shape), Region.whole(*shape)

    def _add_weighed(
        self, stream: str, parts: Sequence[Columns], targets: Sequence[tuple[Tensor, Region]]
    ) -> None:
        assert self._weighing is not None
        visits, receivers = self.visits[stream], []
        for part, (into, region) in zip(parts, targets, strict=True):
            turn = partial(self._turn, part.book) if self._turn else None
            weights = self._weighing(part.book, visits)
            receivers.append(Receiver(into, part.book.terms[stream], region, weights, turn))
        add_visits(visits, self._grouping, receivers)

    def _add_replayed(self, into: Tensor, book: Book, stream: str, region: Region) -> None:
        """In the order of time, since what a step made of its rows is an operator of its own.

        What later bases share is applied once a basis, if all groups fit into memory as they are.
        """
        term = book.terms[stream]
        later = Later() if 4 * self.groups * book.size <= self._memory else None
        for span in self._spans(book):
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
        whole = Region.whole(*shape_of(book, term))
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

    def _spans(self, book: Book) -> Iterable[Span]:
        """Replayed once for all parts of a book, where its coefficients fit into memory."""
        accounting = self._accounting
        if self._replayed[0] != book.name:
            if len(self._parts(book)) == 1 or 4 * book.size * accounting.until > REPLAYED_BYTES:
                return accounting.spans([book])
            self._replayed = (book.name, [_narrow(span, book) for span in accounting.spans([book])])
        return self._replayed[1]

    def _add_chunk(
        self,
        into: Tensor,
        chunk: Chunk,
        book: Book,
        term: Term,
        region: Region,
        operators: Mapping[int, Operator],
    ) -> None:
        sides, whole = row_sides(chunk, term), Region.whole(*shape_of(book, term))
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
    def visits(self) -> dict[str, Visits]:
        """The visits of each stream that feeds these books."""
        ledger, until = self._accounting.ledger, self._accounting.until
        names = {name for book in self.books for name in book.terms}
        streams = [stream for stream in ledger.info.streams if stream.name in names]
        found = {s.name: Visits(ledger, s, until, self._gathered) for s in streams}
        self._gathered.least = max((visits.nbytes for visits in found.values()), default=0)
        return found

    def _coefficients(self, book: Book, visits: Visits) -> Tensor:
        (span,) = self._accounting.spans([book])
        numbers = span.coefficients[book.name]
        assert isinstance(numbers, Tensor)
        return numbers.cpu()[visits.steps]


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


def _narrow(span: Span, book: Book) -> Span:
    """Coefficients for each element in the precision of the columns."""
    operators = span.coefficients[book.name]
    assert isinstance(operators, dict)
    narrow = {t: H.float() if isinstance(H, Tensor) else H for t, H in operators.items()}
    return replace(span, coefficients={book.name: narrow})


def _cut(length: int, each: int) -> list[slice]:
    return [slice(at, min(at + each, length)) for at in range(0, length, each)]


def _alike(term: Term, other: Term) -> bool:
    """Whether they see the parameter as the same matrix."""
    same_groups = term.groups == other.groups or term.view != "swapped"
    return term.view == other.view and same_groups


def _turned(dense: Tensor, book: Book, own: Term, term: Term) -> Tensor:
    """Whole matrices of one view as those of another."""
    parameters = [from_matrix(d, book.shape, own.view, own.groups) for d in dense]
    return torch.stack([as_matrix(p, term.view, term.groups) for p in parameters])
