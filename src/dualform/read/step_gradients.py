"""The gradient of each step: the sum of its rows, or what a 16-bit kernel rounded that sum to.

Under autocast a matrix product takes 16-bit copies of its parameters. Their gradient is summed in
32 bits, rounded to 16, and widened, once for each use in a backward pass. An optimizer that follows
signs does not forgive a sum that is rounded to or across zero; it is replayed from what it saw.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor

from dualform.ledger import Book, Ledger, Stream
from dualform.ledger.reader import values_by_step
from dualform.memory.blocks import from_matrix, keeps_order, matrix_shape
from dualform.memory.forms import form_named
from dualform.memory.shared import AnySides
from dualform.memory.summary import SummarySides
from dualform.read.engine import RowReader, ShardRange
from dualform.read.scan import Chunk, chunks, row_sides, rows_total
from dualform.read.stream_folds import StreamFold

NARROW = (torch.bfloat16, torch.float16)
Use: TypeAlias = tuple[tuple[int, int], Tensor, bool]
"""Step and batch, what its rows add up to, and whether they reach all of the parameter."""
GradientsByStep: TypeAlias = dict[int, Tensor]
"""(*shape) for each step by its number, in float64."""


def step_gradients(
    reader: RowReader, book: Book, first: int, last: int, samples: Tensor | None = None
) -> GradientsByStep:
    """Each step's gradient, by its number: the sum of a book's rows, and the residual.

    Of some samples, the sum of their rows: a residual belongs to no sample.

    >>> from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run()
    >>> sorted(step_gradients(RowReader(Ledger(run.path)), run.info.books[0], 2, 4))
    [2, 3, 4]
    """
    fold = StepGradients(book, streams_of(reader.ledger, book), reader.device, samples)
    return reader.reduce(fold, last, first)


def rounded_gradients(reader: RowReader, book: Book, first: int, last: int) -> GradientsByStep:
    """The gradient of each step of a span as the kernels rounded it, by its number."""
    kernels = {name: kernel_dtype(reader.ledger, book, name) for name in book.terms}
    streams = streams_of(reader.ledger, book)
    return reader.reduce(RoundedGradients(book, streams, reader.device, None, kernels), last, first)


def is_rounded(ledger: Ledger, book: Book) -> bool:
    """Whether some of the book's gradients come from a kernel that rounds them."""
    return any(kernel_dtype(ledger, book, stream) is not None for stream in book.terms)


def kernel_dtype(ledger: Ledger, book: Book, stream: str) -> torch.dtype | None:
    """What the kernel rounded the book's gradient to, from rows of a stream; None if to nothing.

    Matrix products and the offsets beside them are cast; tables and normalizations are not.
    """
    shards = [shard for shard in ledger.shards if f"{stream}/segments" in shard.file]
    found = {shard.codec(stream).recorded[1] for shard in shards}
    fed = ledger.info.fed_by(stream)
    cast = any(form_named(b.terms[stream].form).is_product for b in fed)
    own = form_named(book.terms[stream].form).is_cast
    narrow = len(found) == 1 and found.issubset(NARROW) and book.dtype == "float32"
    return next(iter(found)) if cast and own and narrow else None


def streams_of(ledger: Ledger, book: Book) -> tuple[Stream, ...]:
    """The streams that feed a book."""
    return tuple(map(ledger.info.stream, book.terms))


def residuals(shard: ShardRange, book: Book) -> Iterator[tuple[int, Tensor]]:
    """What the entries of a shard leave of a book's gradients, with their steps."""
    return values_by_step(shard.shard, book, "residual", shard.first, shard.last)


def chosen(chunk: Chunk, samples: Tensor | None) -> Tensor:
    """(rows,): 1 for the rows that count, 0 for the others, in float64."""
    if samples is None:
        return torch.ones(len(chunk.keys), dtype=torch.float64, device=chunk.keys.device)
    return torch.isin(chunk.samples, samples.to(chunk.samples.device)).double()


@dataclass(frozen=True)
class StepGradients(StreamFold[GradientsByStep]):
    """The sum of a book's rows for each step, and what entries left of it."""

    book: Book
    fed_by: tuple[Stream, ...]
    device: torch.device | str = "cpu"
    samples: Tensor | None = None
    """The stored ids of the samples whose rows count; by default of all."""

    @property
    def read_streams(self) -> tuple[Stream, ...]:
        """Those that feed the book."""
        return self.fed_by

    def start(self) -> GradientsByStep:
        """No step."""
        return {}

    def fold(self, partial: GradientsByStep, shard: ShardRange) -> GradientsByStep:
        """Adds the rows of a shard to their steps."""
        for stream in self.fed_by:
            term = self.book.terms[stream.name]
            for chunk in chunks(shard, stream, self.device):
                sides, counts = row_sides(chunk, term), chosen(chunk, self.samples)
                steps, rows = zip(*chunk.by_step(), strict=True)
                found = sides.totals(rows, counts, self.book.shape, term.view, term.groups)
                for t, gradient in zip(steps, found, strict=True):
                    partial[t] = partial[t].add_(gradient) if t in partial else gradient
        return partial if self.samples is not None else self._with_residuals(partial, shard)

    def _with_residuals(self, partial: GradientsByStep, shard: ShardRange) -> GradientsByStep:
        """With what the entries of a shard leave of the gradients of its steps."""
        for t, residual in residuals(shard, self.book):
            if t in partial:
                partial[t] += residual.to(partial[t])
        return partial

    def merge(self, one: GradientsByStep, other: GradientsByStep) -> GradientsByStep:
        """The steps of both."""
        for t, gradient in other.items():
            one[t] = one[t].add_(gradient) if t in one else gradient
        return one


