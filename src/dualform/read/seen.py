"""What an optimizer saw of a book at each step of a span: the sums of its rows, times a factor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from dualform.ledger import Book
from dualform.optimizers import StateRule
from dualform.read.engine import RowReader
from dualform.read.moves import SMALL
from dualform.read.step_gradients import (
    GradientTable,
    is_rounded,
    rounded_gradients,
    step_gradients,
    streams_of,
)

Replayed: TypeAlias = tuple[dict[int, Tensor], dict[int, Tensor]]
"""Gradients by step, and what the sums of rows were multiplied by to be them, if by anything."""


def replayed_gradients(
    reader: RowReader, rule: StateRule, book: Book, first: int, last: int
) -> Replayed:
    """Each step's gradient as a rule needs it: where it follows signs, as a kernel rounded it.

    A rounding has no parts: a row's share of it is what the rounded sum is to the sum, one number
    for each element, by which coefficients are multiplied.
    """
    sums = step_gradients(reader, book, first, last)
    if not _follows_rounding(reader, rule, book):
        return sums, {}
    seen = rounded_gradients(reader, book, first, last)
    ratios = {t: torch.where(g == 0, 1.0, seen[t] / g) for t, g in sums.items()}
    return {t: g * ratios[t] for t, g in sums.items()}, ratios


def _follows_rounding(reader: RowReader, rule: StateRule, book: Book) -> bool:
    return rule.follows_signs and is_rounded(reader.ledger, book)


class SeenGradients:
    """The gradients of a span, of all rows or of those of some samples: small ones in a table.

    >>> from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run(torch.optim.Adam)
    >>> accounting, book = run.source.accounting, run.info.books[0]
    >>> given = accounting.reader, accounting.rule.replayed, book, [1.0] * run.steps
    >>> SeenGradients(*given, first=1, last=4).of([2, 3]).shape
    torch.Size([2, 5, 4])
    """

    def __init__(
        self,
        reader: RowReader,
        rule: StateRule,
        book: Book,
        factors: Sequence[float],
        first: int,
        last: int,
        samples: Tensor | None = None,
    ) -> None:
        self._first, self._book, self._device = first, book, reader.device
        self.ratios: Mapping[int, Tensor] = {}
        """What the sums of rows are multiplied by, if by anything."""
        self._table: Tensor | None = None
        self._by_step: Mapping[int, Tensor] = {}
        own = factors[first - 1 : last]
        if book.size <= SMALL and not _follows_rounding(reader, rule, book):
            fold = GradientTable(
                book, streams_of(reader.ledger, book), first, last, reader.device, samples
            )
            self._table = reader.reduce(fold, last, first)
            if set(own) != {1.0}:
                scales = torch.tensor(own, dtype=torch.float64).to(self._table)
                self._table *= scales.reshape(-1, *[1] * len(book.shape))
            return
        found, self.ratios = replayed_gradients(reader, rule, book, first, last)
        if samples is not None:
            found = step_gradients(reader, book, first, last, samples)
            found = {t: g * self.ratios.get(t, 1.0) for t, g in found.items()}
        scaled = {t: float(factor) for t, factor in enumerate(own, start=first)}
        self._by_step = {t: g if scaled[t] == 1.0 else g * scaled[t] for t, g in found.items()}

    def of(self, steps: Sequence[int]) -> Tensor:
        """(steps, *shape): of steps that follow one another."""
        if self._table is not None:
            return self._table[steps[0] - self._first : steps[-1] + 1 - self._first]
        found = [self._gradient(t) for t in steps]
        return found[0][None] if len(found) == 1 else torch.stack(found)

    def _gradient(self, step: int) -> Tensor:
        found = self._by_step.get(step)
        if found is None:
            return torch.zeros(self._book.shape, dtype=torch.float64, device=self._device)
        return found
