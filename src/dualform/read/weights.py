"""Parameters from the ledger: as kept, as the rows add up to, and without some samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from dualform.errors import UnknownStepError
from dualform.ledger import Book, Ledger, Stream
from dualform.ledger.format import BUFFER
from dualform.ledger.reader import values_by_step
from dualform.memory.blocks import Sides
from dualform.optimizers import Operator, apply
from dualform.read.coefficients import Accounting
from dualform.read.engine import Fold, ShardRange
from dualform.read.entry_sums import entry_sum
from dualform.read.forward import forward_totals
from dualform.read.scan import chunks, row_sides, rows_total
from dualform.read.step_gradients import chosen, residuals, streams_of
from dualform.read.stream_folds import StreamFold

Balance: TypeAlias = tuple[Tensor, Tensor]
"""A parameter as its book adds up to it, and its first value's part of that."""


def initial_part(accounting: Accounting, book: Book) -> Tensor:
    """`c0 · W_0` (and the buffer training started with), in float64."""
    kept = accounting.ledger.kept(0)
    on_W, on_b = accounting.initial(book)
    part = apply(on_W, kept.read(book.name).double())
    if BUFFER + book.name in kept:
        part = part + apply(on_b, kept.read(BUFFER + book.name).double())
    return part.cpu()


def step_part(accounting: Accounting, book: Book) -> Tensor:
    """The sum of the changes that were booked by step, in float64."""
    counts = torch.tensor(accounting.changes(), dtype=torch.float64)
    return accounting.reader.reduce(ChangeSum(book, counts), accounting.until)


@dataclass(frozen=True)
class ChangeSum(Fold[Tensor]):
    """A parameter's changes that were booked by step, summed."""

    book: Book
    counts: Tensor
    """(T + 1,): how much a change counts by its step's number."""
    streams = ()

    def reads(self, shard: ShardRange) -> bool:
        """Whether the shard has changes of the parameter; all ranks say the same of them."""
        return shard.shard.rank == 0 and f"{self.book.name}/changes" in shard.shard.file

    def start(self) -> Tensor:
        """Zero."""
        return torch.zeros(self.book.shape, dtype=torch.float64)

    def fold(self, partial: Tensor, shard: ShardRange) -> Tensor:
        """Adds the changes of a shard's steps, one at a time."""
        span = (shard.first, shard.last)
        for step, change in values_by_step(shard.shard, self.book, "change", *span):
            partial += self.counts[step] * change.double()
        return partial

    def merge(self, one: Tensor, other: Tensor) -> Tensor:
        """The sum."""
        return one.add_(other)

    @property
    def partial_bytes(self) -> int:
        """Of the parameter in float64."""
        return 8 * self.book.size


def residual_part(accounting: Accounting, book: Book) -> Tensor:
    """What entries that are less than the rows leave of a parameter, in float64.

    Of a book that is summarized it is known where its weights were kept.
    """
    if accounting.ledger.is_summarized(book):
        accounted = initial_part(accounting, book) + step_part(accounting, book)
        return kept_weight(accounting, book) - accounted - entry_part(accounting, book)
    total = ResidualSum(book, {}, accounting.device).start()
    if accounting.ledger.has_residual(book):
        for span in accounting.spans([book]):
            fold = ResidualSum(book, span.coefficients[book.name].operators, accounting.device)
            total = accounting.reader.reduce(fold, span.last, span.first, total)
    return total.cpu()


def kept_weight(accounting: Accounting, book: Book) -> Tensor:
    """The parameter as it was kept at the step that is read, in float64."""
    ledger, until = accounting.ledger, accounting.until
    if until not in ledger.kept_steps or any(accounting.shares[:-1]):
        raise UnknownStepError(
            f"'{book.name}' was kept as summaries, which add up to its weights only where those "
            f"were kept: after the steps {ledger.kept_steps}. Read the run as of one of them; "
            "recorder.checkpoint() keeps another, and keep='rows' makes every step readable."
        )
    return ledger.kept(until).read(book.name).double()


def entry_part(accounting: Accounting, book: Book, samples: Tensor | None = None) -> Tensor:
    """What the entries of a book that is summarized add up to, of all samples or some."""
    if samples is not None:
        return entry_sum(accounting, book, samples)
    if book.name not in accounting.entries:
        accounting.entries[book.name] = entry_sum(accounting, book)
    return accounting.entries[book.name]


@dataclass(frozen=True)
class ResidualSum(Fold[Tensor]):
    """What entries leave of a parameter's gradients, as the optimizer made it count, summed."""

    book: Book
    operators: Mapping[int, Operator]
    device: torch.device | str = "cpu"
    streams = ()

    def reads(self, shard: ShardRange) -> bool:
        """Whether the shard has residuals of the parameter."""
        return f"{self.book.name}/residuals" in shard.shard.file

    def start(self) -> Tensor:
        """Zero."""
        return torch.zeros(self.book.shape, dtype=torch.float64, device=self.device)

    def fold(self, partial: Tensor, shard: ShardRange) -> Tensor:
        """Adds the residuals of a shard's steps; those of several ranks add up."""
        for step, residual in residuals(shard, self.book):
            if step in self.operators:
                partial += apply(self.operators[step], residual.to(partial))
        return partial

    def merge(self, one: Tensor, other: Tensor) -> Tensor:
        """The sum."""
        return one.add_(other)

    @property
    def partial_bytes(self) -> int:
        """Of the parameter in float64."""
        return 8 * self.book.size


def sampleless_part(accounting: Accounting, book: Book) -> Tensor:
    """What is booked by step and belongs to no sample: observed changes and residuals."""
    return step_part(accounting, book) + residual_part(accounting, book)


