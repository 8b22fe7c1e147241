"""Replaying a book forward, once: what it adds up to, without a coefficient for any step.

Every step is linear, `z_t = M_t z_{t-1} + n_t g_t`. So the sum of the books, `R W_0 + Σ_t H_t g_t`,
is where the steps lead from `W_0`, and `R W_0` is where they lead without their gradients. Each
step's rows are multiplied once, and its arithmetic is done where elements stay in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from dualform.ledger import Book
from dualform.ledger.format import BUFFER
from dualform.optimizers import BY_ROW, Hyper, StateRule, Value, added, as_tensor
from dualform.read.coefficients import Accounting
from dualform.read.replay import Moment, kept_moment, replayed_gradients
from dualform.read.step_gradients import step_gradients

BLOCK = 1 << 15
"""So many elements are replayed at a time by each core of a processor: they fit its cache."""
GRADIENT_BYTES = 64 << 20
"""How much the gradients may take that are held at a time, unless a single one takes more."""
Split: TypeAlias = dict[int, list[Tensor]]
"""Gradients by step, each in blocks."""


class Course(NamedTuple):
    """A parameter and its buffer on their way through the steps; 0.0 for nothing."""

    W: Value = 0.0
    b: Value = 0.0


NOTHING = Course()


@dataclass
class Place:
    """Where a part of a book is: its replay, and what goes through the same steps beside it."""

    at: Moment
    initial: Course
    """What is left of the first value."""
    gap: Course = NOTHING
    """By how much the books are elsewhere than the replay, which begins anew where it was kept."""
    chosen: Course = NOTHING
    """What the rows of some samples have added."""

    def step(self, rule: StateRule, hyper: Hyper, gradient: Tensor, chosen: Tensor | None) -> None:
        """One step of the optimizer."""
        W, b, state = self.at
        step, after = rule.transition(hyper, state, W, b, gradient)
        self.at = Moment(*step.forward(W, b, gradient), after)
        self.initial, self.gap = Course(*step.carry(*self.initial)), Course(*step.carry(*self.gap))
        if chosen is not None:
            old = [as_tensor(value, W) for value in self.chosen]
            self.chosen = Course(*step.forward(old[0], old[1], chosen))

    def restart(self, at: Moment, buffered: bool) -> None:
        """Goes on from what was kept; without a buffer there, nothing of the old one does."""
        W, b = added(self.at.W - at.W, 1.0, self.gap.W), added(self.at.b - at.b, 1.0, self.gap.b)
        self.at, self.gap = at, Course(W, b)
        if not buffered:
            courses = (self.gap, self.initial, self.chosen)
            self.gap, self.initial, self.chosen = (Course(course.W) for course in courses)


class Sums:
    """`Σ_t share_t W_t` of a book as it adds up: the whole, its first value's part, the chosen."""

    def __init__(self) -> None:
        self.whole: Value = 0.0
        self.initial: Value = 0.0
        self.chosen: Value = 0.0

    def count(self, place: Place, share: float) -> None:
        """Adds the parameter as it is at a place."""
        self.whole = added(added(self.whole, share, place.at.W), share, place.gap.W)
        self.initial = added(self.initial, share, place.initial.W)
        self.chosen = added(self.chosen, share, place.chosen.W)


