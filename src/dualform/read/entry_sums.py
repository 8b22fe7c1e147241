"""What the entries of a book that is summarized add up to: in their bases first.

A coefficient is made of a few diagonals that many steps share. So entries are summed up as they are
kept, once for each diagonal, and a sum becomes as large as the parameter only in the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from operator import itemgetter
from typing import TypeAlias

import torch
from torch import Tensor

from dualform.ledger import Book, Stream
from dualform.memory.blocks import Sides, from_matrix, matrix_shape
from dualform.memory.shared import SharedSides
from dualform.memory.summary import Bases, Matrices, SummarySides
from dualform.optimizers import apply
from dualform.read.coefficients import Accounting, Span, StepNumbers
from dualform.read.engine import ShardRange
from dualform.read.engine.shards import stream_bases
from dualform.read.scan import Chunk, chunks, row_sides
from dualform.read.step_gradients import chosen, step_gradients, streams_of
from dualform.read.stream_folds import StreamFold

SUMMED_BYTES = 1 << 30
"""How large the sums of a book's entries may be that are added up in one scan."""


def entry_sum(accounting: Accounting, book: Book, samples: Tensor | None = None) -> Tensor:
    """`Σ H_t (a ⊗ b)` over a book's entries, of all samples or some, in float64."""
    total = torch.zeros(book.shape, dtype=torch.float64, device=accounting.device)
    for span in accounting.spans([book]):
        coefficients = span.coefficients[book.name]
        if isinstance(coefficients, StepNumbers):
            _add_diagonals(total, accounting, book, span, coefficients, samples)
            continue
        operators = coefficients.operators
        found = step_gradients(accounting.reader, book, span.first, span.last, samples)
        for step, gradient in found.items():
            if step in operators:
                total += apply(operators[step], gradient)
    return total.cpu()


def _add_diagonals(
    total: Tensor,
    accounting: Accounting,
    book: Book,
    span: Span,
    coefficients: StepNumbers,
    samples: Tensor | None,
) -> None:
    """Adds what the entries of some steps are through diagonals: summed up first, for each."""
    streams = streams_of(accounting.ledger, book)
    shards = accounting.ledger.basis_shards
    bases = {s.name: stream_bases(shards, s, accounting.device) for s in streams}
    size = sum(8 * math.prod(_summed_shape(book, s, bases[s.name])) for s in streams)
    each = max(1, SUMMED_BYTES // size)
    for at in range(0, len(coefficients.diagonals), each):
        some = coefficients.diagonals[at : at + each]
        numbers = coefficients.numbers[:, at : at + each].to(accounting.device)
        fold = EntrySums(book, streams, numbers, accounting.device, samples)
        found = accounting.reader.reduce(fold, span.last, span.first)
        for place, diagonal in enumerate(some):
            part = torch.zeros_like(total)
            for (stream, column), summed in found.items():
                if column == place:
                    own, term = bases[stream], book.terms[stream]
                    matrix = summed if own is None else own.expand(summed)
                    part += from_matrix(matrix, book.shape, term.view, term.groups)
            total += part if diagonal is None else part.mul_(diagonal.numbers)


def _summed_shape(book: Book, stream: Stream, bases: Bases | None) -> tuple[int, int]:
    """Of a sum of a stream's entries, in its bases."""
    term = book.terms[stream.name]
    shape = matrix_shape(book.shape, term.view, term.groups)
    return shape if bases is None else bases.size(shape)


StreamSums: TypeAlias = dict[tuple[str, int], Tensor]
"""Sums of the rows of a stream, by its name and the column of numbers that they were taken with."""


@dataclass(frozen=True)
class EntrySums(StreamFold[StreamSums]):
    """`Σ c a ⊗ b` over a book's rows as they are kept, for several numbers of each step."""

    book: Book
    fed_by: tuple[Stream, ...]
    numbers: Tensor
    """(T + 1, columns)."""
    device: torch.device | str = "cpu"
    samples: Tensor | None = None
    """The stored ids of the samples whose rows count; by default of all."""

    @property
    def read_streams(self) -> tuple[Stream, ...]:
        """Those that feed the book."""
        return self.fed_by

    def start(self) -> StreamSums:
        """Nothing."""
        return {}

    def fold(self, partial: StreamSums, shard: ShardRange) -> StreamSums:
        """Adds the rows of a shard."""
        for stream in self.fed_by:
            add = self._add if stream.bases or self.numbers.shape[1] == 1 else self._add_by_step
            add(partial, stream, chunks(shard, stream, self.device))
        return partial

    def _add(self, partial: StreamSums, stream: Stream, found: Iterable[Chunk]) -> None:
        """All rows of a chunk at once, for each column."""
        for chunk in found:
            rows, steps = self._rows(chunk), chunk.steps
            counts = chosen(chunk, self.samples)
            if isinstance(rows, Sides) and rows.a.ndim == 1:
                rows, steps = merged(rows.weighted(counts), steps)
                counts = torch.ones(len(rows), dtype=torch.float64, device=rows.device)
            shape = _summed_shape(self.book, stream, chunk.bases)
            for column, numbers in enumerate(self.numbers[steps].unbind(1)):
                if bool(numbers.any()):
                    _add_to(partial, (stream.name, column), rows.total(counts * numbers, shape))

    def _add_by_step(self, partial: StreamSums, stream: Stream, found: Iterable[Chunk]) -> None:
        """Rows that are as wide as the parameter are multiplied once, and not for each column."""
        shape = _summed_shape(self.book, stream, None)
        totals: Iterator[tuple[int, Tensor]] = (
            (step, self._rows(chunk)[some].total(chosen(chunk, self.samples)[some], shape))
            for chunk in found
            for step, some in chunk.by_step()
        )
        for step, parts in groupby(totals, key=itemgetter(0)):
            total = reduce(Tensor.add_, (part for _, part in parts))
            for column, number in enumerate(self.numbers[step].tolist()):
                if number:
                    _add_to(partial, (stream.name, column), total * number)

    def _rows(self, chunk: Chunk) -> Matrices | Sides | SharedSides:
        """A chunk's rows, as they are kept."""
        sides = row_sides(chunk, self.book.terms[chunk.stream.name])
        return sides.kept if isinstance(sides, SummarySides) else sides

    def merge(self, one: StreamSums, other: StreamSums) -> StreamSums:
        """The sums of both."""
        for key, found in other.items():
            _add_to(one, key, found)
        return one

    @property
    def partial_bytes(self) -> int:
        """At most, where rows are kept whole."""
        return 8 * self.book.size * self.numbers.shape[1]


def _add_to(sums: StreamSums, key: tuple[str, int], found: Tensor) -> None:
    sums[key] = sums[key].add_(found) if key in sums else found


def merged(rows: Sides, groups: Tensor) -> tuple[Sides, Tensor]:
    """Rows of the same group and the same place as one, and the group of each.

    >>> rows = Sides(torch.tensor([5, 5, 7]), torch.tensor([[1.0], [2.0], [4.0]]))
    >>> found, groups = merged(rows, torch.tensor([1, 1, 2]))
    >>> found.a.tolist(), found.b.flatten().tolist(), groups.tolist()
    ([5, 7], [3.0, 4.0], [1, 2])
    """
    assert rows.b is not None
    height = int(rows.a.max()) + 1 if len(rows) else 1
    found, which = torch.unique(groups * height + rows.a, return_inverse=True)
    summed = rows.b.new_zeros(len(found), *rows.b.shape[1:]).index_add_(0, which, rows.b)
    return Sides(found % height, summed, rows.at), found // height