def row_parts(accounting: Accounting, books: Sequence[Book], samples: Tensor) -> dict[str, Tensor]:
    """What the rows of some samples add up to in each book, in float64."""
    if accounting.rule.by_numbers:
        return {book.name: _row_part(accounting, book, samples) for book in books}
    summarized = [book for book in books if accounting.ledger.is_summarized(book)]
    found = {book.name: entry_part(accounting, book, samples) for book in summarized}
    exact = [book for book in books if book.name not in found]
    replayed = forward_totals(accounting, exact, samples)
    return found | {book.name: chosen for book, (_, _, chosen) in replayed}


def _row_part(accounting: Accounting, book: Book, samples: Tensor | None) -> Tensor:
    fold = _row_sum(accounting, book)
    return accounting.reader.reduce(replace(fold, samples=samples), accounting.until).cpu()


def gross_part(accounting: Accounting, book: Book) -> Tensor:
    """The sum of the sizes of what each row adds to an offset or scale, whatever its sign."""
    fold = _row_sum(accounting, book)
    return accounting.reader.reduce(replace(fold, sizes=True), accounting.until).cpu()


def _row_sum(accounting: Accounting, book: Book) -> RowSum:
    """All rows of a book, each with the number of its step."""
    numbers = accounting.numbers(book) if book.terms else torch.zeros(0, device=accounting.device)
    return RowSum(book, streams_of(accounting.ledger, book), numbers, accounting.device)


@dataclass(frozen=True)
class RowSum(StreamFold[Tensor]):
    """`Σ c a ⊗ b` over a book's rows."""

    book: Book
    fed_by: tuple[Stream, ...]
    numbers: Tensor
    """(T + 1,): the coefficient of a row by its step's number."""
    device: torch.device | str = "cpu"
    samples: Tensor | None = None
    """The stored ids of the samples whose rows count; by default of all."""
    sizes: bool = False
    """Whether sizes are summed, whatever their sign; of rows that are columns."""

    @property
    def read_streams(self) -> tuple[Stream, ...]:
        """Those that feed the book."""
        return self.fed_by

    def start(self) -> Tensor:
        """Zero."""
        return torch.zeros(self.book.shape, dtype=torch.float64, device=self.device)

    def fold(self, partial: Tensor, shard: ShardRange) -> Tensor:
        """Adds the rows of a shard."""
        for stream in self.fed_by:
            term = self.book.terms[stream.name]
            for chunk in chunks(shard, stream, self.device):
                sides, counts = row_sides(chunk, term), self.numbers[chunk.steps]
                if not self.sizes:
                    counts = chosen(chunk, self.samples) * counts
                elif isinstance(sides, Sides) and sides.b is None:
                    sides, counts = replace(sides, a=sides.a.abs()), counts.abs()
                else:
                    continue
                partial += rows_total(self.book, term, sides, counts)
        return partial

    def merge(self, one: Tensor, other: Tensor) -> Tensor:
        """The sum."""
        return one.add_(other)

    @property
    def partial_bytes(self) -> int:
        """Of the parameter in float64."""
        return 8 * self.book.size


def balances(accounting: Accounting, books: Sequence[Book]) -> Iterator[tuple[Book, Balance]]:
    """Each parameter as its book adds up to it, and its first value's part, in float64.

    Books that the optimizer's replay takes together follow one another.
    """
    for book in books:
        if accounting.ledger.is_summarized(book):
            yield book, (kept_weight(accounting, book), initial_part(accounting, book))
    books = [book for book in books if not accounting.ledger.is_summarized(book)]
    if accounting.rule.by_numbers:
        for book in books:
            initial = initial_part(accounting, book)
            whole = _row_part(accounting, book, None) + residual_part(accounting, book) + initial
            yield book, (whole + step_part(accounting, book), initial)
        return
    for book, (whole, initial, _) in forward_totals(accounting, books):
        yield book, (whole + step_part(accounting, book), initial)


def balance(accounting: Accounting, book: Book) -> Balance:
    """The same of one book."""
    return next(balances(accounting, [book]))[1]


def reconstruct(accounting: Accounting) -> dict[str, Tensor]:
    """Every parameter as the books add up to it, in float64."""
    books = accounting.ledger.info.books
    return {book.name: whole for book, (whole, _) in balances(accounting, books)}


def attributed_share(accounting: Accounting, weights: Mapping[str, Tensor]) -> float:
    """The share of the change of all parameters that is attributed to samples; 1 where all is."""
    books = accounting.ledger.info.books
    lost = [float(sampleless_part(accounting, book).norm()) for book in books]
    if not any(lost):
        return 1.0
    changes = [weights[book.name].double() - initial_part(accounting, book) for book in books]
    return share_left(lost, [float(change.norm()) for change in changes])


def share_left(lost: Sequence[float], sizes: Sequence[float]) -> float:
    """What is left of some vectors, where so much of each is lost: `1 − ‖lost‖ / ‖all‖`.

    >>> share_left([0.0, 3.0], [4.0, 3.0])
    0.4
    """
    size = math.hypot(*sizes)
    return max(0.0, 1.0 - math.hypot(*lost) / size) if size else 1.0


def weights_near(ledger: Ledger, step: int) -> tuple[tuple[int, ...], dict[str, Tensor]]:
    """Weights after a step: as kept, or on the line between those kept before it and after it.

    Also the steps after which they were kept, one or two.
    """
    kept = ledger.kept_steps
    before, after = max(k for k in kept if k <= step), [k for k in kept if k > step][:1]
    if before == step or not after:
        return (before,), ledger.weights(before)
    share = (step - before) / (after[0] - before)
    first, last = ledger.weights(before), ledger.weights(after[0])
    between = {
        name: torch.lerp(first[name], last[name], share)
        for name in first
        if first[name].is_floating_point()
    }
    return (before, *after), first | between
