"""Contributions of rows to a layer's output, computed chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.ledger import Book, Ledger
from dualform.ledger.samples import Label, SampleId
from dualform.read.coefficients import Accounting
from dualform.read.scan import Chunk, Scan


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
    """The rows behind one layer: those of its weight (all its uses, where tied) and its bias."""

    def __init__(self, source: Source, layer: str) -> None:
        books = [book for book in source.ledger.info.books if layer in book.terms]
        self.source = source
        self.weight = next(book for book in books if book.terms[layer] == "outer")
        self.bias = next((book for book in books if book.terms[layer] == "sum"), None)

    def __iter__(self) -> Iterator[tuple[Chunk, Tensor, Tensor]]:
        """Chunks, with the coefficients of each row in the weight and in the bias."""
        for scan, weight, bias in self._scans():
            for chunk in scan:
                yield chunk, weight[chunk.steps], bias[chunk.steps]

    def _scans(self) -> Iterator[tuple[Scan, Tensor, Tensor]]:
        source = self.source
        weight = self._coefficients(self.weight)
        for stream in self.weight.terms:
            biased = self.bias is not None and stream in self.bias.terms
            bias = self._coefficients(self.bias) if biased else torch.zeros_like(weight)
            yield Scan(source.ledger, stream, source.until, source.device), weight, bias

    def _coefficients(self, book: Book | None) -> Tensor:
        assert book is not None
        return torch.from_numpy(self.source.accounting.of_rows(book)).to(self.source.device)

    def sample_index(self, chunk: Chunk) -> Tensor:
        """Each row's sample as a position in `source.ids`."""
        return torch.searchsorted(self.source.numbers.to(chunk.samples.device), chunk.samples)


class Question:
    """Queries and the output each is asked about: turns chunks into contributions.

    A row with key x, value e and coefficients a, b contributes `(a x·q + b) (e·d)`.
    """

    def __init__(self, inputs: Tensor, directions: Tensor) -> None:
        self._inputs, self._directions = inputs, directions
        units = directions.argmax(1)
        one_hot = torch.nn.functional.one_hot(units, directions.shape[1])
        self._units = units if torch.equal(one_hot.to(directions), directions) else None

    def similarity(self, chunk: Chunk) -> Tensor:
        """(rows, queries): `x·q`."""
        return chunk.keys @ self._inputs.to(chunk.keys).T

    def contributions(self, chunk: Chunk, weight: Tensor, bias: Tensor) -> Tensor:
        """(rows, queries), in the precision of the rows."""
        inner = self.similarity(chunk)
        inner.mul_(weight.to(inner)[:, None]).add_(bias.to(inner)[:, None])
        return inner.mul_(self._along(chunk.values))

    def _along(self, values: Tensor) -> Tensor:
        """(rows, queries): `e·d`; for single units a choice of columns."""
        if self._units is not None:
            return values.index_select(1, self._units.to(values.device))
        return values @ self._directions.to(values).T


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
