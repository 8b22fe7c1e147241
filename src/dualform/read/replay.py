"""Replaying an optimizer from the rows, for coefficients that depend on the gradients seen.

A step's gradient is the sum of its rows, and of the residual where a book has one. So what the
optimizer remembered can be found again from any step at which it was kept. Training is replayed
forward between kept steps, and the coefficients are then found backward, a span of about √T steps
at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice, pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dualform.errors import CorruptError
from dualform.ledger import Book, Ledger, Shard
from dualform.ledger.format import BUFFER, STATE
from dualform.ledger.reader import divisor_steps, values_by_step
from dualform.optimizers import (
    BY_ROW,
    STILL,
    Diagonal,
    History,
    Operator,
    Pair,
    StateRule,
    Step,
    as_operator,
    times,
    walk_back,
)
from dualform.read.engine import RowReader
from dualform.read.moves import Moment, moves, stretches
from dualform.read.seen import SeenGradients

COUNTS, MOST = {"step": 0, "every": 1}, 1e15
"""The least that what an optimizer counts can be, and the most."""
SPAN_BYTES = 256 << 20
"""How much the transitions of one span may take, unless a span of √T steps takes more."""
DAMPING = 0.1
"""Elements whose divisors are small against this part of their mean count for less."""

Taken: TypeAlias = tuple[Sequence[int], Step]
"""A step, or many as one, and the numbers of those."""


class Replay:
    """One book, replayed; its spans are asked for from the last to the first."""

    def __init__(
        self,
        reader: RowReader,
        rule: StateRule,
        book: Book,
        history: History,
        factors: Sequence[float],
        spans: Sequence[tuple[int, int]],
        shares: Sequence[float],
    ) -> None:
        self._reader, self._rule, self.book, self._history = reader, rule, book, history
        self._factors, self._spans, self._shares = factors, spans, shares
        self._moments: dict[int, Moment] = {}
        """The state before the first step of each span, as far as known."""
        self.r: Pair = (0.0, 0.0)

    def back(self, first: int, last: int) -> dict[int, Operator]:
        """The coefficient of each step of a span, by its number."""
        taken: list[Taken] = [([t], STILL) for t in range(first, last + 1)]
        ratios: Mapping[int, Tensor] = {}
        if (self._history.states[first - 1 : last] == BY_ROW).any():
            seen = self._seen(first, last)
            taken, _ = self._forward(self._before(first), first, last, seen)
            ratios = seen.ratios
        return self._walked(taken, first, ratios)

    def _walked(
        self, taken: Sequence[Taken], first: int, ratios: Mapping[int, Tensor]
    ) -> dict[int, Operator]:
        """The coefficient of each of some steps; and `r` before them."""
        shares = [self._shares[numbers[-1]] for numbers, _ in taken]
        found, self.r = walk_back([step for _, step in taken], self.r, shares)
        if not self._history.buffers.get(first - 1, True):
            self.r = (self.r[0], 0.0)  # a recorder started here, and its optimizer had no buffer
        steps = [t for numbers, _ in taken for t in numbers]
        numbered = [(t, H) for t, H in zip(steps, found, strict=True) if self._by_row(t)]
        factors = {t: float(self._factors[t - 1]) * ratios.get(t, 1.0) for t, _ in numbered}
        return {t: as_operator(times(H, factors[t])) for t, H in numbered}

    def _before(self, first: int) -> Moment:
        """The state before a span, replayed from the last step at which it was kept."""
        kept = max(step for step in self._reader.ledger.kept_steps if step < first)
        if first not in self._moments:
            moment = kept_moment(self._reader, self._rule, self.book, kept)
            for start, end in self._spans:
                if kept < start < first:
                    self._moments[start] = moment
                    _, moment = self._forward(moment, start, end, self._seen(start, end))
            self._moments[first] = moment
        return self._moments.pop(first)

    def _seen(self, first: int, last: int) -> SeenGradients:
        return SeenGradients(self._reader, self._rule, self.book, self._factors, first, last)

    def _forward(
        self, at: Moment, first: int, last: int, seen: SeenGradients
    ) -> tuple[list[Taken], Moment]:
        """What the steps did, and the state after them."""
        numbers, taken = range(first, last + 1), list[Taken]()
        hyper = self._history.each([t for t in numbers if self._by_row(t)], self._rule.fields)
        for group in stretches(numbers, hyper, self._shares, self.book.size):
            if group[0] not in hyper:
                taken.append((group, STILL))
                continue
            hypers = [hyper[t] for t in group]
            left = iter(group)
            for move in moves(self._rule, hypers, seen.of(group), at):
                taken.append((list(islice(left, move.steps)), move.step))
                at = move.after
        return taken, at

    def _by_row(self, t: int) -> bool:
        return bool(self._history.states[t - 1] == BY_ROW)


class KeptDivisors(Replay):
    """One book whose entries are less than its gradients: its steps by what they divided by.

    A step divides as the next step did of which the divisor was kept, or else the last one.
    """

    def back(self, first: int, last: int) -> dict[int, Operator]:
        """The coefficient of each step of a span, by its number."""
        fields = self._rule.fields
        steps: list[Taken] = [
            ([t], self._rule.step_by(self._history.at(t, fields), self._taken[t], self._inverse(t)))
            if self._by_row(t)
            else ([t], STILL)
            for t in range(first, last + 1)
        ]
        return self._walked(steps, first, {})

    def _inverse(self, t: int) -> Diagonal:
        return self._inverses[
            min((step for step in self._inverses if step >= t), default=max(self._inverses))
        ]

    @cached_property
    def _inverses(self) -> dict[int, Diagonal]:
        """One over each divisor that was kept, by its step."""
        ledger, device = self._reader.ledger, self._reader.device
        return {
            step: KeptDivisor(shard, self.book, step, device)
            for shard in ledger.step_shards
            for step in divisor_steps(shard, self.book)
            if step <= ledger.last_step
        }

    @cached_property
    def _taken(self) -> list[float]:
        """How many steps the optimizer had taken of the parameter before each step."""
        state = kept_moment(self._reader, self._rule, self.book, 0).state
        steps = (self._history.states == BY_ROW).cumsum()
        return [0.0, *(float(state.get("step", 0.0)) + np.concatenate([[0], steps[:-1]]))]


class KeptDivisor(Diagonal):
    """`d / (d² + τ²)`: one over a divisor, but for elements whose gradients are as good as none.

    An entry spreads a little over all elements, also over those of a unit that is never active.
    It is read when it is asked for: many of them would not fit into memory.
    """

    def __init__(self, shard: Shard, book: Book, step: int, device: torch.device | str) -> None:
        self._shard, self._book, self._step, self._device = shard, book, step, device

    def __reduce__(self) -> tuple[type[KeptDivisor], tuple[Any, ...]]:
        """Without the opened file, which the shard may hold."""
        return KeptDivisor, (replace(self._shard), self._book, self._step, self._device)

    @property
    def numbers(self) -> Tensor:
        """In float32."""
        ((_, kept),) = values_by_step(self._shard, self._book, "divisor", self._step, self._step)
        return damped_inverse(kept.to(self._device, torch.float32))


def damped_inverse(divisor: Tensor) -> Tensor:
    """`d / (d² + τ²)`, in place.

    >>> damped_inverse(torch.tensor([2.0, 0.0]))
    tensor([0.4975, 0.0000])
    """
    damped = divisor.square()
    damped += DAMPING**2 * damped.mean()
    return divisor.div_(damped)


def kept_moment(reader: RowReader, rule: StateRule, book: Book, step: int) -> Moment:
    """A book after a kept step, in float64; the buffer is zero where there was none."""
    file, name = reader.ledger.kept(step), book.name
    entries = {part: f"{STATE}{part}:{name}" for part in rule.state}
    known = [entry for entry in (BUFFER + name, *entries.values()) if entry in file.arrays]
    kept = file.read_all([name, *known])
    wide = {entry: array.to(reader.device, torch.float64) for entry, array in kept.items()}
    state = {part: wide[entry] for part, entry in entries.items() if entry in wide}
    for part, value in state.items():
        whole = value.numel() == 1 if part in COUNTS else value.shape == book.shape
        if rule.elementwise and not (whole or not value.ndim):
            raise CorruptError(
                f"'{file.path}' has '{entries[part]}' of shape {tuple(value.shape)}, and "
                f"'{name}' has {book.shape}; restore the file from a copy of the run."
            )
    for part in COUNTS.keys() & state.keys():
        if not COUNTS[part] <= float(state[part]) <= MOST:
            raise CorruptError(
                f"'{file.path}' says that the optimizer had {part} = {float(state[part])} of "
                f"'{name}'; restore the file from a copy of the run."
            )
    return Moment(wide[name], wide.get(BUFFER + name, torch.zeros_like(wide[name])), state)


def spans_of(ledger: Ledger, until: int, size: int) -> list[tuple[int, int]]:
    """First and last steps of the spans up to a step, for a book of so many numbers."""
    kept = [step for step in ledger.kept_steps if step < until]
    spans = []
    for begin, end in pairwise([*kept, until]):
        count = end - begin
        length = max(math.isqrt(count) + 1, SPAN_BYTES // (32 * size))
        spans += [(at + 1, min(at + length, end)) for at in range(begin, end, length)]
    return spans
