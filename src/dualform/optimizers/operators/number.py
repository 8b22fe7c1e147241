"""A number: the coefficients of SGD, and of a parameter that a step only shrinks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dualform.memory.views import Region, View
from dualform.optimizers.operators.operator import Operator, Question, Restricted


@dataclass(frozen=True, slots=True)
class Number(Operator):
    """`G ↦ c G`.

    >>> Number(2.0).apply(torch.ones(2))
    tensor([2., 2.])
    """

    number: float
    is_dense = False

    def apply(self, dense: Tensor) -> Tensor:
        """`c G`."""
        return self.number * dense

    @property
    def adjoint(self) -> Number:
        """Itself."""
        return self

    def scaled(self, number: float) -> Number:
        """The product."""
        return Number(self.number * number)

    def asked(self, question: Question, view: View) -> Question:
        """Scales the question."""
        return question.times(self.number)

    def restricted(self, region: Region, view: View) -> Restricted:
        """Needs that part alone."""
        return Restricted(region, lambda dense: dense.mul_(self.number))

    def diagonal(self, shape: tuple[int, ...]) -> Tensor:
        """The same number everywhere."""
        return torch.full(shape, self.number, dtype=torch.float64)

    @property
    def diagonals(self) -> Mapping[Any, float]:
        """The number alone."""
        return {None: self.number}
