"""Bases that several processes use: the same in all of them, from the same step on.

A gradient is the average over all processes, and is probed in one pair of bases. So summaries of
all processes are in the same ones. Each process looks at its own rows. Before a step, the processes
tell each other what they have found, and take for each book what the first of them has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dualform.memory.summary import Bases
from dualform.recording.bases import BookBases, FoundBases
from dualform.recording.processes import Line


class SharedBases(BookBases):
    """The bases of each book that is summarized, where several processes record."""

    def __init__(self, line: Line, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._line, self._parameters = line, parameters
        self._versions: dict[str, int] = {}
        """How often the bases of each book were found."""

    def name(self, book: str, bases: Bases | None, by_row: bool) -> str:
        """The same in all processes, though some may have no rows while others have some."""
        version = "" if bases is None or bases.is_whole else f"~{self._versions[book]}"
        return super().name(book, bases, by_row) + version + "~rows" * by_row

    def agree(self) -> None:
        """Takes for each book what the first process has found that has found anything."""
        said = self._line.said({book: _told(found) for book, found in self.proposed.items()})
        for book in sorted({book for told in said for book in told}):
            source = next(rank for rank, told in enumerate(said) if book in told)
            offsets, shapes = said[source][book]
            own = self.proposed.get(book) if source == self._line.rank else None
            self._rows.pop(book, None)
            self.stale.discard(book)
            if shapes is not None:
                sides = own.bases if own is not None else None
                U = self._sent(book, source, shapes[0], None if sides is None else sides.outputs)
                V = self._sent(book, source, shapes[1], None if sides is None else sides.inputs)
                self._use(book, Bases(U, V), offsets, self._ready)
        self.proposed.clear()

    def begin_step(self) -> bool:
        """A new step begins: bases that are ready are used; whether there are any."""
        for book in self._ready:
            self._versions[book] = self._versions.get(book, 0) + 1
        return super().begin_step()

    def _decide(self, book: str, found: FoundBases, is_first: bool) -> None:
        self.proposed[book] = found

    def _sent(
        self, book: str, source: int, shape: tuple[int, int] | None, own: Tensor | None
    ) -> Tensor | None:
        """One side of the bases that a process has found; they have 16 bits."""
        if shape is None:
            return None
        there = self._parameters[book].device
        sent = torch.empty(*shape, dtype=torch.bfloat16)
        if own is not None:
            sent.copy_(own)
        return self._line.sent(source, sent).float().to(there)


def _told(found: FoundBases) -> Any:
    """Bases without its numbers, as JSON can say it."""
    if found.bases is None:
        return [found.offsets, None]
    sides = (found.bases.outputs, found.bases.inputs)
    return [found.offsets, [None if side is None else list(side.shape) for side in sides]]
