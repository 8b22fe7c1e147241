"""What a run has kept of a visit, and how well the rows of running it again agree with that."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor

from dualform.ledger import Declaration, Ledger, Term
from dualform.memory.blocks import Sides, matrix_shape
from dualform.memory.shared import AnySides, SharedSides
from dualform.memory.summary import Bases
from dualform.read.engine import Fold, ShardRange
from dualform.read.scan import chunks, row_sides


@dataclass(frozen=True)
class Agreement:
    """Two gradients compared: that of the stored entries, and that of the rows in their bases.

    >>> both = Agreement.of(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0]))
    >>> both.cosine, both.ratio
    (1.0, 2.0)
    >>> both = both + Agreement.of(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 0.0]))
    >>> round(both.cosine, 3)
    0.5
    """

    product: float = 0.0
    stored: float = 0.0
    """The squared size of what is stored."""
    again: float = 0.0
    """The squared size of the rows in the bases."""

    @classmethod
    def of(cls, stored: Tensor, again: Tensor) -> Agreement:
        """Of two gradients."""
        pairs = ((stored, again), (stored, stored), (again, again))
        return cls(*(float((one.double() * other.double()).sum()) for one, other in pairs))

    def __add__(self, other: Agreement) -> Agreement:
        """Of both parameters together."""
        return Agreement(
            self.product + other.product, self.stored + other.stored, self.again + other.again
        )

    @property
    def cosine(self) -> float:
        """1 if they point the same way, 0 if they have nothing in common; NaN if both are 0."""
        if not (self.stored or self.again):
            return math.nan
        size = math.sqrt(self.stored * self.again)
        return self.product / size if size else 0.0

    @property
    def ratio(self) -> float:
        """How many times as large the stored one is: batch size, loss scale, …; 1 if one is 0."""
        return math.sqrt(self.stored / self.again) if self.stored and self.again else 1.0


class Entry(NamedTuple):
    """What is kept of a sample's rows in one step, of one layer, for one of its parameters."""

    rows: AnySides
    bases: Bases | None
    """What the rows are kept in, where they are summaries."""


VisitEntries: TypeAlias = dict[tuple[int, str, str], list[Entry]]
"""Entries by the sample's stored id, layer and book."""


@dataclass(frozen=True)
class EntriesOf(Fold[VisitEntries]):
    """The entries of some samples in some layers."""

    declarations: tuple[Declaration, ...]
    """The streams of the layers, and those that summarize them."""
    numbers: tuple[int, ...]
    """The samples' stored ids."""

    @classmethod
    def layers(cls, ledger: Ledger, layers: Collection[str], numbers: Iterable[int]) -> EntriesOf:
        """Of all streams that hold something of these layers."""
        declared = [
            d for d in ledger.info.declarations if (d.stream.layer or d.stream.name) in layers
        ]
        return cls(tuple(declared), tuple(numbers))

    @property
    def streams(self) -> list[str]:
        """Their names."""
        return [declared.stream.name for declared in self.declarations]

    def start(self) -> VisitEntries:
        """None."""
        return {}

    def fold(self, partial: VisitEntries, shard: ShardRange) -> VisitEntries:
        """Adds those of a shard's steps."""
        for stream, terms in ((d.stream, d.terms) for d in self.declarations):
            for chunk in chunks(shard, stream):
                for number in self.numbers:
                    own = torch.nonzero(chunk.samples == number).flatten()
                    for book, term in terms.items() if len(own) else ():
                        rows = row_sides(chunk, term)[own]
                        if isinstance(rows, SharedSides):
                            rows = replace(rows, matrices=rows.matrices.clone())
                        key = (number, stream.layer or stream.name, book)
                        partial.setdefault(key, []).append(Entry(rows, chunk.bases))
        return partial

    def merge(self, one: VisitEntries, other: VisitEntries) -> VisitEntries:
        """Those of both."""
        for key, entries in other.items():
            one.setdefault(key, []).extend(entries)
        return one


def in_bases(rows: AnySides, bases: Bases | None) -> AnySides:
    """Rows as far as entries in some bases hold them."""
    if bases is None or bases.is_whole or not isinstance(rows, Sides):
        return rows
    return bases.reached(rows)


def agreement_of(
    entries: Sequence[Entry], again: Sequence[AnySides], shape: tuple[int, ...], term: Term
) -> Agreement:
    """How well some rows, put into the bases of entries, agree with these; of one parameter."""
    stored = [entry.rows for entry in entries]
    rows = [in_bases(some, entries[0].bases) for some in again]
    height, width = matrix_shape(shape, term.view, term.groups)
    places = [some.a + some.at[0] for some in [*stored, *rows] if _is_lookup(some)]
    used = torch.unique(torch.cat(places)) if len(places) == len(stored) + len(rows) else None
    if used is not None:  # only the lines of a table that took part
        stored, rows = ([_moved(some, used) for some in side] for side in (stored, rows))
        height = len(used)
    totals = [_total(side, (height, width)) for side in (stored, rows)]
    return Agreement.of(*totals)


def _is_lookup(rows: AnySides) -> TypeGuard[Sides]:
    return isinstance(rows, Sides) and rows.a.ndim == 1


def _moved(rows: AnySides, used: Tensor) -> AnySides:
    """Lines of a table by their place among those that are used."""
    assert isinstance(rows, Sides)
    return Sides(torch.searchsorted(used, rows.a + rows.at[0]), rows.b, (0, rows.at[1]))


def _total(sides: Iterable[AnySides], shape: tuple[int, int]) -> Tensor:
    zero = torch.zeros(shape, dtype=torch.float64)
    return sum((s.total(torch.ones(len(s), dtype=torch.float64), shape) for s in sides), zero)
