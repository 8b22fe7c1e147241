"""The figures, as geometry: templates turn it into SVG, so that text is escaped in one place.

Horizontal positions are percentages and vertical ones pixels: a figure fills any width while its
text keeps its size. Curves live in a square of `FIELD` units that is stretched behind the text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dualform.explore.amounts import Amount, Scale, shorten
from dualform.ledger.samples import Label, SampleId
from dualform.read.scores import Array

FIELD = 1000.0
MOST_BLOCKS = 12
BLOCK_POINTS = 200
LINE_POINTS = 400
MOST_EPOCH_NAMES = 12
GAP = 0.12
"""The share of a block that separates it from the next."""


@dataclass(frozen=True)
class Mark:
    """A text and where it stands: a percentage across, or pixels down."""

    text: str
    at: float


@dataclass(frozen=True)
class Frame:
    """The range of values a figure shows, zero included, and where they lie."""

    low: float
    high: float
    top: float
    height: float

    @classmethod
    def around(cls, values: Array, top: float, height: float) -> Frame:
        """Fits the values, with a little air."""
        low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
        air = 0.05 * ((high - low) or 1.0)
        return cls(low - air, high + air, top, height)

    def unit(self, value: float) -> float:
        """Where a value lies in the field, from 0 (top) to `FIELD`."""
        return round(FIELD * (self.high - value) / (self.high - self.low), 1)

    def pixel(self, value: float) -> float:
        """Where a value lies in the figure."""
        return round(self.top + self.height * self.unit(value) / FIELD, 1)

    @property
    def bottom(self) -> float:
        """The lower edge, in pixels."""
        return self.top + self.height

    @property
    def marks(self) -> list[Mark]:
        """Round values along the axis."""
        values = round_values(self.low, self.high)
        scale = Scale([values[1] - values[0] if len(values) > 1 else 1.0], digits=1)
        return [Mark(scale.signed(v).text if v else "0", self.pixel(v)) for v in values]


@dataclass(frozen=True)
class Group:
    """The samples that share a label."""

    name: str
    label: Label | None
    positions: NDArray[np.int64]


@dataclass(frozen=True)
class Block:
    """One label's contributions, sorted: its part of the figure."""

    name: str
    asked: bool
    count: int
    sum: Amount
    left: float
    right: float
    above: str
    below: str

    @property
    def across(self) -> dict[str, float]:
        """Where it begins, its middle and its width, in percent of the figure."""
        middle, width = (self.left + self.right) / 2, self.right - self.left
        places = {"left": self.left, "middle": middle, "width": width}
        return {name: round(100 * place / FIELD, 2) for name, place in places.items()}


@dataclass(frozen=True)
class BlockFigure:
    """Contributions by label, sorted within each."""

    blocks: Sequence[Block]
    frame: Frame
    merged: int
    """How many labels the last block stands for, where there are too many to show."""
    thinned: bool
    slanted: bool

    @property
    def height(self) -> float:
        """Slanted names need room."""
        return self.frame.bottom + (78 if self.slanted else 26)


@dataclass(frozen=True)
class LineFigure:
    """Evidence over training."""

    frame: Frame
    line: str
    above: str
    below: str
    steps: Sequence[Mark]
    epochs: Sequence[Mark]
    borders: Sequence[float]
    final: Amount
    final_at: float
    peak: Amount
    peak_step: int
    last_step: int
    thinned: bool

    @property
    def height(self) -> float:
        """With a line for the steps below."""
        return self.frame.bottom + 26


def label_groups(ids: Sequence[SampleId], labels: Mapping[SampleId, Label]) -> list[Group]:
    """The samples by label, in order; those without one come last.

    >>> [(g.name, g.positions.tolist()) for g in label_groups([0, 1, 2], {0: 7, 2: 7})]
    [('7', [0, 2]), ('no label', [1])]
    """
    found: dict[Label | None, list[int]] = {}
    for position, sample in enumerate(ids):
        label = labels.get(sample)
        known = label if label is None or isinstance(label, int | str) else str(label)
        found.setdefault(known, []).append(position)
    order = sorted(found, key=lambda name: (name is None, isinstance(name, str), name))
    unlabeled = "all examples" if len(found) == 1 else "no label"
    return [
        Group(unlabeled if label is None else str(label), label, np.array(found[label]))
        for label in order
    ]


def block_figure(values: Array, groups: Sequence[Group], asked: Label | None) -> BlockFigure:
    """Each label's contributions in descending order, side by side."""
    frame = Frame.around(values, top=36, height=210)
    shown, merged = _most_important(values, groups, asked)
    sums = [float(values[group.positions].sum()) for group in shown]
    width, gap = FIELD / len(shown), GAP if len(shown) > 1 else 0.0
    blocks = []
    for at, (group, total) in enumerate(zip(shown, sums, strict=True)):
        left, right = (at + gap / 2) * width, (at + 1 - gap / 2) * width
        above, below = _sorted_areas(values[group.positions], frame, left, right)
        name, own = shorten(group.name, 13), asked is not None and group.label == asked
        amount, count = Scale([total]).signed(total), len(group.positions)
        blocks.append(Block(name, own, count, amount, left, right, above, below))
    thinned = any(block.count > BLOCK_POINTS for block in blocks)
    named = blocks[:-1] if merged else blocks
    slanted = len(blocks) > 1 and any(len(block.name) > 4 for block in named)
    return BlockFigure(blocks, frame, merged, thinned, slanted)


