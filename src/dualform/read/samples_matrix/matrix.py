"""The ledger as a matrix: samples × parameters, never in memory as a whole.

`C[i]` is everything the rows of sample i have added to the parameters, with what the optimizer made
of them. `C` is gone through some columns at a time; whatever is asked of it (its product with
directions, its Gram matrix, its leading directions) is a sum over those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

from dualform.ledger import Book, Stream
from dualform.memory.views import Region
from dualform.optimizers import Number, Operator
from dualform.read.coefficients import Accounting, Span, StepOperators
from dualform.read.engine import Scratch, ShardRange
from dualform.read.engine.interface import Partial
from dualform.read.grouping import Grouping
from dualform.read.questions import seen_as
from dualform.read.samples_matrix.block_sums import Make, Products, by_group
from dualform.read.samples_matrix.columns import Columns, shape_of
from dualform.read.samples_matrix.coordinates import Coordinates
from dualform.read.samples_matrix.folds import (
    GroupedRows,
    SteppedRows,
    add_turned,
    alike,
    cut,
    receiver,
)
from dualform.read.samples_matrix.shared_tails import Chain, Later, share_of
from dualform.read.samples_matrix.visit_weights import (
    LastVisitWeights,
    StepWeights,
    VisitWeights,
)

COLUMN_BYTES = 256 << 20
"""How large the columns that are held at a time may be."""

BLOCK_BYTES = 16 << 20
"""How large blocks of all columns of some groups are, so that a processor's cache holds them."""

BLOCK_GROUPS = 512
"""How many groups a block has at least, where they fit into memory: to add up the Gram matrices of
fewer would cost more than to make them."""

REPLAYED_BYTES = 512 << 20
"""How large the coefficients may be that are kept while one parameter's columns are made."""


