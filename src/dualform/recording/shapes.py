"""How many directions a layer's summaries have on each side: chosen from its first rows.

A summary has k_o × k_i numbers, and the product is given. What it should hold is decided by the
reads. `influence` solves a layer line by line, along the longer side of its weight. Along a line it
counts every direction nearly alike that the samples move at all; across lines, large ones count
more. So on the longer side a shape is rated by how many directions it has, and on the shorter side
by how much of the rows' energy lies in them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.memory.summary import Bases
from dualform.recording.directions import leading_directions, rounded
from dualform.recording.keep import NUMBERS

MOST = 256
"""A basis that is chosen has at most so many directions: each costs a product with all rows."""
WHOLE = 512
"""A side of at most so many numbers may be kept whole, which needs no basis."""
NOTICED = 1e-3
"""A direction with this share of the rows' energy counts half along a line.

`influence` adds 3 times the mean square of a line's contributions to their Gram matrix. So with n
samples the share that counts half is 3 / n.
"""
LITTLE = 0.5
"""A shape that holds less may have twice the numbers, where it keeps a side whole."""
TIE = 0.02
"""Of shapes that hold so nearly the same, the smallest is taken."""


@dataclass(frozen=True)
class RatedSide:
    """The rows on one side of a layer, and the directions in which they vary, the most first.

    Directions are found from one half of the rows, and rated by the other: rows look as if they lay
    in directions that were found from themselves.
    """

    rows: Tensor
    """(rows, width): all of them."""
    judged: Tensor
    """The half that rates."""
    basis: Tensor
    """(width, directions): those of the other half."""
    shares: Tensor
    """(directions,): which share of its energy is along each of them."""

    @classmethod
    def of(cls, rows: Tensor) -> RatedSide:
        """All directions of a side that may be kept whole; of a wider one the leading.

        >>> RatedSide.of(torch.tensor([[1.0, 0.0], [0.0, 9.0], [3.0, 0.0], [0.0, 4.0]])).shares
        tensor([0.6400, 0.3600])
        """
        half = len(rows) // 2
        judged = rows[half:].float()
        basis = _ordered(rows[:half] if half else rows)
        shares = (judged @ basis).square().sum(0) / _energy(judged)
        return cls(rows, judged, basis, shares.cpu())

    @property
    def width(self) -> int:
        """Of a row."""
        return self.rows.shape[1]

    def leading(self, count: int) -> Tensor | None:
        """The first directions of all rows; None for all of them."""
        if count >= self.width:
            return None
        return rounded(_ordered(self.rows)[:, :count].contiguous())

    def tried(self, count: int) -> Tensor | None:
        """The first directions of one half."""
        return None if count >= self.width else self.basis[:, :count]

    def energy(self, shares: Tensor) -> float:
        """The share of the rows' energy in directions that have these shares."""
        return float(shares.sum())

    def count(self, shares: Tensor) -> float:
        """How many of all directions these are, each counted by how far a line notices it."""
        beyond = max(0, min(self.judged.shape) - len(self.shares))
        rest = (1 - self.shares.sum()).clamp_min(0) / max(1, beyond)
        every = _noticed(self.shares).sum() + beyond * _noticed(rest)
        return float(_noticed(shares).sum() / every.clamp_min(1e-30))

    def within(self, basis: Tensor | None) -> Tensor:
        """(directions,): the shares of the directions of a basis; of all where there is none."""
        if basis is None:
            return self.shares
        along = self.judged @ basis
        energy: Tensor = torch.linalg.eigvalsh(along.T @ along).clamp_min(0)
        return (energy / _energy(self.judged)).cpu()


@dataclass(frozen=True)
class Rating:
    """Rates shapes and bases by how much they hold of a layer's errors and inputs.

    Where bases are compared, new ones are those of one half of the rows.

    >>> torch.manual_seed(0)
    <torch._C.Generator object at ...>
    >>> rows = torch.randn(2000, 3) @ torch.randn(3, 80), torch.randn(2000, 200)
    >>> few, many = map(RatedSide.of, rows)
    >>> Rating(few, many).best(), Rating(many, few).best()
    ((8, 200), (200, 10))
    """

    errors: RatedSide
    inputs: RatedSide

    def best(self, known: Bases | None = None) -> tuple[int, int]:
        """The shape that holds most, or a smaller one that holds nearly as much.

        A layer that had twice the numbers before keeps them: they were little for its first rows.
        """
        height, width = self.errors.width, self.inputs.width
        rated = self._rated(NUMBERS)
        had = 0 if known is None else math.prod(known.size((height, width)))
        if had > NUMBERS or max(rated.values()) < LITTLE:
            more = {
                (outputs, inputs): held
                for (outputs, inputs), held in self._rated(2 * NUMBERS).items()
                if outputs == height or inputs == width
            }
            rated = more if had > NUMBERS else rated | more
        good = [shape for shape, held in rated.items() if held >= max(rated.values()) - TIE]
        return min(good, key=lambda shape: (math.prod(shape), -rated[shape]))

    def better(self, known: Bases | None, gain: float) -> Bases | None:
        """Bases of the best shape; None where those that are known hold nearly as much."""
        outputs, inputs = self.best(known)
        trial = Bases(self.errors.tried(outputs), self.inputs.tried(inputs))
        if known is not None and self.held(trial) <= self.held(known) + gain:
            return None
        return Bases(self.errors.leading(outputs), self.inputs.leading(inputs))

    def _rated(self, numbers: int) -> dict[tuple[int, int], float]:
        return {
            (outputs, inputs): self._held(self.errors.shares[:outputs], self.inputs.shares[:inputs])
            for outputs, inputs in shapes(self.errors.width, self.inputs.width, numbers)
        }

    def held(self, bases: Bases) -> float:
        """Which part of the rows some bases hold, from 0 to 1."""
        return self._held(self.errors.within(bases.outputs), self.inputs.within(bases.inputs))

    def _held(self, errors: Tensor, inputs: Tensor) -> float:
        if self.errors.width > self.inputs.width:
            return self.errors.count(errors) * self.inputs.energy(inputs)
        return self.errors.energy(errors) * self.inputs.count(inputs)


def shapes(height: int, width: int, numbers: int = NUMBERS) -> Iterator[tuple[int, int]]:
    """The shapes that a summary of a weight may have.

    >>> list(shapes(3072, 768))
    [(8, 256), (16, 128), (32, 64), (64, 32), (128, 16), (256, 8)]
    >>> list(shapes(512, 48))
    [(8, 48), (16, 48), (32, 48), (42, 48), (64, 32), (128, 16), (256, 8), (512, 4)]
    """
    wanted = {2**power for power in range(3, 9)}
    wanted |= {numbers // width} if width <= WHOLE else set()
    wanted |= {height} if height <= WHOLE else set()
    for outputs in sorted(count for count in wanted if 0 < count <= height):
        inputs = min(width, numbers // outputs)
        yield outputs, inputs if inputs == width <= WHOLE else min(inputs, MOST)


def _ordered(rows: Tensor) -> Tensor:
    """(width, directions): those in which rows vary, the most first."""
    rows = rows.float()
    basis = leading_directions(rows, MOST) if rows.shape[1] > WHOLE else None
    along = rows if basis is None else rows @ basis
    vectors: Tensor = torch.linalg.eigh(along.T @ along).eigenvectors.flip(1)
    return vectors if basis is None else basis @ vectors


def _energy(rows: Tensor) -> Tensor:
    return rows.square().sum().clamp_min(1e-30)


def _noticed(shares: Tensor) -> Tensor:
    return shares / (shares + NOTICED)
