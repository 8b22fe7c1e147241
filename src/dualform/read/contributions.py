"""Contributions of rows to a layer's output, computed chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from threading import get_ident
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from dualform.ledger import Book, Ledger, Stream
from dualform.ledger.samples import Label, SampleId
from dualform.memory.blocks import BilinearFunctional, as_matrix, keeps_order
from dualform.optimizers import Memo, Question
from dualform.read.coefficients import Accounting, Span, StepCoefficients, StepNumbers, StreamView
from dualform.read.engine import RowReader, Scratch, ShardRange
from dualform.read.engine.interface import Partial
from dualform.read.engine.shards import stream_bases
from dualform.read.grouping import Grouping
from dualform.read.largest import Largest
from dualform.read.questions import functional, seen_as
from dualform.read.scan import Chunk, chunks, row_sides
from dualform.read.scores import Array
from dualform.read.stream_folds import StreamFold

NO_STEPS = Span(1, 0, {})


@dataclass(frozen=True)
class Source:
    """Where readings come from: a ledger as of a step, and what its samples are called."""

    ledger: Ledger
    accounting: Accounting
    until: int
    weights: Mapping[str, Tensor]
    """The parameters as they were after that step."""
    numbers: Tensor
    """(samples,): the stored ids that occur, sorted."""
    ids: Sequence[SampleId]
    """What the user calls them."""
    labels: Mapping[SampleId, Label]
    device: torch.device | str = "cpu"

    @property
    def reader(self) -> RowReader:
        """Reads the rows."""
        return self.accounting.reader


@dataclass(frozen=True)
class RowQuestions:
    """What is asked of every row that feeds some books; plain data."""

    books: tuple[Book, ...]
    fed_by: tuple[Stream, ...]
    asked: Mapping[tuple[str, str], tuple[Question, ...]]
    """What is asked of a book as a stream sees it, by the names of both."""
    device: torch.device | str = "cpu"
    memos: Scratch = field(default_factory=Scratch)
    """What operators keep of a question, for each book and stream."""

    @classmethod
    def of(
        cls,
        accounting: Accounting,
        books: Sequence[Book],
        question: Callable[[Book, str], Question],
    ) -> RowQuestions:
        """Questions to some books; `question` makes one, of a book as a stream sees it."""
        names = {name for book in books for name in book.terms}
        streams = tuple(s for s in accounting.ledger.info.streams if s.name in names)
        asked = {
            (book.name, stream.name): (question(book, stream.name),)
            for stream in streams
            for book in books
            if stream.name in book.terms
        }
        return cls(tuple(books), streams, asked, accounting.device)

    @classmethod
    def along(
        cls,
        accounting: Accounting,
        directions: Mapping[str, Tensor],
        books: Sequence[Book] | None = None,
    ) -> RowQuestions:
        """What directions (queries, *shape) of some books ask, by default of all: `⟨D, a ⊗ b⟩`."""

        def question(book: Book, stream: str) -> Question:
            asked, term = directions[book.name].to(accounting.device), book.terms[stream]
            if keeps_order(term.view):
                return BilinearFunctional(asked.reshape(len(asked), *seen_as(book, term).size))
            seen = [as_matrix(direction, term.view, term.groups) for direction in asked]
            return BilinearFunctional(torch.stack(seen))

        chosen = [book for book in (books or accounting.ledger.info.books) if book.terms]
        return cls.of(accounting, chosen, question)

    def __len__(self) -> int:
        return len(next(iter(self.asked.values()))[0]) if self.asked else 0

    def put(self, span: Span, ledger: Ledger) -> RowQuestions:
        """The same as the rows of some steps are asked, which is done once and not once a shard."""
        asked: dict[tuple[str, str], tuple[Question, ...]] = {}
        bases = {s.name: stream_bases(ledger.basis_shards, s, self.device) for s in self.fed_by}
        for book in self.books:
            fed = {
                name: (self.asked[book.name, name][0], StreamView(seen_as(book, term), bases[name]))
                for name, term in book.terms.items()
            }
            found = span.coefficients[book.name].put(fed)
            asked |= {(book.name, name): questions for name, questions in found.items()}
        return replace(self, asked=asked)

    def answers(self, shard: ShardRange, span: Span) -> Iterator[tuple[Chunk, dict[str, Tensor]]]:
        """A shard's rows in chunks, with their answers (rows, questions) by book."""
        for stream in self.fed_by:
            fed = [book for book in self.books if stream.name in book.terms]
            for chunk in chunks(shard, stream, self.device):
                found = {}
                for book in fed:
                    key, term = (book.name, stream.name), book.terms[stream.name]
                    memo: Memo = self.memos.get((get_ident(), *key), dict)
                    found[book.name] = span.coefficients[book.name].answers(
                        self.asked[key], chunk, row_sides(chunk, term), seen_as(book, term), memo
                    )
                yield chunk, found


@dataclass(frozen=True)
class AnswerFold(StreamFold[Partial]):
    """A fold over the answers of rows, as some steps made them count."""

    rows: RowQuestions
    span: Span = NO_STEPS

    @property
    def device(self) -> torch.device | str:  # type: ignore[override]
        """Where the rows are multiplied."""
        return self.rows.device

    @property
    def read_streams(self) -> tuple[Stream, ...]:
        """Those that feed the books."""
        return self.rows.fed_by

    def over(self, accounting: Accounting, spans: Iterable[Span] | None = None) -> Partial:
        """The result of all rows, span by span.

        Args:
            spans: how much each step's rows count; by default, as the optimizer made them count.
        """
        partial = self.start()
        for span in accounting.spans(self.rows.books) if spans is None else spans:
            fold = replace(self, span=span, rows=self.rows.put(span, accounting.ledger))
            partial = accounting.reader.reduce(fold, span.last, span.first, partial)
        return partial


