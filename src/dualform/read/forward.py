"""Replaying a book forward, once: what it adds up to, without a coefficient for any step.

Every step is linear, `z_t = M_t z_{t-1} + n_t g_t`. So the sum of the books, `R W_0 + Σ_t H_t g_t`,
is where the steps lead from `W_0`, and `R W_0` is where they lead without their gradients. Each
step's rows are multiplied once, and its arithmetic is done where elements stay in the cache. A
large book goes through the steps in blocks; small books that had the same steps go as one vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from dualform.ledger import Book
from dualform.ledger.format import BUFFER, STATE
from dualform.optimizers import BY_ROW, Hyper, StateRule, Value, added, as_tensor
from dualform.read.coefficients import Accounting
from dualform.read.moves import SMALL, Moment, moves, stretches
from dualform.read.replay import kept_moment
from dualform.read.seen import SeenGradients

BLOCK = 1 << 15
"""So many elements are replayed at a time by each core of a processor: they fit its cache."""
GRADIENT_BYTES = 64 << 20
"""How much the gradients may take that are held at a time, unless a single one takes more."""
Totals: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""A book as it adds up, its first value's part, and that of the chosen rows, in float64."""


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

    def go(
        self,
        rule: StateRule,
        hypers: Sequence[Hyper],
        gradients: Tensor,
        chosen: Tensor | None,
    ) -> None:
        """Some steps of the optimizer in a row."""
        for place, _, step, after in moves(rule, hypers, gradients, self.at):
            self.at = after
            self.initial = Course(*step.carry(*self.initial))
            if self.gap is not NOTHING:
                self.gap = Course(*step.carry(*self.gap))
            if chosen is not None:
                old = [as_tensor(value, after.W) for value in self.chosen]
                self.chosen = Course(*step.forward(old[0], old[1], chosen[place]))

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
        self.accounting, self.rule, self.book = accounting, accounting.rule.replayed, book
        self._samples = samples

    def sums(self) -> Totals:
        """What the book adds up to."""
        return JoinedBooks([self]).sums()[0]

    @property
    def joins(self) -> bool:
        """Whether the book may go through its steps together with others."""
        return self.rule.elementwise and len(self.book.shape) > 0 and self.book.size <= SMALL

    @property
    def fingerprint(self) -> tuple[Any, ...]:
        """What decides how an element moves, besides its gradients: alike, books can be joined."""
        history, ledger = self.accounting.history(self.book), self.accounting.ledger
        kept: list[Any] = []
        entries = {name: f"{STATE}{name}:{self.book.name}" for name in self.rule.state}
        for file in map(ledger.kept, ledger.kept_steps):
            kept.append(BUFFER + self.book.name in file)
            for name, entry in entries.items():
                if entry in file and file.arrays[entry].shape == self.book.shape:
                    kept.append(name)  # by element
                elif entry in file:
                    kept.append((name, str(file.read(entry).tolist())))
        buffers = tuple(history.buffers.items())
        return history.states.tobytes(), history.hyper.tobytes(), buffers, tuple(kept)

    def seen(self, first: int, last: int) -> tuple[SeenGradients, SeenGradients | None]:
        """What the optimizer saw in a span, of all rows and of the chosen ones."""
        accounting, book = self.accounting, self.book
        given = accounting.reader, self.rule, book, accounting.factors(book).tolist(), first, last
        chosen = None if self._samples is None else SeenGradients(*given, self._samples)
        return SeenGradients(*given), chosen


