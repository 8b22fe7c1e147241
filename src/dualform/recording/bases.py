"""The bases in which a parameter's rows are summarized: where errors and inputs vary most.

They are leading eigenvectors of the second moments of errors and of inputs. They are found from the
first rows that a parameter has, and again from later ones: what a layer sees changes while it
learns. No moment is ever formed: some directions are multiplied by the rows and back, and made
orthonormal, a few times over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dualform.memory.summary import Bases
from dualform.recording.keep import Summaries

ROWS_A_DIRECTION = 8
"""So many rows are looked at for each direction of a basis."""
MOST_ROWS = 4096
"""About so many rows of one use are looked at."""
RENEWED = tuple(4**power for power in range(1, 13))
"""After so many steps of a recording, bases are compared with those of new rows."""
GAIN = 0.02
"""By how much more of the rows' energy new bases must capture to take the place of old ones."""
ROUNDS = 4
"""How often directions are multiplied by the rows and back."""


def leading_directions(rows: Tensor, count: int) -> Tensor | None:
    """(width, count): the directions in which rows (rows, width) vary most; None for all of them.

    >>> rows = torch.randn(500, 6) * torch.tensor([9.0, 0.1, 0.1, 5.0, 0.1, 0.1])
    >>> leading_directions(rows, 2).abs()[[0, 3]].sum(0).round()
    tensor([1., 1.])
    >>> leading_directions(rows, 6) is None
    True
    """
    width = rows.shape[1]
    if count >= width:
        return None
    rows = rows.float()
    generator = torch.Generator().manual_seed(width)  # the user's stays untouched
    start = torch.randn(width, count, generator=generator, dtype=torch.float32, device="cpu")
    found = _orthonormal(start.to(rows.device))
    for _ in range(ROUNDS):
        found = _orthonormal(rows.T @ (rows @ found))
    return found.bfloat16().float()  # as products in 16 bits see them, and as they are stored


def _orthonormal(directions: Tensor) -> Tensor:
    """An orthonormal basis of what some directions span.

    On a GPU by products and a small factor, twice, which takes a tenth of the time of reflections.
    """
    scale = directions.norm(dim=0).clamp_min(1e-30)
    if directions.is_cuda:
        found: Tensor = directions / scale
        ok = True
        for _ in range(2):
            factor, failed = torch.linalg.cholesky_ex(found.T @ found)
            found = torch.linalg.solve_triangular(factor.T, found, upper=True, left=False)
            ok = ok and not bool(failed)
        if ok:
            return found
    reflected: Tensor = torch.linalg.qr(directions / scale).Q
    return reflected


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
    stale: set[str] = field(default_factory=set)
    """Books whose bases are compared with those of new rows, and renewed if these are better."""
    _steps: int = 0
    _ready: dict[str, Bases] = field(default_factory=dict)
    """Those that are used from the next step on."""
    _rows: dict[str, list[tuple[Tensor | None, Tensor]]] = field(default_factory=dict)
    """Rows seen so far, along the height and the width, of books whose bases are not known yet."""

    def of(
        self, book: str, policy: Summaries, height: Tensor | None, width: Tensor
    ) -> Bases | None:
        """The bases of a book; None while they are not known.

        Rows whose bases are not known are looked at: `height` (rows, height), or None for a table,
        of which all places are kept, and `width` (rows, width). If the first ones are many, they
        are enough, and are summarized themselves.
        """
        known = self.found.get(book)
        if book in self._ready or (known is not None and book not in self.stale):
            return known
        seen = self._rows.setdefault(book, [])
        seen.append((None if height is None else height.clone(), width.clone()))
        wanted = ROWS_A_DIRECTION * max(policy.outputs, policy.inputs)
        if sum(len(rows) for _, rows in seen) < wanted and not self.impatient:
            self.wanted[book] = wanted
            return known
        first, rows = len(seen) == 1 and known is None, self._rows.pop(book)
        tall = [E for E, _ in rows if E is not None]
        E, X = torch.cat(tall) if tall else None, torch.cat([X for _, X in rows])
        U = None if E is None else leading_directions(E, policy.outputs)
        new = Bases(U, leading_directions(X, policy.inputs))
        self.stale.discard(book)
        if known is None or _captured(new, E, X) > _captured(known, E, X) + GAIN:
            (self.found if first else self._ready)[book] = new
        return self.found.get(book)

    def waiting(self) -> dict[str, int]:
        """The books whose bases are not known, and how many of their rows were seen."""
        return {book: sum(len(X) for _, X in seen) for book, seen in self._rows.items()}

    def begin_step(self) -> bool:
        """A new step begins: bases that are ready are used; whether there are any."""
        self._steps += 1
        if self.renews and self._steps in RENEWED:
            self.stale = set(self.found)
        self.found |= self._ready
        new, self._ready = bool(self._ready), {}
        return new


def _captured(bases: Bases, E: Tensor | None, X: Tensor) -> float:
    """The share of rows that bases capture: of their energy along the height, times the width."""
    sides = ((E, bases.outputs), (X, bases.inputs))
    shares = [
        float((rows.float() @ basis).square().sum() / rows.float().square().sum().clamp_min(1e-30))
        for rows, basis in sides
        if rows is not None and basis is not None
    ]
    return math.prod(shares)
