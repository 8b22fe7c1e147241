"""What is followed of a book from one hand-over to the next: some elements, or sums of elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dualform.ledger import Term
from dualform.memory.blocks import as_matrix
from dualform.optimizers import State
from dualform.recording.probe import Look
from dualform.recording.processes import Line
from dualform.recording.shards import Portion

WIDENED = 1 << 20
"""So many elements are put into float64 at a time."""


class BookCourse(NamedTuple):
    """What the steps of a hand-over were to one book."""

    column: int
    states: list[int]
    hyper: list[tuple[float, ...]]
    w: Tensor
    """(steps, numbers): what rows and factors say the gradients were, where it is followed.

    Of a step that was observed, the change.
    """
    reach: Tensor
    """(steps,): how far rounding of the rows may reach in them."""
    coarse: bool
    """Whether rows have 16 bits."""


@dataclass
class Followed:
    """One book: where it is looked at, and what the optimizer remembers there."""

    look: Look
    columns: Tensor | None
    """The columns that are followed; None where the look's vectors are."""
    row: int | None
    """The row that is followed beside them."""
    term: Term
    buffered: bool
    b: Tensor
    state: State = field(default_factory=dict)
    _last: tuple[Tensor, Tensor] | None = None
    """The weights that were last looked at, and what is followed of them."""

    def of_weights(self, copy: Tensor) -> Tensor:
        """What is followed of a copy of the parameter, which nobody changes.

        One hand-over ends with the copy that the next begins with.
        """
        if self._last is None or self._last[0] is not copy:
            self._last = (copy, self.of(copy))
        return self._last[1]

    def of(self, parameter: Tensor, part: Portion | None = None) -> Tensor:
        """What is followed of a parameter, or of a tensor of its shape; flat, in float64.

        Of a part, its share in the sum over all parts.
        """
        counts = part is None or (part.counts and part.elements > 0)
        lines = part.lines(self.term.view) if part is not None and counts else None
        if part is not None and lines is None:
            parameter = part.widened(parameter)
        own = as_matrix(parameter, self.term.view, self.term.groups)
        lines = lines or slice(0, len(own))
        rows = self.look.rows
        first = min(max(rows.start, lines.start), rows.stop)
        last = max(first, min(rows.stop, lines.stop))
        matrix = own[first - lines.start : last - lines.start]
        if self.columns is not None:
            matrix = matrix[:, self.columns.to(matrix.device)]
        elif self.look.vectors is not None:
            vectors = self.look.vectors.to(matrix.device)
            some = matrix.split(max(1, WIDENED // len(vectors)))  # type: ignore[no-untyped-call]
            matrix = torch.cat([rows.double() @ vectors for rows in some])
        around = (0, 0, first - rows.start, rows.stop - last)
        parts = [functional.pad(matrix.double(), around).flatten()]
        if self.row is not None:
            is_own = lines.start <= self.row < lines.stop
            parts.append(own[self.row - lines.start] if is_own else own.new_zeros(own.shape[1]))
        return torch.cat([found.to("cpu", torch.float64) for found in parts])


class LookedAt(NamedTuple):
    """What was seen of a parameter of which each process has a part."""

    part: Tensor
    followed: Tensor
    """Of the whole."""
    size: float


def look_at_parts(
    parts: Mapping[str, Portion],
    followed: Mapping[str, Followed],
    weights: Sequence[Mapping[str, Tensor]],
    known: Mapping[int, LookedAt],
    line: Line,
) -> dict[int, LookedAt]:
    """Adds up, over all processes, what is followed of parameters that each has a part of.

    What was seen of each copy, by its identity. Copies that are `known` in all processes are not
    looked at again: one hand-over ends with those that the next begins with.
    """
    every = [(name, copies[name]) for name in parts for copies in weights]
    is_new = line.any([id(copy) not in known for _, copy in every])
    shares, new = list[Tensor](), dict[int, Tensor]()
    for (name, copy), chosen in zip(every, is_new, strict=True):
        if chosen and id(copy) not in new:
            size = torch.linalg.vector_norm(copy, dtype=torch.float64).square().cpu()
            shares += [followed[name].of(copy, parts[name]), size * parts[name].counts]
            new[id(copy)] = copy
    totals = line.total(shares)
    pairs = zip(new.values(), totals[::2], totals[1::2], strict=True)
    old = {id(copy): known[id(copy)] for _, copy in every if id(copy) not in new}
    return old | {
        id(copy): LookedAt(copy, of, float(squares) ** 0.5) for copy, of, squares in pairs
    }