def _most_important(
    values: Array, groups: Sequence[Group], asked: Label | None
) -> tuple[Sequence[Group], int]:
    """The labels with the largest sums in their order, and one block for all others."""
    if len(groups) <= MOST_BLOCKS:
        return groups, 0

    def weight(at: int) -> tuple[bool, float]:
        own = asked is not None and groups[at].label == asked
        return own, abs(float(values[groups[at].positions].sum()))

    chosen = set(sorted(range(len(groups)), key=weight, reverse=True)[: MOST_BLOCKS - 1])
    others = [group for at, group in enumerate(groups) if at not in chosen]
    together = Group("others", None, np.concatenate([group.positions for group in others]))
    return [*(groups[at] for at in sorted(chosen)), together], len(others)


def _sorted_areas(values: Array, frame: Frame, left: float, right: float) -> tuple[str, str]:
    """The part above zero and the part below, of values in descending order."""
    ordered = np.sort(values)[::-1][spread(len(values), BLOCK_POINTS)]
    edges = np.linspace(left, right, len(ordered) + 1)
    positive = int((ordered > 0).sum())
    above = staircase(ordered[:positive], edges[: positive + 1], frame)
    return above, staircase(ordered[positive:], edges[positive:], frame)


def staircase(heights: Array, edges: Array, frame: Frame) -> str:
    """An SVG path around bars that stand on zero, one between each two edges.

    >>> staircase(np.array([1.0, 2.0]), np.array([0.0, 5.0, 10.0]), Frame(0, 2, 0, 100))
    'M0 1000V500H5V0H10V1000Z'
    """
    if not heights.any():
        return ""
    zero = f"{frame.unit(0.0):g}"
    bars = "".join(
        f"V{frame.unit(height):g}H{round(edge, 1):g}"
        for height, edge in zip(heights.tolist(), edges[1:].tolist(), strict=True)
    )
    return f"M{round(float(edges[0]), 1):g} {zero}{bars}V{zero}Z"


def line_figure(steps: Array, epochs: NDArray[np.int64]) -> LineFigure:
    """The running sum of what each step contributed; `epochs` numbers them by step, from 0."""
    running = np.concatenate([np.zeros(1), np.cumsum(steps)])
    frame = Frame.around(running, top=26, height=150)
    at = spread(len(running), LINE_POINTS)
    across = at / max(len(steps), 1)
    peak = int(np.abs(running).argmax())
    scale = Scale(running[[peak, -1]])
    names, borders = _epoch_marks(epochs)
    return LineFigure(
        frame,
        _line(across, running[at], frame),
        _area(across, np.maximum(running[at], 0), frame),
        _area(across, np.minimum(running[at], 0), frame),
        [Mark(f"{v:,.0f}", 100 * v / max(len(steps), 1)) for v in round_values(0, len(steps))],
        names,
        borders,
        scale.signed(float(running[-1])),
        frame.pixel(float(running[-1])),
        scale.signed(float(running[peak])),
        peak,
        len(steps),
        len(running) > LINE_POINTS,
    )


def _line(across: Array, values: Array, frame: Frame) -> str:
    points = [
        f"{round(FIELD * x, 1):g} {frame.unit(y):g}"
        for x, y in zip(across.tolist(), values.tolist(), strict=True)
    ]
    return "M" + "L".join(points)


def _area(across: Array, values: Array, frame: Frame) -> str:
    zero = f"{frame.unit(0.0):g}"
    return f"{_line(across, values, frame)}V{zero}H0Z" if values.any() else ""


def _epoch_marks(epochs: NDArray[np.int64]) -> tuple[list[Mark], list[float]]:
    """Names in the middle of epochs, and the borders between them; none for a single epoch."""
    last, steps = int(epochs.max(initial=0)), len(epochs) - 1
    if last < 2:
        return [], []
    ends = np.searchsorted(epochs[1:], np.arange(last + 1), side="right") * 100 / steps
    every = math.ceil(last / MOST_EPOCH_NAMES)
    names = [
        Mark(str(epoch), round(float(ends[epoch - 1] + ends[epoch]) / 2, 2))
        for epoch in range(1, last + 1, every)
    ]
    return names, [round(float(end), 2) for end in ends[1:-1][every - 1 :: every]]


def spread(count: int, points: int) -> NDArray[np.int64]:
    """At most `points` positions among `count`, evenly spread, the first and the last included.

    >>> spread(3, 200).tolist(), spread(1000, 3).tolist()
    ([0, 1, 2], [0, 500, 999])
    """
    return np.linspace(0, count - 1, min(count, points)).round().astype(np.int64)


def round_values(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers between two others.

    >>> round_values(-2.2, 7.9)
    [-2.0, 0.0, 2.0, 4.0, 6.0]
    """
    rough = (high - low or 1.0) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * min((m for m in (1, 2, 5, 10) if m * power >= rough * 0.6), default=10)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]
