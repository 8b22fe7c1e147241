"""The bases in which a parameter's rows are summarized: where errors and inputs vary most.

They are leading eigenvectors of the second moments of errors and of inputs. They are found from the
first rows that a parameter has, and again from later ones: what a layer sees changes while it
learns. How many directions there are on each side is given by the user, or chosen (`shapes.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dualform.memory.summary import Bases
from dualform.recording.directions import leading_directions
from dualform.recording.keep import Summaries
from dualform.recording.shapes import RatedSide, Rating

ROWS_A_DIRECTION = 8
"""So many rows are looked at for each direction of a basis."""
MOST_ROWS = 4096
"""About so many rows of one use are looked at."""
RENEWED = tuple(4**power for power in range(1, 13))
"""After so many steps of a recording, bases are compared with those of new rows."""
GAIN = 0.02
"""By how much more of the rows new bases must hold to take the place of old ones."""
DIRECTIONS = (16, 128)
"""Those of errors and of inputs, where only one side needs a basis and no size is given."""
OFFSET_DIRECTIONS = 16
"""A bias or a normalization with a basis of its own has at most so many."""


@dataclass
class BookBases:
    """The bases of each book that is summarized; belongs to the training thread."""

    found: dict[str, Bases] = field(default_factory=dict)
    """Those that are in use, by book."""
    impatient: bool = False
    """Whether the rows seen so far make the bases, however few: to see soon what these save."""
    wanted: dict[str, int] = field(default_factory=dict)
    """How many rows make the bases of a book that had to wait for them."""
    renews: bool = True
    """Whether bases are compared with those of later rows at all."""
    tables: set[str] = field(default_factory=set)
    """Books that are read by place: their V must hold errors as well, and no shape is chosen."""
    stale: set[str] = field(default_factory=set)
    """Books whose bases are compared with those of new rows, and renewed if these are better."""
    _steps: int = 0
    _ready: dict[str, Bases] = field(default_factory=dict)
    """Those that are used from the next step on."""
    _rows: dict[str, list[tuple[Tensor | None, Tensor | None]]] = field(default_factory=dict)
    """Rows seen so far, along the height and the width, of books whose bases are not known yet."""
    _offsets: set[str] = field(default_factory=set)
    """Offsets that are kept in the basis of a weight."""

    def of(
        self,
        book: str,
        policy: Summaries,
        height: Tensor | None,
        width: Tensor | None,
        offsets: Iterable[str] = (),
        at_once: bool = True,
    ) -> Bases | None:
        """The bases of a book; None while they are not known.

        Rows whose bases are not known are looked at: `height` (rows, height), or None for a table,
        of which all places are kept, and `width` (rows, width), or None for an offset. If the first
        ones are many, they are enough, and are summarized themselves: unless the book has been kept
        otherwise before, so that bases cannot be used `at_once`. `offsets` are the biases that
        share the errors: they are kept in U as well.
        """
        known = self.found.get(book)
        if book in self._ready or (known is not None and book not in self.stale):
            return known
        seen = self._rows.setdefault(book, [])
        seen.append(tuple(None if t is None else t.clone() for t in (height, width)))  # type: ignore[arg-type]
        wanted = rows_wanted(policy, of_offset=width is None)
        if sum(map(_count, seen)) < wanted and not self.impatient:
            self.wanted[book] = wanted
            return known
        is_first = at_once and len(seen) == 1 and known is None
        E, X = (_joined(side) for side in zip(*self._rows.pop(book), strict=True))
        self.stale.discard(book)
        if policy.shape is None and book in self.tables:
            policy = replace(policy, shape=DIRECTIONS)
        new = _renewed(known, policy, E, X)
        if new is not known:
            now = self.found if is_first else self._ready
            now[book] = new
            if new.outputs is not None:
                now |= {offset: Bases(new.outputs, None) for offset in offsets}
                self._offsets |= set(offsets)
        return self.found.get(book)

    def waiting(self) -> dict[str, int]:
        """The books whose bases are not known, and how many of their rows were seen."""
        return {book: sum(map(_count, seen)) for book, seen in self._rows.items()}

    def begin_step(self) -> bool:
        """A new step begins: bases that are ready are used; whether there are any."""
        self._steps += 1
        if self.renews and self._steps in RENEWED:
            self.stale = set(self.found) - self._offsets
        self.found |= self._ready
        new, self._ready = bool(self._ready), {}
        return new


def rows_wanted(policy: Summaries, *, of_offset: bool = False) -> int:
    """How many rows make the bases of a book.

    >>> rows_wanted(Summaries((4, 8))), rows_wanted(Summaries())
    (64, 1024)
    """
    outputs, inputs = policy.shape or DIRECTIONS
    return ROWS_A_DIRECTION * (
        min(outputs, OFFSET_DIRECTIONS) if of_offset else max(outputs, inputs)
    )


def _renewed(known: Bases | None, policy: Summaries, E: Tensor | None, X: Tensor | None) -> Bases:
    """The bases of some rows, or those that are known, if these hold nearly as much."""
    if policy.shape is None and E is not None and X is not None:
        return Rating(RatedSide.of(E), RatedSide.of(X)).better(known, GAIN) or known  # type: ignore[return-value]
    outputs, inputs = policy.shape or DIRECTIONS
    count = outputs if X is not None else min(outputs, OFFSET_DIRECTIONS)
    U = None if E is None else leading_directions(E, count)
    new = Bases(U, None if X is None else leading_directions(X, inputs))
    return new if known is None or _captured(new, E, X) > _captured(known, E, X) + GAIN else known


def _captured(bases: Bases, E: Tensor | None, X: Tensor | None) -> float:
    """The share of rows that bases capture: of their energy along the height, times the width."""
    sides = ((E, bases.outputs), (X, bases.inputs))
    shares = [
        float((rows.float() @ basis).square().sum() / rows.float().square().sum().clamp_min(1e-30))
        for rows, basis in sides
        if rows is not None and basis is not None
    ]
    return math.prod(shares)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Rows seen one after the other; None for a side that is not looked at."""
    rows = [part for part in parts if part is not None]
    return torch.cat(rows) if rows else None


def _count(rows: tuple[Tensor | None, Tensor | None]) -> int:
    return max(len(side) for side in rows if side is not None)
