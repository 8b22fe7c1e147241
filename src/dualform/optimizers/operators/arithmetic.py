"""Coefficients multiplied, added and applied, whatever they are."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor

from dualform.optimizers.operators.elementwise import Elementwise
from dualform.optimizers.operators.number import Number
from dualform.optimizers.operators.operator import Coefficient, Operator, apply

Value: TypeAlias = Tensor | float
"""What coefficients act on: of the parameter's shape, or 0.0 for nothing at all."""


def as_operator(coefficient: Coefficient) -> Operator:
    """The coefficient as an operator, which does its own work.

    >>> as_operator(2.0)
    Number(number=2.0)
    """
    if isinstance(coefficient, Operator):
        return coefficient
    return Elementwise(coefficient) if isinstance(coefficient, Tensor) else Number(coefficient)


def added(total: Value, coefficient: Coefficient, value: Value, sign: float = 1.0) -> Value:
    """`total ± coefficient(value)`, in place where there is a total; nothing stays a number.

    >>> import torch
    >>> added(torch.ones(2), torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), sign=-1.0)
    tensor([-2., -7.])
    >>> added(0.0, 2.0, torch.ones(2)), added(0.0, 2.0, 0.0)
    (tensor([2., 2.]), 0.0)
    """
    if isinstance(value, float) or _is_zero(coefficient):
        return total
    if isinstance(total, float):
        found = apply(coefficient, value)
        return found if sign == 1 else found.mul_(sign)
    if isinstance(coefficient, Tensor):
        return total.addcmul_(coefficient, value, value=sign)
    if isinstance(coefficient, float):
        return total.add_(value, alpha=sign * coefficient)
    return total.add_(apply(coefficient, value), alpha=sign)


def times(first: Coefficient, second: Coefficient) -> Coefficient:
    """The composition, `second` first; zero stays a number and costs nothing.

    >>> import torch
    >>> times(2.0, torch.tensor([1.0, 2.0])), times(torch.ones(2), 0.0)
    (tensor([2., 4.]), 0.0)
    """
    if _is_zero(first) or _is_zero(second):
        return 0.0
    one: Any = first  # numbers, tensors and operators all have a product
    found: Coefficient = one * second
    return found


def plus(first: Coefficient, second: Coefficient) -> Coefficient:
    """The sum; zero is left out.

    >>> plus(1.0, 2.0), plus(0.0, 2.0)
    (3.0, 2.0)
    """
    if _is_zero(second):
        return first
    if _is_zero(first):
        return second
    one: Any = first
    found: Coefficient = one + second
    return found


def _is_zero(coefficient: Coefficient) -> bool:
    return isinstance(coefficient, float) and coefficient == 0
