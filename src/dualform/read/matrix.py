"""The ledger as a matrix: samples × parameters, never in memory as a whole.

`C[i]` is everything the rows of sample i have added to the parameters, with what the optimizer made
of them. `C` is gone through some columns at a time; whatever is asked of it (its product with
directions, its Gram matrix, its leading directions) is a sum over those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

from dualform.ledger import Book, Term
from dualform.memory.blocks import Sides, as_matrix, from_matrix
from dualform.memory.views import Region
from dualform.optimizers import Number, Operator
from dualform.read.coefficients import Accounting, Span, StepOperators
from dualform.read.columns import Columns, shape_of
from dualform.read.grouped import (
    Grouping,
    InOrder,
    Receiver,
    add_groups,
    add_visits,
    in_order,
)
from dualform.read.later import Chain, Later, share_of
from dualform.read.questions import seen_as
from dualform.read.scan import Chunk, Scan, row_sides
from dualform.read.visits import Reused, Visits

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
        memory: int | None = None,
    ) -> None:
        self._accounting, self._grouping = accounting, grouping
        self._memory = COLUMN_BYTES if memory is None else memory
        self._turn, self._gathered = turn, Reused()
        self._replayed: tuple[str, list[Span]] = ("", [])
        self._weighed: dict[tuple[str, str], Tensor] = {}
        ledger = accounting.ledger
        self.books = [book for book in (books or ledger.info.books) if book.terms]
        self._weighing = weighing or (self._coefficients if accounting.rule.by_numbers else None)

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
            filled = self._cut(buffer, parts, slice(0, self.groups))
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

    def blocks(self, parts: Sequence[Columns]) -> Iterator[Columns]:
        """Parts of parameters, some groups at a time; each is valid until the next.

        Rows are read once for all parts that are made of the same streams, in the order of groups.
        """
        for alike in _by_streams(parts):
            yield from self._blocks(alike)
        self._gathered.clear()

    def pieces(self, books: Sequence[Book]) -> Iterator[Columns]:
        """All columns: of all groups where they fit into memory, else of some groups at a time."""
        large = [book for book in books if self.is_large(book)]
        yield from self.columns([book for book in books if book not in large])
        yield from self.blocks([self.whole(book) for book in large])

    def is_large(self, book: Book) -> bool:
        """Whether to make its columns takes more than one scan, but its groups can be cut.

        With those of all books that are made of the same streams, for which it is one scan.
        """
        cut = self._weighing is not None and self._grouping.by_visit
        size = sum(b.size for b in self.books if b.terms.keys() == book.terms.keys())
        return cut and 4 * self.groups * size > self._memory

    def whole(self, book: Book) -> Columns:
        """All of a book, to be filled."""
        term = next(iter(book.terms.values()))
        return Columns(book, term, Region.whole(*shape_of(book, term)), torch.empty(0))

    def _blocks(self, parts: Sequence[Columns]) -> Iterator[Columns]:
        width = sum(math.prod(part.region.shape) for part in parts)
        each = min(self.groups, max(1, self._memory // (4 * width)))
        buffer = torch.empty(each * width, device=self._accounting.device)
        with ExitStack() as opened:
            streams: dict[str, InOrder] = {}
            for begin in range(0, self.groups, each):
                groups = slice(begin, min(begin + each, self.groups))
                filled = self._cut(buffer, parts, groups)
                for stream in parts[0].book.terms:
                    receivers = self._receivers(stream, filled)
                    if stream not in streams:
                        found = in_order(self.visits[stream], self._grouping, receivers)
                        streams[stream] = opened.enter_context(found)
                    add_visits(streams[stream], receivers, begin)
                    if len(parts[0].book.terms) > 1:  # which share the memory to read into
                        streams[stream].let_go()
                    self._add_turned(stream, filled, receivers)
                yield from filled
        self._weighed.clear()

    def _cut(self, buffer: Tensor, parts: Sequence[Columns], groups: slice) -> list[Columns]:
        """The parts with values of these groups, 0 so far."""
        count = groups.stop - groups.start
        sizes = [count * math.prod(part.region.shape) for part in parts]
        views = torch.split(buffer[: sum(sizes)].zero_(), sizes)
        filled = zip(parts, views, strict=True)
        return [replace(p, values=v.view(count, -1), groups=groups) for p, v in filled]

    def _fill(self, parts: Sequence[Columns]) -> None:
        """Adds all rows, stream by stream."""
        for stream in parts[0].book.terms:
            receivers = self._receivers(stream, parts)
            if self._weighing is not None:
                with in_order(self.visits[stream], self._grouping, receivers) as ordered:
                    add_visits(ordered, receivers)
            else:
                for part, receiver in zip(parts, receivers, strict=True):
                    self._add_replayed(receiver.into, part.book, stream, receiver.region)
            self._add_turned(stream, parts, receivers)
        self._weighed.clear()

    def _receivers(self, stream: str, parts: Sequence[Columns]) -> list[Receiver]:
        """Where a stream's rows are added: the parts themselves, or matrices as they see them."""
        receivers = []
        for part in parts:
            own = part.book.terms[stream]
            into, region = part.dense(), part.region
            if not _alike(part.term, own):
                shape = shape_of(part.book, own)
                into, region = into.new_zeros(len(into), *shape), Region.whole(*shape)
            turn = partial(self._turn, part.book) if self._turn else None
            receivers.append(Receiver(into, own, region, self._weights(part.book, stream), turn))
        return receivers

    def _weights(self, book: Book, stream: str) -> Tensor:
        """(visits,): how much each counts; none where an operator says so."""
        if self._weighing is None:
            return torch.empty(0)
        if (book.name, stream) not in self._weighed:
            found = self._weighing(book, self.visits[stream])
            self._weighed[book.name, stream] = found
        return self._weighed[book.name, stream]

    def _add_turned(
        self, stream: str, parts: Sequence[Columns], receivers: Sequence[Receiver]
    ) -> None:
        """Adds what was put into matrices of another view."""
        for part, receiver in zip(parts, receivers, strict=True):
            if not _alike(part.term, receiver.term):
                part.dense().add_(_turned(receiver.into, part.book, receiver.term, part.term))

    def _add_replayed(self, into: Tensor, book: Book, stream: str, region: Region) -> None:
        """In the order of time, since what a step made of its rows is an operator of its own.

        What later bases share is applied once a basis, if all groups fit into memory as they are.
        """
        term = book.terms[stream]
        later = Later() if 4 * self.groups * book.size <= self._memory else None
        for span in self._spans(book):
            operators = span.coefficients[book.name].operators
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
            shares = {step: Number(share) for step, share in numbers.items()}
            self._add_steps(sums, book, stream, term, whole, shares)
            into += region.of(seen_as(book, term).through(tail.own.apply, sums))
            sums *= share_of(tail)

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
        sides, view = row_sides(chunk, term), seen_as(book, term)
        columns = [c.cpu() for c in (chunk.steps, chunk.samples, chunk.positions)]
        groups, numbers = torch.unique(self._grouping.of(*columns), return_inverse=True)
        for step, some in chunk.by_step():
            if step not in operators:
                continue
            operator = operators[step].restricted(region, view)
            here, places = torch.unique(numbers[some], return_inverse=True)
            sums = into.new_zeros(len(here), *operator.needs.shape)
            add_groups(sums, sides[some], places, operator.needs)
            into.index_add_(0, groups[here].to(into.device), operator.apply(sums))

    def product(self, solved: Sequence[tuple[Columns, Tensor]]) -> Tensor:
        """(groups, queries): `Σ C xᵀ` over some parts, for x (queries, lines, side)."""
        return by_blocks(self, solved)

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
        return self._accounting.numbers(book).cpu()[visits.steps]