@dataclass(frozen=True)
class GradientTable(StreamFold[Tensor]):
    """(steps, *shape): the sum of a small book's rows for each step of a span, and residuals.

    Steps that have as many rows are added up by one product.
    """

    book: Book
    fed_by: tuple[Stream, ...]
    first: int
    last: int
    device: torch.device | str = "cpu"
    samples: Tensor | None = None
    """The stored ids of the samples whose rows count; by default of all."""

    @property
    def read_streams(self) -> tuple[Stream, ...]:
        """Those that feed the book."""
        return self.fed_by

    @property
    def partial_bytes(self) -> int:
        """Of the table."""
        return 8 * self.book.size * (self.last - self.first + 1)

    def start(self) -> Tensor:
        """Zeros."""
        sizes = (self.last - self.first + 1, *self.book.shape)
        return torch.zeros(sizes, dtype=torch.float64, device=self.device)

    def fold(self, partial: Tensor, shard: ShardRange) -> Tensor:
        """Adds the rows of a shard to their steps."""
        shape = self.book.shape
        for stream in self.fed_by:
            term = self.book.terms[stream.name]
            matrix = matrix_shape(shape, term.view, term.groups)
            for chunk in chunks(shard, stream, self.device):
                sides, counts = row_sides(chunk, term), chosen(chunk, self.samples)
                for steps, rows in _alike(chunk.steps):
                    found = sides[rows].equal_totals(len(steps), counts[rows], matrix)
                    if not keeps_order(term.view):
                        parts = [from_matrix(one, shape, term.view, term.groups) for one in found]
                        found = torch.stack(parts)
                    partial.index_add_(0, steps - self.first, found.view(-1, *shape))
        if self.samples is None:
            for t, residual in residuals(shard, self.book):
                partial[t - self.first] += residual.to(partial)
        return partial

    def merge(self, one: Tensor, other: Tensor) -> Tensor:
        """The sum."""
        return one.add_(other)


def _alike(numbers: Tensor) -> Iterator[tuple[Tensor, slice]]:
    """Steps that follow one another and have as many rows each, with these rows."""
    steps, counts = torch.unique_consecutive(numbers, return_counts=True)
    sizes, lengths = torch.unique_consecutive(counts, return_counts=True)
    begin = row = 0
    for size, length in zip(sizes.tolist(), lengths.tolist(), strict=True):
        yield steps[begin : begin + length], slice(row, row + size * length)
        begin, row = begin + length, row + size * length


@dataclass(frozen=True)
class RoundedGradients(StepGradients):
    """The gradient of each step, rounded use by use as the kernels did."""

    kernels: Mapping[str, torch.dtype | None] = field(default_factory=dict)
    """What the gradient was rounded to, by stream; None if to nothing."""

    def fold(self, partial: GradientsByStep, shard: ShardRange) -> GradientsByStep:
        """Adds each backward pass; all of a step, and so of a pass, is within one shard."""
        for stream in self.fed_by:
            uses = _uses(shard, stream, self.book, self.device)
            for (t, _), some in groupby(uses, key=lambda use: use[0]):
                parts = [(gradient, whole) for _, gradient, whole in some]
                total = _total(parts, self.kernels[stream.name])
                partial[t] = partial[t].add_(total) if t in partial else total
        return self._with_residuals(partial, shard)


def _total(uses: list[tuple[Tensor, bool]], narrow: torch.dtype | None) -> Tensor:
    """A backward pass: uses of a whole parameter share its copy, and are added up in 16 bits."""
    total = _rounded(uses[0][0], narrow)
    for gradient, whole in uses[1:]:
        total = _rounded(total + _rounded(gradient, narrow), narrow if whole else None)
    return total


def _rounded(gradient: Tensor, narrow: torch.dtype | None) -> Tensor:
    return gradient if narrow is None else gradient.to(narrow).double()


def _uses(
    shard: ShardRange, stream: Stream, book: Book, device: torch.device | str
) -> Iterator[Use]:
    """What the rows of each use add up to, in the order of the backward passes."""
    term = book.terms[stream.name]
    shape = matrix_shape(book.shape, term.view, term.groups)
    last: Use | None = None
    before: int | None = None
    for chunk in chunks(shard, stream, device):
        sides = row_sides(chunk, term)
        for number, key, rows in chunk.by_use():
            ones = torch.ones(rows.stop - rows.start, dtype=torch.float64, device=sides.device)
            gradient = rows_total(book, term, sides[rows], ones)
            if last is not None and before == number:
                last = (key, last[1] + gradient, last[2])  # a use that two chunks share
                continue
            if last is not None:
                yield last
            last, before = (key, gradient, _reaches(sides, shape)), number
    if last is not None:
        yield last


def _reaches(sides: AnySides, shape: tuple[int, int]) -> bool:
    """Whether blocks of rows cover a whole matrix."""
    if isinstance(sides, SummarySides):
        return True
    width = 1 if sides.b is None else sides.b.shape[-1]
    return (sides.a.shape[-1], width) == shape