class Forward:
    """One book, replayed forward; the rows of some samples are summed up apart.

    >>> from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run(torch.optim.Adam)
    >>> whole, initial, _ = Forward(run.source.accounting, run.info.books[0]).sums()
    >>> bool((whole - run.state_dict()["0.weight"]).abs().max() < 1e-6)
    True
    """

    def __init__(self, accounting: Accounting, book: Book, samples: Tensor | None = None) -> None:
        self._accounting, self._rule, self._book = accounting, accounting.rule.replayed, book
        self._samples, self._shares = samples, accounting.shares
        self._history, self._factors = accounting.history(book), accounting.factors(book)
        in_blocks = self._rule.elementwise and torch.device(accounting.device).type == "cpu"
        self._block = BLOCK * torch.get_num_threads() if in_blocks else book.size

    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """The whole, the first value's part, and that of the chosen rows, in float64."""
        until = self._accounting.until
        kept = [step for step in self._accounting.ledger.kept_steps if step < until]
        buffered = BUFFER + self._book.name in self._accounting.ledger.kept(0)
        places = [Place(at, Course(at.W, at.b if buffered else 0.0)) for at in self._kept(0)]
        sums = [Sums() for _ in places]
        for place, found in zip(places, sums, strict=True):
            found.count(place, self._shares[0])
        for begin, end in pairwise([*kept, until]):
            if begin:
                self._restart(places, begin)
            self._leg(places, sums, begin + 1, end)
        names = ("whole", "initial", "chosen")
        whole, initial, chosen = ([getattr(s, name) for s in sums] for name in names)
        return self._joined(whole), self._joined(initial), self._joined(chosen)

    def _restart(self, places: Sequence[Place], step: int) -> None:
        buffered = self._history.buffers.get(step, True)
        for place, at in zip(places, self._kept(step), strict=True):
            place.restart(at, buffered)

    def _leg(self, places: Sequence[Place], sums: Sequence[Sums], first: int, last: int) -> None:
        """Steps between which nothing was kept, as many at a time as their gradients allow."""
        count = max(1, GRADIENT_BYTES // (8 * self._book.size))
        for begin in range(first, last + 1, count):
            numbers = range(begin, min(begin + count, last + 1))
            gradients, chosen = self._gradients(numbers)
            hyper = {t: self._history.at(t, self._rule.fields) for t in gradients}
            for at, (place, found) in enumerate(zip(places, sums, strict=True)):
                for t in numbers:
                    if t in gradients:
                        some = chosen[t][at] if chosen else None
                        place.step(self._rule, hyper[t], gradients[t][at], some)
                    found.count(place, self._shares[t])

    def _gradients(self, numbers: Sequence[int]) -> tuple[Split, Split]:
        """What the optimizer saw at each step that is booked by row, of all rows and of some."""
        by_row = [t for t in numbers if self._history.states[t - 1] == BY_ROW]
        if not by_row:
            return {}, {}
        reader, place = self._accounting.reader, (self._book, by_row[0], by_row[-1])
        gradients, ratios = replayed_gradients(reader, self._rule, *place)
        if self._samples is None:
            return self._scaled(by_row, gradients, {}), {}
        chosen = step_gradients(reader, *place, self._samples)
        return self._scaled(by_row, gradients, {}), self._scaled(by_row, chosen, ratios)

    def _scaled(
        self, steps: Sequence[int], sums: Mapping[int, Tensor], ratios: Mapping[int, Tensor]
    ) -> Split:
        """Sums of rows times the factors of their steps, block by block."""
        none = torch.zeros(self._book.shape, dtype=torch.float64, device=self._accounting.device)
        found = {}
        for t in steps:
            factor = ratios.get(t, 1.0) * float(self._factors[t - 1])
            gradient = sums.get(t, none)
            found[t] = self._split(gradient * factor if t in ratios or factor != 1.0 else gradient)
        return found

    def _kept(self, step: int) -> list[Moment]:
        """What was kept of a step, block by block."""
        kept = kept_moment(self._accounting.reader, self._rule, self._book, step)
        W, b = self._split(kept.W), self._split(kept.b)
        state = {name: self._split(value, len(W)) for name, value in kept.state.items()}
        return [
            Moment(W[at], b[at], {name: parts[at] for name, parts in state.items()})
            for at in range(len(W))
        ]

    def _split(self, whole: Tensor, count: int = 1) -> list[Tensor]:
        """In blocks; what does not have the shape of the book belongs to all of them."""
        if self._book.size <= self._block or whole.shape != self._book.shape:
            return [whole] * count
        return list(torch.split(whole.reshape(-1), self._block))

    def _joined(self, parts: Sequence[Value]) -> Tensor:
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if not tensors:
            return torch.zeros(self._book.shape, dtype=torch.float64)
        return torch.cat([part.reshape(-1) for part in tensors]).reshape(self._book.shape).cpu()
