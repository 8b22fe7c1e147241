"""Contributions of rows to a layer's output, computed chunk by chunk."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.ledger import Book, Ledger
from dualform.ledger.samples import Label, SampleId
from dualform.memory.blocks import as_matrix
from dualform.optimizers import Memo, Question
from dualform.read.coefficients import Accounting, Span
from dualform.read.questions import functional, seen_as
from dualform.read.scan import Chunk, Scan, row_sides


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
    memos: dict[tuple[str, str], Memo] = defaultdict(dict)
    ledger, device = accounting.ledger, accounting.device
    for span in accounting.spans(books) if spans is None else spans:
        for stream in ledger.info.streams:
            asked = {b.name: question(b, stream.name) for b in books if stream.name in b.terms}
            fed = [book for book in books if book.name in asked]
            scan = Scan(ledger, stream, span.last, device, span.first)
            for chunk in scan if fed else ():
                found = {}
                for book in fed:
                    term, memo = book.terms[stream.name], memos[book.name, stream.name]
                    found[book.name] = span.coefficients[book.name].answers(
                        asked[book.name], chunk, row_sides(chunk, term), seen_as(book, term), memo
                    )
                yield chunk, found


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