class SamplesMatrix:
    """`C`: groups × parameters, for some books; from the ledger, or of rows weighed otherwise."""

    def __init__(
        self,
        accounting: Accounting,
        grouping: Grouping,
        books: Sequence[Book] | None = None,
        weights: VisitWeights | None = None,
        memory: int | None = None,
        coordinates: Mapping[str, Coordinates] | None = None,
    ) -> None:
        self._accounting, self._grouping = accounting, grouping
        self.coordinates: Mapping[str, Coordinates] = coordinates or {}
        """What some of its books are in, by name."""
        self.groups = grouping.count
        """How many rows the matrix has."""
        self._memory = COLUMN_BYTES if memory is None else memory
        self._scratch = Scratch()
        self._replayed: tuple[str, list[Span]] = ("", [])
        found = [book for book in (books or accounting.ledger.info.books) if book.terms]
        small = {name: own.small for name, own in self.coordinates.items()}
        self.books = [small.get(book.name, book) for book in found]
        """Some of them as small as their summaries."""
        if weights is None and accounting.rule.by_numbers:
            weights = StepWeights({book.name: accounting.numbers(book) for book in self.books})
        self._weights = weights

    def columns(self, books: Sequence[Book] | None = None) -> Iterator[Columns]:
        """All columns (of some books), some at a time; each is valid until the next."""
        batches = list(self._batches(self.books if books is None else books))
        if self._weights is not None:
            yield from self._grouped([(parts, self.groups) for parts in batches], self._weights)
            return
        widths = [sum(part.width for part in parts) for parts in batches]
        most = self.groups * max(widths, default=0)
        buffer = torch.empty(most, device=self._accounting.device)
        for parts in batches:
            filled = cut(buffer, parts, slice(0, self.groups))
            for stream in parts[0].book.terms:
                receivers = [receiver(part, stream, StepWeights({})) for part in filled]
                for part, found in zip(filled, receivers, strict=True):
                    self._add_replayed(found.into, part.book, stream, found.region)
                add_turned(filled, receivers)
            yield from filled

    def _grouped(
        self, plan: Sequence[tuple[Sequence[Columns], int]], weights: VisitWeights
    ) -> Iterator[Columns]:
        """Parts of parameters with so many groups at a time, from rows with a number each."""
        accounting = self._accounting
        return accounting.reader.reduce_blocks(self._fold(plan, weights), accounting.until)

    def _fold(
        self, plan: Sequence[tuple[Sequence[Columns], int]], weights: VisitWeights
    ) -> GroupedRows:
        return GroupedRows(
            plan,
            self._streams,
            self._grouping,
            weights,
            self._accounting.device,
            self._scratch,
            self.coordinates,
        )

    @cached_property
    def _streams(self) -> tuple[Stream, ...]:
        """Those that feed the books."""
        names = {name for book in self.books for name in book.terms}
        return tuple(s for s in self._accounting.ledger.info.streams if s.name in names)

    def of_last_visits(self) -> SamplesMatrix:
        """The same of each sample's own gradient, as it was when training last saw it."""
        accounting = self._accounting
        fold = GroupedRows((), self._streams, self._grouping, StepWeights({}))
        visits = fold.visits(ShardRange.of(accounting.ledger, 1, accounting.until))
        weights = LastVisitWeights.of_visits(visits, accounting.until)
        return SamplesMatrix(
            accounting, self._grouping, self.books, weights, self._memory, self.coordinates
        )

    def _batches(self, books: Sequence[Book]) -> Iterator[list[Columns]]:
        """Parts that are made of the same streams, as many as fit into memory together."""
        batch: list[Columns] = []
        width = 0
        for part in (part for book in books for part in self._parts(book)):
            own = part.width
            same = batch and batch[-1].book.terms.keys() == part.book.terms.keys()
            if batch and not (same and 4 * self.groups * (width + own) <= self._memory):
                yield batch
                batch, width = [], 0
            batch.append(part)
            width += own
        if batch:
            yield batch

    def _parts(self, book: Book) -> list[Columns]:
        """The book's matrix in parts that fit into memory: lines of the longer side, or of one."""
        term = next(iter(book.terms.values()))
        height, width = shape_of(book, term)
        shorter, longer = sorted((height, width))
        most = max(1, self._memory // (4 * max(1, self.groups)))
        regions = [Region.whole(height, width)]  # seen as other matrices, parts are not the same
        if all(alike(term, own) for own in book.terms.values()):
            pairs = product(_cut(shorter, max(1, most // longer)), _cut(longer, most))
            regions = [Region(*(pair if height <= width else pair[::-1])) for pair in pairs]
        return [Columns(book, term, region, torch.empty(0)) for region in regions]

    def sum_blocks(self, parts: Sequence[Columns], make: Make[Partial]) -> Partial:
        """What the blocks of some parts add up to, wherever they are made."""
        accounting = self._accounting
        return accounting.reader.sum_blocks(make(self._by_group(parts)), accounting.until)

    def blocks(self, parts: Sequence[Columns]) -> Iterator[Columns]:
        """Parts of parameters, some groups at a time; each is valid until the next.

        Rows are read once for all parts that are made of the same streams, in the order of groups.
        They must have a number each: see `is_large`.
        """
        accounting = self._accounting
        return accounting.reader.reduce_blocks(self._by_group(parts), accounting.until)

    def _by_group(self, parts: Sequence[Columns]) -> GroupedRows:
        assert self._weights is not None
        by_streams: dict[frozenset[str], list[Columns]] = {}
        for part in parts:
            by_streams.setdefault(frozenset(part.book.terms), []).append(part)
        plan = []
        for same in by_streams.values():
            width = sum(part.width for part in same)
            plan.append((same, min(self.groups, self._together(4 * width))))
        return self._fold(plan, self._weights)

    def _together(self, nbytes: int) -> int:
        """How many groups a block has, where each takes so many bytes."""
        most = max(1, self._memory // nbytes)
        if torch.device(self._accounting.device).type != "cpu":  # where each call costs
            return most
        return min(most, max(BLOCK_GROUPS, BLOCK_BYTES // nbytes))

    def is_large(self, book: Book) -> bool:
        """Whether to make its columns takes more than one scan, but its groups can be cut.

        With those of all books that are made of the same streams, for which it is one scan.
        """
        can_cut = self._weights is not None and self._grouping.by_visit
        size = sum(b.size for b in self.books if b.terms.keys() == book.terms.keys())
        return can_cut and 4 * self.groups * size > self._memory

    def whole(self, book: Book) -> Columns:
        """All of a book, to be filled."""
        term = next(iter(book.terms.values()))
        return Columns(book, term, Region.whole(*shape_of(book, term)), torch.empty(0))

    def _add_replayed(self, into: Tensor, book: Book, stream: str, region: Region) -> None:
        """In the order of time, since what a step made of its rows is an operator of its own.

        What later bases share is applied once a basis, if all groups fit into memory as they are.
        """
        later = Later() if 4 * self.groups * book.size <= self._memory else None
        for span in self._spans(book):
            operators = span.coefficients[book.name].operators
            if later is not None:
                operators = {step: later.own(step, found) for step, found in operators.items()}
            self._add_steps(into, book, stream, region, operators)
        for chain in later.chains() if later is not None else ():
            self._add_chain(into, book, stream, region, chain)

    def _add_chain(
        self, into: Tensor, book: Book, stream: str, region: Region, chain: Chain
    ) -> None:
        """What each basis makes of all that came before it, as far as it has not faded."""
        term = book.terms[stream]
        whole = Region.whole(*shape_of(book, term))
        sums = into.new_zeros(self.groups, *whole.shape)
        for tail, numbers in chain:
            shares = {step: Number(share) for step, share in numbers.items()}
            self._add_steps(sums, book, stream, whole, shares)
            into += region.of(seen_as(book, term).through(tail.own.apply, sums))
            sums *= share_of(tail)

    def _add_steps(
        self,
        into: Tensor,
        book: Book,
        stream: str,
        region: Region,
        operators: Mapping[int, Operator],
    ) -> None:
        """Adds the rows of some steps through their operators."""
        reader = self._accounting.reader
        seen = reader.ledger.info.stream(stream)
        fold = SteppedRows(book, seen, region, operators, self._grouping, reader.device)
        if operators:
            reader.reduce(fold, max(operators), min(operators), onto=into)

    def _spans(self, book: Book) -> Iterable[Span]:
        """Replayed once for all parts of a book, where its coefficients fit into memory."""
        accounting = self._accounting
        if self._replayed[0] != book.name:
            if len(self._parts(book)) == 1 or 4 * book.size * accounting.until > REPLAYED_BYTES:
                return accounting.spans([book])
            self._replayed = (book.name, [_narrow(span, book) for span in accounting.spans([book])])
        return self._replayed[1]

    def product(self, solved: Sequence[tuple[Columns, Tensor]]) -> Tensor:
        """(groups, queries): `Σ C xᵀ` over some parts, for x (queries, lines, side)."""
        return by_blocks(self, solved)


class Matrix(Protocol):
    """Groups × parameters, in pieces."""

    @property
    def books(self) -> Sequence[Book]:
        """The parameters it is made of."""

    @property
    def groups(self) -> int:
        """How many rows it has."""

    @property
    def coordinates(self) -> Mapping[str, Coordinates]:
        """What some of its books are in, by name."""

    def columns(self, books: Sequence[Book]) -> Iterator[Columns]:
        """All columns of some books, of all groups; each is valid until the next."""

    def sum_blocks(self, parts: Sequence[Columns], make: Make[Partial]) -> Partial:
        """What the blocks of some parts add up to."""

    def is_large(self, book: Book) -> bool:
        """Whether a book is better gone through some groups at a time."""

    def whole(self, book: Book) -> Columns:
        """All of a book, to be filled."""

    def product(self, solved: Sequence[tuple[Columns, Tensor]]) -> Tensor:
        """(groups, queries): `Σ C xᵀ` over some parts, for x (queries, lines, side)."""


def times(matrix: SamplesMatrix, directions: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """(groups, directions) for each book: `C d`, by the book's share of it, in float64."""
    count = len(next(iter(directions.values())))
    zero = torch.zeros(matrix.groups, count, dtype=torch.float64)
    found = {book.name: zero.clone() for book in matrix.books}
    large = [book for book in matrix.books if matrix.is_large(book)]
    for columns in matrix.columns([book for book in matrix.books if book not in large]):
        x = columns.of(directions[columns.book.name])
        found[columns.book.name] += (columns.values @ x.T).double().cpu()
    parts = [matrix.whole(book) for book in large]
    asked = {part.key: part.of(directions[part.book.name]) for part in parts}
    answers = matrix.sum_blocks(parts, partial(Products, asked=asked)) if parts else {}
    for part, groups, own in by_group(answers, parts):
        found[part.book.name][groups] += own
    return found


def by_blocks(matrix: Matrix, solved: Sequence[tuple[Columns, Tensor]]) -> Tensor:
    """(groups, queries): `Σ C xᵀ` over some parts, for x (queries, lines, side); one scan."""
    parts, asked = [part for part, _ in solved], {part.key: x.flatten(1) for part, x in solved}
    found = matrix.sum_blocks(parts, partial(Products, asked=asked))
    total = torch.zeros(matrix.groups, len(solved[0][1]), dtype=torch.float64)
    for _, groups, answers in by_group(found, parts):
        total[groups] += answers
    return total


def _narrow(span: Span, book: Book) -> Span:
    """Coefficients for each element in the precision of the columns."""
    operators = span.coefficients[book.name].operators
    narrow = StepOperators({t: operator.narrow() for t, operator in operators.items()})
    return replace(span, coefficients={book.name: narrow})


def _cut(length: int, each: int) -> list[slice]:
    return [slice(at, min(at + each, length)) for at in range(0, length, each)]
