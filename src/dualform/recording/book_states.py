"""How each book is kept: a state machine, and the only place that decides it.

A book is what a run holds of one parameter. It is kept *by row* (every step as a sum of training
rows) as long as its rows explain its gradients. Else it is kept *by step* (every step as the change
that was observed), and a reason says why. The way is one way:

    UNSEEN ──rows seen──► UNVERIFIED ──verified──► BY_ROW
      │                       │                      │
      │ no rows, planned,     │ refuted, group refused, optimizer state changed,
      │ resumed               │ hidden by a compiler │
      ▼                       ▼                      ▼
    BY_STEP ◄─────────────────┴──────────────────────┘
      │
      │ changed from outside (this may happen in every state)
      ▼
    SHARED

The training thread owns the states. What the writer's thread finds reaches it as a message, and is
applied before the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from dualform.errors import RecorderFailedError
from dualform.optimizers import BY_ROW, OBSERVED, UNTOUCHED


class Kept(Enum):
    """How a book is kept."""

    UNSEEN = "unseen"
    """No call has left rows for it, and it has had no gradient."""
    UNVERIFIED = "unverified"
    """By row; its rows have not been held against a gradient yet."""
    BY_ROW = "by row"
    BY_STEP = "by step"
    SHARED = "shared"
    """By step, at every step: something other than the recorded optimizer changes it."""


class Event(Enum):
    """What can happen to a book."""

    ROWS_SEEN = "rows were seen"
    VERIFIED = "its rows were found to be its gradient"
    PLANNED = "the optimizer has no rule for it"
    RESUMED = "an earlier part of the run kept it by step"
    NO_ROWS = "a gradient came without rows"
    GROUP_REFUSED = "its group has options that the rule does not describe"
    STATE_CHANGED = "the loop changed what the optimizer remembers of it"
    UNCAPTURED = "a compiled model hides its calls"
    REFUTED = "its rows are not its gradient"
    CHANGED_OUTSIDE = "something other than the optimizer changed it"


_BY_STEP = (Kept.BY_STEP, Kept.SHARED)
_WITH_ROWS = (Kept.UNVERIFIED, Kept.BY_ROW)
ALLOWED: dict[tuple[Kept, Event], Kept] = {
    (Kept.UNSEEN, Event.ROWS_SEEN): Kept.UNVERIFIED,
    (Kept.UNVERIFIED, Event.VERIFIED): Kept.BY_ROW,
    (Kept.UNSEEN, Event.PLANNED): Kept.BY_STEP,
    (Kept.UNSEEN, Event.RESUMED): Kept.BY_STEP,
    (Kept.UNSEEN, Event.NO_ROWS): Kept.BY_STEP,
    (Kept.UNSEEN, Event.GROUP_REFUSED): Kept.BY_STEP,
    **{(kept, Event.PLANNED): Kept.BY_STEP for kept in _WITH_ROWS},
    **{(kept, Event.GROUP_REFUSED): Kept.BY_STEP for kept in _WITH_ROWS},
    **{(kept, Event.STATE_CHANGED): Kept.BY_STEP for kept in _WITH_ROWS},
    **{(kept, Event.REFUTED): Kept.BY_STEP for kept in _WITH_ROWS},
    **{(kept, Event.UNCAPTURED): Kept.BY_STEP for kept in _WITH_ROWS},
    **{(kept, Event.CHANGED_OUTSIDE): Kept.SHARED for kept in Kept},
    # These may come late, or again:
    **{(kept, Event.ROWS_SEEN): kept for kept in Kept if kept is not Kept.UNSEEN},
    **{(kept, Event.PLANNED): kept for kept in _BY_STEP},
    **{(kept, Event.RESUMED): kept for kept in _BY_STEP},
    **{(kept, Event.REFUTED): kept for kept in _BY_STEP},
}
"""The next state of a book. What is not in this table is a defect of the recorder."""


class Note(NamedTuple):
    """From which step on a book is kept by step, and why; written to the run."""

    step: int
    book: str
    reason: str


class BookStates:
    """The state of every book.

    >>> states = BookStates(["weight", "bias"])
    >>> states.happen(Event.ROWS_SEEN, ["weight"])
    >>> states.happen(Event.REFUTED, {"weight": "its gradient was masked"})
    >>> states.kept("weight").value, states.reason("weight"), states.kept("bias").value
    ('by step', 'its gradient was masked', 'unseen')
    >>> states.happen(Event.VERIFIED, ["weight"])
    Traceback (most recent call last):
    dualform.errors.RecorderFailedError: 'weight' is kept by step, and there it cannot be that ...
    """

    def __init__(self, books: Iterable[str]) -> None:
        self._kept = dict.fromkeys(books, Kept.UNSEEN)
        self._reasons: dict[str, str] = {}
        self.unverified: frozenset[str] = frozenset()
        self.new = frozenset(self._kept)
        """Books whose rows have not been held against a gradient yet."""
        self.by_row: frozenset[str] = frozenset()
        """Books that are kept by row, verified or not."""
        self.by_step: frozenset[str] = frozenset()
        """Books that are kept by step, shared or not."""
        self.shared: frozenset[str] = frozenset()

    def kept(self, book: str) -> Kept:
        """How a book is kept now."""
        return self._kept[book]

    def reason(self, book: str) -> str:
        """Why a book is kept by step; empty where it is not."""
        return self._reasons.get(book, "")

    def happen(self, event: Event, books: Iterable[str] | Mapping[str, str]) -> None:
        """Applies an event to some books. A mapping gives the reason of each."""
        reasons = books if isinstance(books, Mapping) else {}
        after = {book: self._next(book, event, reasons.get(book, "")) for book in books}
        for book, kept in after.items():
            if kept in _BY_STEP and book in reasons:
                self._reasons.setdefault(book, reasons[book])
        self._kept |= after
        self.unverified = self._all(Kept.UNVERIFIED)
        self.new = self._all(Kept.UNSEEN, Kept.UNVERIFIED)
        self.by_row = self._all(*_WITH_ROWS)
        self.by_step = self._all(*_BY_STEP)
        self.shared = self._all(Kept.SHARED)

    def touch(self, book: str, in_optimizer: bool, has_gradient: bool, has_rule: bool) -> int:
        """How a step treats a book: UNTOUCHED, BY_ROW or OBSERVED.

        An optimizer with a rule leaves parameters without a gradient alone. One without a rule may
        do anything to them.
        """
        kept = self._kept[book]
        if kept is Kept.SHARED:
            return OBSERVED
        if not in_optimizer or kept is Kept.UNSEEN:
            return UNTOUCHED
        if kept is Kept.BY_STEP:
            return OBSERVED if has_gradient or not has_rule else UNTOUCHED
        return BY_ROW if has_gradient else UNTOUCHED

    def _next(self, book: str, event: Event, reason: str) -> Kept:
        before = self._kept[book]
        after = ALLOWED.get((before, event))
        if after is None:
            raise RecorderFailedError(
                f"'{book}' is kept {before.value}, and there it cannot be that {event.value}; this "
                "is a defect of dualform. Please report it with the lines of your loop."
            )
        if after in _BY_STEP and not (reason or self._reasons.get(book)):
            raise RecorderFailedError(
                f"'{book}' was to be kept by step without a reason, because {event.value}; this is "
                "a defect of dualform. Please report it with the lines of your loop."
            )
        return after

    def _all(self, *states: Kept) -> frozenset[str]:
        return frozenset(book for book, kept in self._kept.items() if kept in states)
