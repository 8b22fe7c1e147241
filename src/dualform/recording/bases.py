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

from dualform.ledger import Stream
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


@dataclass(frozen=True)
class SeenRows:
    """Rows of a book: errors along its height, inputs along its width."""

    errors: Tensor | None
    """None of a table, all of whose places are kept."""
    inputs: Tensor | None
    """None of an offset, which has none."""

    @classmethod
    def joined(cls, parts: Sequence[SeenRows]) -> SeenRows:
        """Rows that were seen one after the other."""
        errors = [part.errors for part in parts if part.errors is not None]
        inputs = [part.inputs for part in parts if part.inputs is not None]
        return cls(torch.cat(errors) if errors else None, torch.cat(inputs) if inputs else None)

    @property
    def count(self) -> int:
        """How many rows there are; none where a side has none."""
        return min(len(side) for side in (self.errors, self.inputs) if side is not None)

    def bases(self, policy: Summaries, known: Bases | None) -> Bases | None:
        """The bases of these rows; None where those that are known hold nearly as much."""
        E, X = self.errors, self.inputs
        if policy.shape is None and E is not None and X is not None:
            return Rating(RatedSide.of(E), RatedSide.of(X)).better(known, GAIN)
        outputs, inputs = policy.shape or DIRECTIONS
        if X is None:
            outputs = offset_directions(policy)
        U = None if E is None else leading_directions(E, outputs)
        new = Bases(U, None if X is None else leading_directions(X, inputs))
        if known is not None and self._captured(new) <= self._captured(known) + GAIN:
            return None
        return new

    def _captured(self, bases: Bases) -> float:
        """The share of rows that bases capture: of their energy by errors, times that by inputs."""
        sides = ((self.errors, bases.outputs), (self.inputs, bases.inputs))
        shares = [
            float(
                (rows.float() @ basis).square().sum() / rows.float().square().sum().clamp_min(1e-30)
            )
            for rows, basis in sides
            if rows is not None and basis is not None
        ]
        return math.prod(shares)


@dataclass(frozen=True)
class FoundBases:
    """What the rows of a book have shown."""

    bases: Bases | None
    """None where those that are known hold nearly as much."""
    offsets: tuple[str, ...]
    """The biases that share the errors: they are kept in U as well."""


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
    proposed: dict[str, FoundBases] = field(default_factory=dict)
    """What this process has found and others do not know yet, where several use the same bases."""
    _steps: int = 0
    _ready: dict[str, Bases] = field(default_factory=dict)
    """Those that are used from the next step on."""
    _rows: dict[str, list[SeenRows]] = field(default_factory=dict)
    """Rows seen so far of books whose bases are not known yet."""
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

        Rows are looked at until there are enough of them: `height` (rows, height), or None for a
        table, of which all places are kept, and `width` (rows, width), or None for an offset.
        `offsets` are the biases that share the errors: they are kept in U as well.

        If a book's first use has enough rows, that use is summarized already. `at_once` is False
        where earlier rows of the book were stored in another way: then bases wait for the next
        step.
        """
        known = self.found.get(book)
        if book in self._ready or (known is not None and book not in self.stale):
            return known
        if book in self.proposed:
            return known
        rows = SeenRows(_finite(height), _finite(width))
        is_first = at_once and known is None and book not in self._rows
        self._rows.setdefault(book, [])
        if not rows.count:  # the loss was scaled by too much: a scaler throws this pass away
            return known
        self._rows[book].append(rows)
        wanted = rows_wanted(policy, of_offset=width is None)
        if sum(seen.count for seen in self._rows[book]) < wanted and not self.impatient:
            self.wanted[book] = wanted
            return known
        seen = SeenRows.joined(self._rows.pop(book))
        self.stale.discard(book)
        if policy.shape is None and book in self.tables:
            policy = replace(policy, shape=DIRECTIONS)
        self._decide(book, FoundBases(seen.bases(policy, known), tuple(offsets)), is_first)
        return self.found.get(book)

    def of_stream(self, stream: Stream, books: Iterable[str]) -> Bases | None:
        """The bases that the records of a stream are in now; None where it has rows."""
        if not stream.bases:
            return None
        return next((self.found[name] for name in books if name in self.found), Bases(None, None))

    def name(self, book: str, bases: Bases | None, by_row: bool) -> str:
        """What a stream of a book's records is called, beside the name of the layer.

        They are in these bases, one a sample or `by_row`.
        """
        return book.rpartition(".")[2]

    def agree(self) -> None:
        """Makes bases that this process has found those of all processes that record."""

    def _decide(self, book: str, found: FoundBases, is_first: bool) -> None:
        """Takes what was found for a book; where its rows are the first, they are kept so."""
        if found.bases is not None:
            where = self.found if is_first else self._ready
            self._use(book, found.bases, found.offsets, where)

    def _use(self, book: str, new: Bases, offsets: Iterable[str], where: dict[str, Bases]) -> None:
        """Takes new bases of a book, and for its offsets: now, or from the next step on."""
        where[book] = new
        if new.outputs is None:
            self._offsets.difference_update(offsets)  # they find a basis of their own
        else:
            where.update({offset: Bases(new.outputs, None) for offset in offsets})
            self._offsets.update(offsets)

    def waiting(self) -> dict[str, int]:
        """The books whose bases are not known, and how many of their rows were seen."""
        return {book: sum(rows.count for rows in seen) for book, seen in self._rows.items() if seen}

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
    most = offset_directions(policy) if of_offset else max(policy.shape or DIRECTIONS)
    return ROWS_A_DIRECTION * most


def offset_directions(policy: Summaries) -> int:
    """How many directions the basis of a bias or a normalization has, if it is its own.

    >>> offset_directions(Summaries((4, 8))), offset_directions(Summaries())
    (4, 16)
    """
    return min((policy.shape or DIRECTIONS)[0], OFFSET_DIRECTIONS)


def _finite(rows: Tensor | None) -> Tensor | None:
    """A copy of the rows that are finite."""
    return None if rows is None else rows[rows.isfinite().all(1)]
