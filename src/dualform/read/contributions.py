"""Contributions of rows to a layer's output, computed chunk by chunk."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from dualform.ledger import Book, Ledger
from dualform.ledger.samples import Label, SampleId
from dualform.memory.blocks import Bilinear, Functional, as_matrix
from dualform.optimizers import Operator, Turned
from dualform.read.coefficients import Accounting, Span
from dualform.read.questions import functional, through
from dualform.read.scan import Chunk, Scan, row_sides
from dualform.read.turning import Turning, can_turn

Question: TypeAlias = Functional | Bilinear
Turnings: TypeAlias = dict[tuple[str, str], Turning]
"""Questions in other bases, by book and stream."""
DENSE = 1 << 24
"""How many numbers questions may have together once they are no longer of rank one."""


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


class LayerRows:
    """The rows behind one layer's parameters: all uses of them, wherever they are.

    Iterating gives chunks with each row's contribution to the queries' outputs.
    """

    def __init__(self, source: Source, layer: str, keys: Tensor, directions: Tensor) -> None:
        self.source = source
        info = source.ledger.info
        self.terms = info.terms_of(layer)
        """The layer's own terms."""
        self._books = info.fed_by(layer)
        units = _units(directions)
        self._questions = {
            book.name: functional(book, self.terms[book.name], keys, directions, units)
            for book in self._books
        }

    def applied(self, part: Callable[[Book], Tensor]) -> Tensor:
        """(queries,): the answers of a part of each parameter, summed."""
        return torch.stack(
            [
                self._questions[book.name].at(as_matrix(part(book), term.view, term.groups))
                for book in self._books
                for term in [self.terms[book.name]]
            ]
        ).sum(0)

    def __iter__(self) -> Iterator[tuple[Chunk, Tensor]]:
        """Chunks, and the contributions (rows, queries) in the precision of the rows."""
        accounting = self.source.accounting
        found = row_answers(accounting, self._books, lambda book, _: self._questions[book.name])
        for chunk, parts in found:
            yield chunk, functools.reduce(torch.Tensor.add_, parts.values())

    def sample_index(self, chunk: Chunk) -> Tensor:
        """Each row's sample as a position in `source.ids`."""
        return torch.searchsorted(self.source.numbers.to(chunk.samples.device), chunk.samples)


def row_answers(
    accounting: Accounting,
    books: Sequence[Book],
    question: Callable[[Book, str], Question],
    spans: Iterable[Span] | None = None,
) -> Iterator[tuple[Chunk, dict[str, Tensor]]]:
    """All rows that feed some books, in chunks, with their answers (rows, questions) by book.

    Args:
        question: what is asked of a book, as the stream of this name sees it.
        spans: how much each step's rows count; by default, as the optimizer made them count.
    """
    turnings: Turnings = {}
    ledger, device = accounting.ledger, accounting.device
    for span in accounting.spans(books) if spans is None else spans:
        for stream in ledger.info.streams:
            asked = {b.name: question(b, stream.name) for b in books if stream.name in b.terms}
            fed = [book for book in books if book.name in asked]
            scan = Scan(ledger, stream, span.last, device, span.first)
            for chunk in scan if fed else ():
                found = {b.name: _answers(chunk, b, span, asked[b.name], turnings) for b in fed}
                yield chunk, found


def _answers(
    chunk: Chunk, book: Book, span: Span, question: Question, turnings: Turnings
) -> Tensor:
    """(rows, questions): what rows answer about one parameter, as the optimizer made them count."""
    term, coefficients = book.terms[chunk.stream.name], span.coefficients[book.name]
    sides = row_sides(chunk, term)
    if isinstance(coefficients, Tensor):
        found = question.of(sides)
        return found.mul_(coefficients[chunk.steps].to(found)[:, None])
    part = chunk.values.new_zeros(len(chunk.keys), len(question), dtype=torch.float64)
    wide = sides.double()  # what is divided by small gradients needs the digits
    for step, rows in chunk.by_step():
        operator = coefficients.get(step)
        if isinstance(operator, Turned) and can_turn(question, book.shape, term):
            key = (book.name, chunk.stream.name)
            if key not in turnings:
                turnings[key] = Turning(question, book.shape, chunk.keys.device)
            part[rows] = turnings[key].answers(operator, wide[rows])
        elif operator is not None:
            for some in _pieces(question, operator, book):
                part[rows, some] = through(question[some], operator, term).of(wide[rows])
    return part


def _pieces(question: Question, operator: Operator, book: Book) -> list[slice]:
    """The questions in portions: one that an operator turns is as large as the parameter."""
    count = max(1, DENSE // book.size if isinstance(operator, Turned) else len(question))
    return [slice(at, at + count) for at in range(0, len(question), count)]


def _units(directions: Tensor) -> Tensor | None:
    """The output each direction is, where every one is a single output."""
    units = directions.argmax(1)
    one_hot = torch.nn.functional.one_hot(units, directions.shape[1])
    return units if torch.equal(one_hot.to(directions), directions) else None


class Largest:
    """The k rows of largest size for each query, found while scanning.

    Rows below the k-th best so far are dropped at sight, so that after the first chunks hardly
    any are looked at twice.
    """

    def __init__(self, k: int, queries: int) -> None:
        self._k, self._queries = k, queries
        self._floor = torch.zeros(queries, dtype=torch.float64)
        self._kept = torch.zeros(0, 5, dtype=torch.float64)
        """One row each: query, value, sample, step, position."""

    def add(self, contributions: Tensor, chunk: Chunk, samples: Tensor) -> None:
        """Takes a chunk's contributions (rows, queries), and each row's sample as a position."""
        sizes = contributions.abs()
        floor = self._floor.to(sizes)
        if len(self._kept) < self._k * self._queries:
            best = sizes.topk(min(self._k, len(sizes)), dim=0).values[-1]
            floor = torch.maximum(floor, best - best * 1e-6)
        at, query = torch.nonzero(sizes > floor, as_tuple=True)
        if not len(at):
            return
        columns = [samples[at], chunk.steps[at], chunk.positions[at]]
        found = [query, contributions[at, query], *columns]
        self._kept = torch.cat([self._kept, torch.stack([f.double().cpu() for f in found], 1)])
        if len(self._kept) > 4 * self._k * self._queries:
            self._prune()

    def result(self) -> Tensor:
        """(found, 5): query, value, sample, step, position; by query, largest first."""
        self._prune()
        return self._kept

    def _prune(self) -> None:
        order = torch.argsort(self._kept[:, 1].abs(), descending=True, stable=True)
        order = order[torch.argsort(self._kept[order, 0], stable=True)]
        kept = self._kept[order]
        counts = torch.bincount(kept[:, 0].long(), minlength=self._queries)
        rank = torch.arange(len(kept)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        full = counts >= self._k
        last = kept[rank == self._k - 1][:, 1].abs()
        self._floor[full] = last.to(self._floor)
        self._kept = kept[rank < self._k]
