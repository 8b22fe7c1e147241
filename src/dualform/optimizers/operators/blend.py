"""A blend of diagonals that many steps share: each step has only its numbers.

Where an optimizer divides by the same moment for many steps, their coefficients are multiples of
one diagonal, and of that of the moment kept before or after it. A question goes through each
diagonal once, not once a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dualform.memory.views import Region, View
from dualform.optimizers.operators.elementwise import Elementwise
from dualform.optimizers.operators.operator import Operator, Question, Restricted


class Diagonal:
    """One number for each element, of the parameter's shape; told apart by being the same one."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers

    @property
    def numbers(self) -> Tensor:
        """As large as the parameter: whoever has them elsewhere gets them only when asked."""
        return self._numbers


@dataclass(frozen=True, eq=False)
class Blend(Operator):
    """`G ↦ (c + Σ c_j D_j) ∘ G`: a number, and some diagonals with a number each.

    >>> D = Diagonal(torch.tensor([1.0, 10.0]))
    >>> (Blend({D: 2.0}) * 0.5 + Blend({D: 1.0})).apply(torch.ones(2))
    tensor([ 2., 20.])
    """

    parts: Mapping[Diagonal, float]
    number: float = 0.0
    is_dense = False

    def apply(self, dense: Tensor) -> Tensor:
        """The sum of all parts."""
        return self.numbers.to(dense) * dense

    @property
    def numbers(self) -> Tensor:
        """The whole as one diagonal."""
        first = next(iter(self.parts)).numbers
        total = torch.full_like(first, self.number)
        for diagonal, number in self.parts.items():
            total.add_(diagonal.numbers, alpha=number)
        return total

    @property
    def diagonals(self) -> Mapping[Any, float]:
        """Its parts."""
        return {**self.parts, None: self.number}

    @property
    def adjoint(self) -> Blend:
        """Itself."""
        return self

    def scaled(self, number: float) -> Blend:
        """Every number times this one."""
        parts = {diagonal: number * own for diagonal, own in self.parts.items()}
        return Blend(parts, number * self.number)

    def composed(self, first: Any) -> Operator:
        """One diagonal, of all parts of both."""
        other = first.numbers if isinstance(first, Blend) else first
        if not isinstance(other, Tensor):
            return super().composed(first)
        return Elementwise(self.numbers * other.to(self.numbers))

    def summed(self, other: Any) -> Operator:
        """Numbers of the same diagonal add up."""
        if isinstance(other, float | int):
            return Blend(self.parts, self.number + other)
        if not isinstance(other, Blend):
            return super().summed(other)
        parts = dict(self.parts)
        for diagonal, number in other.parts.items():
            parts[diagonal] = parts.get(diagonal, 0.0) + number
        return Blend(parts, self.number + other.number)

    def asked(self, question: Question, view: View) -> Question:
        """As one diagonal asks."""
        return Elementwise(self.numbers).asked(question, view)

    def restricted(self, region: Region, view: View) -> Restricted:
        """Needs that part alone."""
        return Elementwise(self.numbers).restricted(region, view)

    def diagonal(self, shape: tuple[int, ...]) -> Tensor:
        """The numbers."""
        return self.numbers

    def narrow(self) -> Blend:
        """Itself: it has hardly any numbers of its own."""
        return self