class Matrix(Protocol):
    """Groups × parameters, in pieces."""

    @property
    def books(self) -> Sequence[Book]:
        """The parameters it is made of."""

    @property
    def groups(self) -> int:
        """How many rows it has."""

    def columns(self, books: Sequence[Book]) -> Iterator[Columns]:
        """All columns of some books, of all groups; each is valid until the next."""

    def blocks(self, parts: Sequence[Columns]) -> Iterator[Columns]:
        """Parts of parameters, some groups at a time."""

    def is_large(self, book: Book) -> bool:
        """Whether a book is better gone through some groups at a time."""

    def whole(self, book: Book) -> Columns:
        """All of a book, to be filled."""

    def product(self, solved: Sequence[tuple[Columns, Tensor]]) -> Tensor:
        """(groups, queries): `Σ C xᵀ` over some parts, for x (queries, lines, side)."""


def times(matrix: Contributions, directions: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """(groups, directions) for each book: `C d`, by the book's share of it, in float64."""
    count = len(next(iter(directions.values())))
    zero = torch.zeros(matrix.groups, count, dtype=torch.float64)
    found = {book.name: zero.clone() for book in matrix.books}
    for columns in matrix.pieces(matrix.books):
        asked = columns.of(directions[columns.book.name])
        found[columns.book.name][columns.groups] += (columns.values @ asked.T).double().cpu()
    return found


def by_blocks(matrix: Matrix, solved: Sequence[tuple[Columns, Tensor]]) -> Tensor:
    """(groups, queries): `Σ C xᵀ` over some parts, for x (queries, lines, side); one scan."""
    asked = {part.key: x.flatten(1).T for part, x in solved}
    total = torch.zeros(matrix.groups, len(solved[0][1]), dtype=torch.float64)
    for columns in matrix.blocks([part for part, _ in solved]):
        x = asked[columns.key].to(columns.values)
        total[columns.groups] += (columns.values @ x).double().cpu()
    return total


def _narrow(span: Span, book: Book) -> Span:
    """Coefficients for each element in the precision of the columns."""
    operators = span.coefficients[book.name].operators
    narrow = StepOperators({t: operator.narrow() for t, operator in operators.items()})
    return replace(span, coefficients={book.name: narrow})


def _cut(length: int, each: int) -> list[slice]:
    return [slice(at, min(at + each, length)) for at in range(0, length, each)]


def _by_streams(parts: Sequence[Columns]) -> list[list[Columns]]:
    """The parts in lists, each of books that are made of the same streams."""
    found: dict[frozenset[str], list[Columns]] = {}
    for part in parts:
        found.setdefault(frozenset(part.book.terms), []).append(part)
    return list(found.values())


def _alike(term: Term, other: Term) -> bool:
    """Whether they see the parameter as the same matrix."""
    same_groups = term.groups == other.groups or term.view != "swapped"
    return term.view == other.view and same_groups


def _turned(dense: Tensor, book: Book, own: Term, term: Term) -> Tensor:
    """Whole matrices of one view as those of another."""
    parameters = [from_matrix(d, book.shape, own.view, own.groups) for d in dense]
    return torch.stack([as_matrix(p, term.view, term.groups) for p in parameters])
