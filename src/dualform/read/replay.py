"""Replaying an optimizer from the rows, for coefficients that depend on the gradients seen.

A step's gradient is the sum of its rows, so what the optimizer remembered can be found again from
any step at which it was kept. Training is replayed forward between kept steps, and the coefficients
are then found backward, a span of about √T steps at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dualform.ledger import Book, Ledger
from dualform.ledger.format import BUFFER, STATE
from dualform.read.scan import Scan, row_sides, rows_total
from dualform.record.optimizers import (
    BY_ROW,
    STILL,
    History,
    Operator,
    Pair,
    State,
    StateRule,
    Transition,
    walk_back,
)

SPAN_BYTES = 256 << 20
"""How much the transitions of one span may take, unless a span of √T steps takes more."""


class Moment(NamedTuple):
    """A parameter, its buffer, and what else the optimizer remembers of it."""

    W: Tensor
    b: Tensor
    state: State


class Replay:
    """One book, replayed; its spans are asked for from the last to the first."""

    def __init__(
        self,
        ledger: Ledger,
        rule: StateRule,
        book: Book,
        history: History,
        factors: Sequence[float],
        spans: Sequence[tuple[int, int]],
        shares: Sequence[float],
        device: torch.device | str = "cpu",
    ) -> None:
        self._ledger, self._rule, self.book, self._history = ledger, rule, book, history
        self._factors, self._spans, self._device = factors, spans, device
        self._shares = shares
        self._moments: dict[int, Moment] = {}
        """The state before the first step of each span, as far as known."""
        self.r: Pair = (0.0, 0.0)

    def back(self, first: int, last: int) -> dict[int, Operator]:
        """The coefficient of each step of a span, by its number."""
        transitions = [STILL] * (last - first + 1)
        if (self._history.states[first - 1 : last] == BY_ROW).any():
            transitions, _ = self._forward(self._before(first), first, last)
        found, self.r = walk_back(transitions, self.r, self._shares[first : last + 1])
        if not self._history.buffers.get(first - 1, True):
            self.r = (self.r[0], 0.0)  # a recorder started here, and its optimizer had no buffer
        numbered = enumerate(found, start=first)
        return {t: H * float(self._factors[t - 1]) for t, H in numbered if self._by_row(t)}

    def _before(self, first: int) -> Moment:
        """The state before a span, replayed from the last step at which it was kept."""
        kept = max(step for step in self._ledger.kept_steps if step < first)
        if first not in self._moments:
            moment = kept_moment(self._ledger, self._rule, self.book, kept, self._device)
            for start, end in self._spans:
                if kept < start < first:
                    self._moments[start] = moment
                    _, moment = self._forward(moment, start, end)
            self._moments[first] = moment
        return self._moments.pop(first)

    def _forward(self, at: Moment, first: int, last: int) -> tuple[list[Transition], Moment]:
        """What each step did, and the state after them."""
        gradients = step_gradients(self._ledger, self.book, first, last, self._device)
        W, b, state = at
        transitions = []
        for t in range(first, last + 1):
            transition = STILL
            if self._by_row(t):
                gradient = gradients.get(t, torch.zeros_like(W)) * float(self._factors[t - 1])
                known = self._history.named(t - 1)
                hyper = {name: known.get(name, 0.0) for name in self._rule.fields}
                transition, state = self._rule.transition(hyper, state, W, b, gradient)
                W, b = transition.forward(W, b, gradient)
            transitions.append(transition)
        return transitions, Moment(W, b, state)

    def _by_row(self, t: int) -> bool:
        return bool(self._history.states[t - 1] == BY_ROW)


def kept_moment(
    ledger: Ledger, rule: StateRule, book: Book, step: int, device: torch.device | str = "cpu"
) -> Moment:
    """A book after a step at which it was kept, in float64."""
    names = [book.name, BUFFER + book.name, *(f"{STATE}{part}:{book.name}" for part in rule.state)]
    found = ledger.weights(step, names)
    wide = {name: tensor.to(device, torch.float64) for name, tensor in found.items()}
    W, *others = names
    b, *parts = others
    known = zip(rule.state, parts, strict=True)
    state = {part: wide[name] for part, name in known if name in wide}
    return Moment(wide[W], wide.get(b, torch.zeros_like(wide[W])), state)


def step_gradients(
    ledger: Ledger, book: Book, first: int, last: int, device: torch.device | str = "cpu"
) -> dict[int, Tensor]:
    """The sum of a book's rows for each step of a span, by its number, in float64."""
    found: dict[int, Tensor] = {}
    for name, term in book.terms.items():
        for chunk in Scan(ledger, ledger.info.stream(name), last, device, first):
            sides = row_sides(chunk, term)
            for t, rows in chunk.by_step():
                ones = torch.ones(rows.stop - rows.start, dtype=torch.float64, device=device)
                gradient = rows_total(book, term, sides[rows], ones)
                found[t] = found[t] + gradient if t in found else gradient
    return found


def spans_of(ledger: Ledger, until: int, size: int) -> list[tuple[int, int]]:
    """First and last steps of the spans up to a step, for a book of so many numbers."""
    kept = [step for step in ledger.kept_steps if step < until]
    spans = []
    for begin, end in pairwise([*kept, until]):
        count = end - begin
        length = max(math.isqrt(count) + 1, SPAN_BYTES // (32 * size))
        spans += [(at + 1, min(at + length, end)) for at in range(begin, end, length)]
    return spans
