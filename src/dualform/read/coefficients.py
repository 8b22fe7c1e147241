"""What the optimizer made of each step's gradient, as of any step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.errors import CorruptError
from dualform.ledger import Book, Ledger
from dualform.memory.shared import AnySides
from dualform.memory.summary import Bases, SummarySides
from dualform.memory.views import View
from dualform.optimizers import (
    BY_ROW,
    OBSERVED,
    Blend,
    Coefficients,
    Diagonal,
    History,
    Memo,
    Number,
    Operator,
    Pair,
    Question,
    plus,
    rule_named,
)
from dualform.read.engine import Engine, RowReader, Threads
from dualform.read.moves import computable
from dualform.read.replay import KeptDivisors, Replay, spans_of
from dualform.read.scan import Chunk

FADED = 2.0**-40
"""Diagonals of which a step has less than this, relative to others, are left out."""


@dataclass(frozen=True)
class StreamView:
    """How the rows of a stream see a parameter: as which matrix, and in which bases, if in any."""

    view: View
    bases: Bases | None = None


class StepCoefficients(ABC):
    """What each step of a span contributes to a book."""

    @property
    @abstractmethod
    def operators(self) -> Mapping[int, Operator]:
        """One for each step that is booked by row, by its number."""

    def put(
        self, asked: Mapping[str, tuple[Question, StreamView]]
    ) -> dict[str, tuple[Question, ...]]:
        """What the rows of each stream are asked, of what the book is asked: done once a span.

        Streams that see the book as the same matrix have the same question.
        """
        return {stream: (question,) for stream, (question, _) in asked.items()}

    @abstractmethod
    def answers(
        self, asked: Sequence[Question], chunk: Chunk, sides: AnySides, view: View, memo: Memo
    ) -> Tensor:
        """(rows, questions): what the rows of a chunk answer, as the optimizer made them count."""


@dataclass(frozen=True)
class StepOperators(StepCoefficients):
    """One operator for each step."""

    found: Mapping[int, Operator]

    @property
    def operators(self) -> Mapping[int, Operator]:
        """Those that were found."""
        return self.found

    def answers(
        self, asked: Sequence[Question], chunk: Chunk, sides: AnySides, view: View, memo: Memo
    ) -> Tensor:
        """In float64, step by step."""
        (question,) = asked
        found = chunk.values.new_zeros(len(sides), len(question), dtype=torch.float64)
        wide = sides.double()  # what is divided by small gradients needs the digits
        for step, rows in chunk.by_step():
            if step in self.found:
                found[rows] = self.found[step].answers(question, wide[rows], view, memo)
        return found


@dataclass(frozen=True)
class StepNumbers(StepCoefficients):
    """Numbers for each step, its factor included: one for each of some diagonals.

    None among the diagonals is 1 for every element. Rows are asked once for each diagonal, and not
    once a step.
    """

    numbers: Tensor
    """(T + 1, diagonals)."""
    diagonals: tuple[Diagonal | None, ...] = (None,)

    @classmethod
    def of(cls, operators: Mapping[int, Operator], last: int) -> StepNumbers | None:
        """Operators that are made of a few diagonals, the other way round; None if some are not."""
        columns: dict[Diagonal | None, Tensor] = {None: torch.zeros(last + 1, dtype=torch.float64)}
        for step, operator in operators.items():
            if operator.diagonals is None:
                return None
            for diagonal, number in operator.diagonals.items():
                if diagonal not in columns:
                    columns[diagonal] = torch.zeros(last + 1, dtype=torch.float64)
                columns[diagonal][step] = number
        numbers = torch.stack(list(columns.values()), 1)
        numbers[numbers.abs() < FADED * numbers.abs().amax(1, keepdim=True)] = 0.0
        used = [at for at in range(len(columns)) if not at or bool(numbers[:, at].any())]
        return cls(numbers[:, used], tuple(list(columns)[at] for at in used))

    @property
    def operators(self) -> Mapping[int, Operator]:
        """The blends that are not zero."""
        blends: dict[int, Operator] = {}
        for step, (first, *others) in enumerate(self.numbers.tolist()):
            pairs = zip(self.diagonals[1:], others, strict=True)
            parts = {diagonal: number for diagonal, number in pairs if diagonal and number}
            if parts or first:
                blends[step] = Blend(parts, first) if parts else Number(first)
        return blends

    def put(
        self, asked: Mapping[str, tuple[Question, StreamView]]
    ) -> dict[str, tuple[Question, ...]]:
        """The questions through each diagonal, of which one at a time is in memory."""
        found: dict[str, list[Question]] = {stream: [] for stream in asked}
        for diagonal in self.diagonals:
            numbers = None if diagonal is None else diagonal.numbers
            scaled: dict[View, Question] = {}
            for stream, (question, seen_by) in asked.items():
                if numbers is not None and seen_by.view not in scaled:
                    scaled[seen_by.view] = question.scaled(seen_by.view.matrix(numbers))
                seen = scaled.get(seen_by.view, question)
                found[stream].append(
                    seen if seen_by.bases is None else seen_by.bases.question(seen)
                )
        return {stream: tuple(questions) for stream, questions in found.items()}

    def answers(
        self, asked: Sequence[Question], chunk: Chunk, sides: AnySides, view: View, memo: Memo
    ) -> Tensor:
        """In the precision of the rows, all steps at once."""
        rows = sides.kept if isinstance(sides, SummarySides) else sides
        columns = self.numbers.to(chunk.steps.device)[chunk.steps].unbind(1)
        total: Tensor | None = None
        for question, numbers in zip(asked, columns, strict=True):
            if len(asked) == 1 or bool(numbers.any()):
                found = rows.answers(question)
                found.mul_(numbers[:, None].to(found))
                total = found if total is None else total.add_(found)
        return chunk.values.new_zeros(len(rows), len(asked[0])) if total is None else total


@dataclass(frozen=True)
class Span:
    """Consecutive steps, and what each of them contributes to some books."""

    first: int
    last: int
    coefficients: dict[str, StepCoefficients]


class Accounting:
    """The coefficients of every book, read as of step `until`."""

    def __init__(
        self,
        ledger: Ledger,
        until: int,
        device: torch.device | str = "cpu",
        shares: Sequence[float] = (),
        engine: Engine | None = None,
    ) -> None:
        self.ledger, self.until, self.device = ledger, until, device
        self.reader = RowReader(ledger, device, engine or Threads())
        """Reads the rows."""
        self.shares = [*shares] or [*[0.0] * until, 1.0]
        """How much the parameters after each step count: a mean, or only the last of them."""
        self.rule, fields = rule_named(ledger.info.rule), ledger.info.fields
        if "lr" in self.rule.fields and "lr" not in fields:
            raise CorruptError(
                f"the description of '{ledger.path}' names the hyper-parameters "
                f"{', '.join(fields) or 'of none'}, and '{ledger.info.rule}' has a rate, 'lr'; "
                "restore run.json from a copy of the run."
            )
        self._columns = {book.name: at for at, book in enumerate(ledger.info.books)}
        self._known: dict[tuple[bytes, ...], Coefficients] = {}
        self._initial: dict[str, Pair] = {}
        self.entries: dict[str, Tensor] = {}
        """What the entries of books that are summarized add up to, as far as that was asked."""

    @property
    def turns(self) -> bool:
        """Whether steps turn gradients into other bases."""
        return self.rule.turns

    @cached_property
    def _states(self) -> NDArray[np.uint8]:
        """(T, books)."""
        return self.ledger.by_step("states").to(torch.uint8).numpy()[: self.until]

    @cached_property
    def _factors(self) -> NDArray[np.float64]:
        """(T, books)."""
        return self.ledger.by_step("factors").double().numpy()[: self.until]

    @cached_property
    def _hyper(self) -> NDArray[np.float64]:
        """(T, books, fields): the hyper-parameters of each book's group."""
        parts = []
        for shard in self.ledger.step_shards:
            hyper, groups = shard.file.read_all(("hyper", "groups")).values()
            if (hyper.shape[2], groups.shape[1]) != (
                len(self.ledger.info.fields),
                len(self._columns),
            ):
                raise CorruptError(
                    f"'{shard.path}' has {hyper.shape[2]} hyper-parameters of {groups.shape[1]} "
                    "books, and the run has others; restore the file from a copy of the run."
                )
            own = groups.long().clamp_min(0)  # those of group 0 where a book has no group
            parts.append(hyper.gather(1, own[:, :, None].expand(-1, -1, hyper.shape[2])))
        fields = len(self.ledger.info.fields)
        empty = torch.zeros(0, len(self._columns), fields, dtype=torch.float64)
        return torch.cat([empty, *parts]).numpy()[: self.until]

    def states(self, book: Book) -> NDArray[np.uint8]:
        """(T,): what each step did to the book."""
        return self._states[:, self._columns[book.name]]

    def factors(self, book: Book) -> NDArray[np.float64]:
        """(T,): what the rows' sum was multiplied with before the optimizer saw it."""
        return self._factors[:, self._columns[book.name]]

    def granularity(self, book: Book) -> str:
        """How the book was kept: "row", "step", "row, then step", or "frozen"."""
        states = self.states(book)
        rows, steps = bool((states == BY_ROW).any()), bool((states == OBSERVED).any())
        names = {
            (True, True): "row, then step",
            (True, False): "row",
            (False, True): "step",
            (False, False): "frozen",
        }
        return names[rows, steps]

    def spans(self, books: Sequence[Book]) -> Iterator[Span]:
        """The coefficients of these books' rows, span by span, from the last to the first.

        Optimizers whose coefficients are numbers have a single span. The others are replayed.
        """
        if self.rule.by_numbers:
            numbers = {book.name: StepNumbers(self.numbers(book)[:, None]) for book in books}
            yield Span(1, self.until, dict(numbers))
            return
        by_divisor = {book.name for book in books if self.has_divisors(book)}
        sizes = [1 if book.name in by_divisor else book.size for book in books]
        spans = spans_of(self.ledger, self.until, max(sizes, default=1))
        replays = [
            (KeptDivisors if book.name in by_divisor else Replay)(
                self.reader,
                self.rule.replayed,
                book,
                self.history(book),
                self.factors(book).tolist(),
                spans,
                self.shares,
            )
            for book in books
        ]
        for first, last in reversed(spans):
            found: dict[str, StepCoefficients] = {}
            for replay in replays:
                name, operators = replay.book.name, replay.back(first, last)
                by_number = StepNumbers.of(operators, last) if name in by_divisor else None
                found[name] = by_number or StepOperators(operators)
            yield Span(first, last, found)
        for replay in replays:
            on_W, on_b = replay.r
            self._initial[replay.book.name] = (plus(on_W, self.shares[0]), on_b)

    def has_divisors(self, book: Book) -> bool:
        """Whether a book is summarized, and what its steps were divided by was kept."""
        summarized = not self.rule.by_numbers and self.ledger.is_summarized(book)
        return summarized and self.ledger.has_divisors(book)

    def initial(self, book: Book) -> Pair:
        """What has become of the book's first value, and of its first buffer."""
        if self.rule.by_numbers:
            found = self._of(book)
            return found.initial, found.buffer
        if book.name not in self._initial:
            for _ in self.spans([book]):
                pass
        return self._initial[book.name]

    def changes(self) -> list[float]:
        """(T + 1,): how much an observed change counts by its step's number: it stays."""
        return [float(share) for share in np.cumsum(self.shares[::-1])[::-1]]

    def history(self, book: Book) -> History:
        """What happened to the book, step by step."""
        column = self._columns[book.name]
        starts = [s for s in self.ledger.starts if s["step"] <= self.until]
        buffers = {start["step"]: book.name in start.get("buffers", ()) for start in starts}
        hyper = np.ascontiguousarray(self._hyper[:, column])
        return History(self.states(book), hyper, self.ledger.info.fields, buffers)

    def _of(self, book: Book) -> Coefficients:
        """The book's coefficients; books with the same history share them."""
        history = self.history(book)
        key = (history.states.tobytes(), history.hyper.tobytes(), repr(history.buffers).encode())
        if key not in self._known:
            with computable(self.rule):
                self._known[key] = self.rule.scalar.coefficients(history, self.shares)
        return self._known[key]

    def numbers(self, book: Book) -> Tensor:
        """(T + 1,): a row's coefficient by its step's number, under a rule of numbers."""
        steps = np.zeros(self.until + 1)
        by_row = self.states(book) == BY_ROW
        steps[1:] = np.where(by_row, self._of(book).steps * self.factors(book), 0.0)
        return torch.from_numpy(steps).to(self.device)


def mean_shares(steps: Sequence[int], decay: float | None) -> list[float]:
    """(last step + 1,): how much the weights after each step count in a mean over some steps.

    >>> mean_shares([1, 3], None), mean_shares([1, 3], 0.75)
    ([0.0, 0.5, 0.0, 0.5], [0.0, 0.75, 0.0, 0.25])
    """
    shares = np.zeros(max(steps) + 1)
    ages = np.arange(len(steps))[::-1]
    if decay is None:
        shares[list(steps)] = 1 / len(steps)
    else:
        begun = np.where(ages == len(steps) - 1, 1.0, 1 - decay)
        shares[list(steps)] = decay**ages * begun
    found: list[float] = shares.tolist()
    return found
