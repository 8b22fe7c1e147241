"""What a coefficient can be: a number, one number for each element, or a matrix.

Numbers are floats and elementwise coefficients are tensors of the parameter's shape; torch's own
arithmetic serves both. A matrix acts on a parameter from one side, and mixes with numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sided:
    """`G ↦ A G` (left) or `G ↦ G A` (right), for parameters that are matrices.

    >>> double = Sided(2 * torch.eye(2))
    >>> (double * 3 + 1).matrix.tolist()
    [[7.0, 0.0], [0.0, 7.0]]
    >>> apply(double, torch.ones(2, 3)).tolist()
    [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]
    """

    matrix: Tensor
    left: bool = True

    def __mul__(self, other: float | Sided) -> Sided:
        """The composition, `other` first; both act on the same side."""
        if not isinstance(other, Sided):
            return Sided(self.matrix * other, self.left)
        pair = (self.matrix, other.matrix) if self.left else (other.matrix, self.matrix)
        return Sided(torch.matmul(*pair), self.left)

    __rmul__ = __mul__

    def __add__(self, other: float | Sided) -> Sided:
        if isinstance(other, Sided):
            return Sided(self.matrix + other.matrix, self.left)
        return Sided(self.matrix + other * torch.eye(len(self.matrix)).to(self.matrix), self.left)

    __radd__ = __add__


Operator: TypeAlias = float | Tensor | Sided


def apply(operator: Operator, gradient: Tensor) -> Tensor:
    """The operator on a gradient, or on anything of the parameter's shape.

    >>> apply(-0.5, torch.tensor([2.0, 4.0]))
    tensor([-1., -2.])
    """
    if not isinstance(operator, Sided):
        return operator * gradient
    return operator.matrix @ gradient if operator.left else gradient @ operator.matrix


def times(first: Operator, second: Operator) -> Operator:
    """The composition, `second` first; zero stays a number and costs nothing.

    >>> times(2.0, torch.tensor([1.0, 2.0])), times(torch.ones(2), 0.0)
    (tensor([2., 4.]), 0.0)
    """
    if _is_zero(first) or _is_zero(second):
        return 0.0
    one: Any = first  # operators that meet are of one kind, or one of them is a number
    found: Operator = one * second
    return found


def plus(first: Operator, second: Operator) -> Operator:
    """The sum; zero is left out.

    >>> plus(Sided(torch.eye(1)), 1.0).matrix, plus(0.0, 2.0)
    (tensor([[2.]]), 2.0)
    """
    if _is_zero(second):
        return first
    if _is_zero(first):
        return second
    one: Any = first
    found: Operator = one + second
    return found


def _is_zero(operator: Operator) -> bool:
    return isinstance(operator, float) and operator == 0