class JoinedBooks:
    """Books that had the same steps, replayed as one: a large one in blocks, small ones joined."""

    def __init__(self, books: Sequence[Forward]) -> None:
        self._books, first = books, books[0]
        self._accounting, self._rule = first.accounting, first.rule
        self._history = self._accounting.history(first.book)
        self._sizes = [one.book.size for one in books]
        self._size = sum(self._sizes)
        self._shape = first.book.shape if len(books) == 1 else (self._size,)
        on_cpu = torch.device(self._accounting.device).type == "cpu"
        in_blocks = self._rule.elementwise and on_cpu
        self._block = BLOCK * torch.get_num_threads() if in_blocks else self._size

    def sums(self) -> list[Totals]:
        """What each book adds up to."""
        until, ledger = self._accounting.until, self._accounting.ledger
        kept = [step for step in ledger.kept_steps if step < until]
        buffered = BUFFER + self._books[0].book.name in ledger.kept(0)
        places = [Place(at, Course(at.W, at.b if buffered else 0.0)) for at in self._kept(0)]
        sums = [Sums() for _ in places]
        for place, found in zip(places, sums, strict=True):
            found.count(place, self._accounting.shares[0])
        for begin, end in pairwise([*kept, until]):
            if begin:
                still_buffered = self._history.buffers.get(begin, True)
                for place, at in zip(places, self._kept(begin), strict=True):
                    place.restart(at, still_buffered)
            self._leg(places, sums, begin + 1, end)
        whole = self._parted([found.whole for found in sums])
        initial = self._parted([found.initial for found in sums])
        chosen = self._parted([found.chosen for found in sums])
        return list(zip(whole, initial, chosen, strict=True))

    def _leg(self, places: Sequence[Place], sums: Sequence[Sums], first: int, last: int) -> None:
        """Steps between which nothing was kept, as many at a time as their gradients allow."""
        count, shares = max(1, GRADIENT_BYTES // (8 * max(1, self._size))), self._accounting.shares
        for begin in range(first, last + 1, count):
            numbers = range(begin, min(begin + count, last + 1))
            by_row = [t for t in numbers if self._history.states[t - 1] == BY_ROW]
            hyper = self._history.each(by_row, self._rule.fields)
            groups = list(stretches(numbers, hyper, shares, min(self._size, self._block)))
            seen = [one.seen(by_row[0], by_row[-1]) for one in self._books] if by_row else []
            every, chosen = [own for own, _ in seen], [some for _, some in seen if some]
            for at, (place, found) in enumerate(zip(places, sums, strict=True)):
                for group in groups:
                    if group[0] in hyper:
                        some = self._block_of(chosen, group, at) if chosen else None
                        own = self._block_of(every, group, at)
                        place.go(self._rule, [hyper[t] for t in group], own, some)
                    if shares[group[-1]]:
                        found.count(place, shares[group[-1]])

    def _block_of(self, seen: Sequence[SeenGradients], steps: Sequence[int], at: int) -> Tensor:
        """The gradients of the books at some steps, joined; of a large book, one of its blocks."""
        if len(seen) > 1:
            return torch.cat([one.of(steps).flatten(1) for one in seen], 1)
        whole = seen[0].of(steps)
        if self._size <= self._block:
            return whole
        return whole.flatten(1)[:, at * self._block : (at + 1) * self._block]

    def _kept(self, step: int) -> list[Moment]:
        """What was kept of a step, joined, block by block."""
        reader = self._accounting.reader
        found = [kept_moment(reader, self._rule, one.book, step) for one in self._books]
        W, b = ([getattr(at, name) for at in found] for name in ("W", "b"))
        state = {name: self._joined([at.state[name] for at in found]) for name in found[0].state}
        blocks = list(zip(self._split(self._joined(W)), self._split(self._joined(b)), strict=True))
        split = {name: self._split(value, len(blocks)) for name, value in state.items()}
        return [
            Moment(*block, {name: parts[at] for name, parts in split.items()})
            for at, block in enumerate(blocks)
        ]

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """One behind the other; a number of the optimizer's is the same for all books."""
        if len(parts) == 1 or parts[0].shape != self._books[0].book.shape:
            return parts[0]
        return torch.cat([part.reshape(-1) for part in parts])

    def _split(self, whole: Tensor, count: int = 1) -> list[Tensor]:
        """In blocks; what does not have the shape of the books belongs to all of them."""
        if self._size <= self._block or whole.shape != self._shape:
            return [whole] * count
        return list(torch.split(whole.reshape(-1), self._block))

    def _parted(self, blocks: Sequence[Value]) -> list[Tensor]:
        """Blocks as the books that they are of."""
        tensors = [block.reshape(-1) for block in blocks if isinstance(block, Tensor)]
        flat = torch.cat(tensors) if tensors else torch.zeros(self._shape, dtype=torch.float64)
        parts = torch.split(flat.reshape(-1).cpu(), self._sizes)
        return [p.reshape(one.book.shape) for p, one in zip(parts, self._books, strict=True)]


def forward_totals(
    accounting: Accounting, books: Sequence[Book], samples: Tensor | None = None
) -> Iterator[tuple[Book, Totals]]:
    """What each book adds up to; not in their order, as those that had the same steps join."""
    groups: list[list[Forward]] = []
    joining: dict[tuple[Any, ...], list[Forward]] = {}
    for one in [Forward(accounting, book, samples) for book in books]:
        key = one.fingerprint if one.joins else (one.book.name,)
        size = one.book.size + sum(other.book.size for other in joining.get(key, ()))
        if key not in joining or size > SMALL:
            joining[key] = []
            groups.append(joining[key])
        joining[key].append(one)
    for group in groups:
        for one, totals in zip(group, JoinedBooks(group).sums(), strict=True):
            yield one.book, totals