Sums: TypeAlias = dict[str, list[Tensor]]
"""(groups, questions) for each grouping; by book, or under "" for all of them together."""


@dataclass(frozen=True)
class AnswerSums(AnswerFold[Sums]):
    """The answers of rows, summed by group."""

    groupings: tuple[Grouping, ...] = ()
    by_book: bool = False
    """Whether each book has sums of its own."""

    def start(self) -> Sums:
        """Zeros."""
        names = [book.name for book in self.rows.books] if self.by_book else [""]
        return {name: [self._zeros(grouping) for grouping in self.groupings] for name in names}

    def _zeros(self, grouping: Grouping) -> Tensor:
        shape = (grouping.count, len(self.rows))
        return torch.zeros(shape, dtype=torch.float64, device=self.device)

    def fold(self, partial: Sums, shard: ShardRange) -> Sums:
        """Adds the answers of a shard's rows to their groups."""
        for chunk, found in self.rows.answers(shard, self.span):
            if not self.by_book:
                found = {"": reduce(Tensor.add_, found.values())}
            groups = [grouping.of_chunk(chunk) for grouping in self.groupings]
            for name, answers in found.items():
                wide = answers.double()
                for total, numbers in zip(partial[name], groups, strict=True):
                    total.index_add_(0, numbers, wide)
        return partial

    def merge(self, one: Sums, other: Sums) -> Sums:
        """The sums of both."""
        for name, sums in one.items():
            for total, more in zip(sums, other[name], strict=True):
                total += more
        return one

    @property
    def partial_bytes(self) -> int:
        """Of all sums."""
        books = len(self.rows.books) if self.by_book else 1
        return 8 * books * len(self.rows) * sum(grouping.count for grouping in self.groupings)


@dataclass(frozen=True)
class LargestRows(AnswerFold[Largest]):
    """The k rows of largest size for each question; of equal ones the earlier."""

    rounds: ClassVar[bool] = False
    k: int = 1

    def start(self) -> Largest:
        """None so far."""
        return Largest(self.k, len(self.rows), self.device)

    def fold(self, partial: Largest, shard: ShardRange) -> Largest:
        """Looks at the rows of a shard."""
        for chunk, found in self.rows.answers(shard, self.span):
            partial.add(reduce(Tensor.add_, found.values()), chunk)
        return partial

    def merge(self, one: Largest, other: Largest) -> Largest:
        """The largest of both."""
        return one.joined(other)


def row_sums(
    accounting: Accounting,
    directions: Mapping[str, Tensor],
    grouping: Grouping,
    books: Sequence[Book] | None = None,
    numbers: Mapping[str, Tensor] | None = None,
    by_book: bool = True,
) -> dict[str, Array]:
    """(groups, queries) for each book: `⟨D, H (a ⊗ b)⟩` over the rows of each group.

    Every row is asked by itself; `samples_matrix` puts the rows of a group together first.

    >>> from dualform.testing import tiny_run
    >>> run, model, x = tiny_run()
    >>> from dualform.read.grouping import ByStep
    >>> accounting, grouping = run.source.accounting, ByStep(run.steps)
    >>> directions = {name: weight[None] for name, weight in run.state_dict().items()}
    >>> row_sums(accounting, directions, grouping)["2.bias"].shape
    (7, 1)

    Args:
        numbers: (steps + 1,) for each book, how much a row counts by its step; by default, as the
            optimizer made it count.
        by_book: if not, the sum over the books is found under "".
    """

    fold = AnswerSums(
        RowQuestions.along(accounting, directions, books), NO_STEPS, (grouping,), by_book
    )
    spans = None
    if numbers is not None:
        given: dict[str, StepCoefficients] = {
            name: StepNumbers(by_step[:, None]) for name, by_step in numbers.items()
        }
        spans = [Span(1, accounting.until, given)]
    return {name: sums[0].cpu().numpy() for name, sums in fold.over(accounting, spans).items()}


class LayerRows:
    """The rows behind one layer's parameters: all uses of them, wherever they are."""

    def __init__(self, source: Source, layer: str, keys: Tensor, directions: Tensor) -> None:
        info = source.ledger.info
        self.terms = info.terms_of(layer)
        """The layer's own terms."""
        self._books = info.fed_by(layer)
        self._keys, self._directions, self._units = keys, directions, _units(directions)
        self.asked = RowQuestions.of(
            source.accounting, self._books, lambda book, _: self._question(book, source.device)
        )
        """What the queries ask of each row."""

    def applied(self, part: Callable[[Book], Tensor]) -> Tensor:
        """(queries,): the answers of a part of each parameter, summed."""
        return torch.stack(
            [
                self._question(book).at(as_matrix(part(book), term.view, term.groups))
                for book in self._books
                for term in [self.terms[book.name]]
            ]
        ).sum(0)

    def _question(self, book: Book, device: torch.device | str = "cpu") -> Question:
        """What the queries ask of a parameter."""
        keys, directions = self._keys.to(device), self._directions.to(device)
        units = None if self._units is None else self._units.to(device)
        return functional(book, self.terms[book.name], keys, directions, units)


def _units(directions: Tensor) -> Tensor | None:
    """The output each direction is, where every one is a single output."""
    units = directions.argmax(1)
    one_hot = torch.nn.functional.one_hot(units, directions.shape[1])
    return units if torch.equal(one_hot.to(directions), directions) else None
