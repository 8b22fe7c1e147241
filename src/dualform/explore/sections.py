"""One query's section: what was asked, the evidence on both sides, when, and the sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from dualform.errors import ReadingError
from dualform.explore.amounts import Amount, Scale, shorten
from dualform.explore.figures import (
    BlockFigure,
    LineFigure,
    block_figure,
    label_groups,
    line_figure,
)
from dualform.explore.pictures import Picture, picture
from dualform.ledger.samples import Preview
from dualform.read import Ranked, Reading, Run
from dualform.read.timeline import epochs

SHOWN = 12
LONGEST_NAME = 80


@dataclass(frozen=True)
class Query:
    """What to show of one query, beside its numbers.

    >>> import torch
    >>> from dualform.ledger.samples import Preview
    >>> pixels = torch.zeros(8, 8, dtype=torch.uint8)
    >>> Query("test digit 3", label=3, preview=Preview("image", pixels)).title
    'test digit 3'
    """

    title: str
    label: int | str | None = None
    """Its true label, if known."""
    preview: Preview | None = None


@dataclass(frozen=True)
class Line:
    """One training sample of the evidence; `share` is the length of its bar in percent."""

    id: str
    label: str
    own: bool
    amount: Amount
    share: float
    picture: Picture | None


@dataclass(frozen=True)
class Side:
    """The evidence for, or against: the strongest samples, and what all of them amount to."""

    name: str
    lines: Sequence[Line]
    count: int
    sum: Amount


@dataclass(frozen=True)
class Section:
    """Everything the page shows of one query."""

    title: str
    picture: Picture | None
    label: str | None
    verdict: str
    """Is "right", "wrong", or nothing where label and output cannot be compared."""
    asked: str
    total: Amount
    predicted: int
    terms: Sequence[tuple[str, Amount]]
    sides: Sequence[Side]
    blocks: BlockFigure
    line: LineFigure


class Sections:
    """Makes the sections of a reading; what they share is worked out once."""

    def __init__(self, run: Run, reading: Reading, queries: Sequence[Query]) -> None:
        self._run, self._reading = run, reading
        self._queries = queries or [Query(name) for name in reading.names]
        self._scores = reading.samples()
        if not np.isfinite(self._scores.values).all() or not np.isfinite(reading.total).all():
            raise ReadingError(
                f"the reading of layer '{reading.layer}' has NaN or infinite contributions; ask "
                "with finite inputs."
            )
        self._groups = label_groups(self._scores.ids, self._scores.labels)
        self._top, self._bottom = reading.top(SHOWN).rows, reading.bottom(SHOWN).rows
        self._epochs = epochs(reading.source.ledger, reading.source.until)

    def __len__(self) -> int:
        return len(self._queries)

    @property
    def labeled(self) -> bool:
        """Whether any training sample has a label."""
        return any(group.label is not None for group in self._groups)

    def section(self, at: int) -> Section:
        """The section of query number `at`."""
        query, values = self._queries[at], self._scores.values[:, at]
        label, title = _label(query), shorten(query.title, LONGEST_NAME)
        predicted = int(self._reading.queries.outputs[at].argmax())
        asked_class = self._unit(at) if self.outputs_are_classes else None
        total = float(self._reading.total[at])
        return Section(
            title,
            picture(query.preview, f"'{title}'"),
            None if label is None else shorten(label, LONGEST_NAME),
            self._verdict(label, predicted),
            self._reading.asked[at],
            Scale([total]).plain(total),
            predicted,
            self._terms(at),
            self._sides(at, asked_class),
            block_figure(values, self._groups, asked_class),
            line_figure(self._steps[:, at], self._epochs),
        )

    @cached_property
    def _steps(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        return self._reading.timeline().values

    @cached_property
    def outputs_are_classes(self) -> bool:
        """Whether labels are numbers of outputs: only in the last layer, and only if all are.

        A hidden layer's unit 3 has nothing to do with label 3.
        """
        width = self._reading.queries.outputs.shape[1]
        given = [*(group.label for group in self._groups), *map(_label, self._queries)]
        labels = [label for label in given if label is not None]
        last = self._reading.layer == self._run.layers[-1]
        return last and width > 1 and bool(labels) and all(_is_unit(la, width) for la in labels)

    def _verdict(self, label: Any, predicted: int) -> str:
        if label is None or not self.outputs_are_classes:
            return ""
        return "right" if label == predicted else "wrong"

    def _unit(self, at: int) -> int | None:
        """The single output that is asked about, or None for a direction."""
        direction = self._reading.directions[at]
        unit = int(direction.argmax())
        alone = torch.count_nonzero(direction) == 1 and direction[unit] == 1
        return unit if alone else None

    def _terms(self, at: int) -> list[tuple[str, Amount]]:
        """The parts of the output and their sum, in the order they are added up."""
        parts = self._reading.check.lines(at)
        if parts["booked by step"] == 0:
            del parts["booked by step"]
        words = {"evidence": f"sum over {len(self._scores):,} examples"}
        words["total"] = self._reading.asked[at]
        scale = Scale(parts.values(), digits=4)
        return [(words.get(name, name), scale.signed(part)) for name, part in parts.items()]

    def _sides(self, at: int, asked: int | None) -> list[Side]:
        values = self._scores.values[:, at]
        strongest = max(float(np.abs(values).max(initial=0)), 1e-300)
        scale = Scale([strongest])
        sides = []
        for name, rows, chosen in (
            ("for", self._top, values[values > 0]),
            ("against", self._bottom, values[values < 0]),
        ):
            ranked = self._ranked(rows, at)[: len(chosen)]  # the rest is of the other sign
            lines = [self._line(row, asked, scale, strongest) for row in ranked]
            total = float(chosen.sum())
            sides.append(Side(name, lines, len(chosen), Scale([total]).signed(total)))
        return sides

    def _ranked(self, rows: Sequence[Ranked], at: int) -> Sequence[Ranked]:
        """The lines of one query; a ranking holds those of all, one query after another."""
        each = len(rows) // len(self)
        return rows[at * each : (at + 1) * each]

    def _line(self, row: Ranked, asked: int | None, scale: Scale, strongest: float) -> Line:
        name = shorten(row.id, LONGEST_NAME)
        label = "" if row.label is None else shorten(row.label, LONGEST_NAME)
        own = asked is not None and row.label == asked
        share = round(100 * abs(row.value) / strongest, 1)
        shown = picture(self._run.samples.preview(row.id), f"sample {name}")
        return Line(name, label, own, scale.signed(row.value), share, shown)


def _is_unit(label: Any, width: int) -> bool:
    return isinstance(label, int) and not isinstance(label, bool) and 0 <= label < width


def _label(query: Query) -> Any:
    """Its label; out of a tensor or an array, an ordinary number."""
    label: Any = query.label
    return label.item() if hasattr(label, "item") else label
