"""One step of an optimizer, linear in the parameter, its buffer and the gradient.

`z_t = M z_{t-1} + n g_t` with `z = (W, b)`. The entries of M and n are coefficients: numbers,
tensors or operators. Here they are multiplied, added and applied, whatever they are. Steps go
forward and backward. Most of them share one form, a descent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dualform.optimizers.operators import Coefficient, Elementwise, Number, Operator

Hyper: TypeAlias = Mapping[str, float]
"""The hyper-parameters of a step, by name."""
Pair: TypeAlias = tuple[Coefficient, Coefficient]
"""What acts on the parameter, and on its buffer."""
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
        if isinstance(coefficient, Operator):
            total = coefficient.apply(value)
        else:
            total = coefficient * value
        return total if sign == 1 else total.mul_(sign)
    if isinstance(coefficient, Tensor):
        return total.addcmul_(coefficient, value, value=sign)
    if isinstance(coefficient, float):
        return total.add_(value, alpha=sign * coefficient)
    return total.add_(coefficient.apply(value), alpha=sign)


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


class Step(ABC):
    """One step of `(W, b)`, linear in both and in the gradient."""

    @abstractmethod
    def forward(self, W: Tensor, b: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """What the step makes of a parameter and its buffer."""

    @abstractmethod
    def carry(self, W: Value, b: Value) -> tuple[Value, Value]:
        """What it would make of them without its gradient; 0.0 stands for nothing at all."""

    @abstractmethod
    def backward(self, r: Pair) -> tuple[Coefficient, Pair]:
        """The coefficient of this step's gradient, and `r` for the step before it."""

    def coefficients(self, r: Pair) -> tuple[Sequence[Coefficient], Pair]:
        """The coefficient of each gradient, of which a stretch of steps has many; and `r`."""
        found, before = self.backward(r)
        return [found], before

    def in_the_end(self) -> Coefficient:
        """`n_W + n_b M_Wb / (1 − M_bb)`: what becomes of a gradient if all steps are alike.

        >>> Transition(((1.0, -0.05), (0.0, 0.5)), (-0.1, 1.0)).in_the_end()
        -0.2
        """
        on_W, (_, from_buffer) = self.backward((1.0, 0.0))
        on_b, (_, kept) = self.backward((0.0, 1.0))
        if not isinstance(kept, float) or kept >= 1:
            return on_W
        return plus(on_W, times(times(on_b, from_buffer), 1 / (1 - kept)))


@dataclass(frozen=True)
class Transition(Step):
    """A step written out: `z_t = M z_{t-1} + n g_t`, rows W and b.

    >>> import torch
    >>> momentum = Transition(((1.0, -0.05), (0.0, 0.5)), (-0.1, 1.0))
    >>> momentum.forward(torch.ones(1), torch.ones(1), torch.ones(1))
    (tensor([0.8500]), tensor([1.5000]))
    >>> momentum.carry(torch.ones(1), 0.0)
    (tensor([1.]), 0.0)
    """

    M: tuple[Pair, Pair]
    n: Pair

    def forward(self, W: Tensor, b: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """`M z + n g`."""
        on_W, on_b = self.n
        moved, carried = self.carry(W, b)
        found = added(moved, on_W, gradient), added(carried, on_b, gradient)
        return as_tensor(found[0], W), as_tensor(found[1], b)

    def carry(self, W: Value, b: Value) -> tuple[Value, Value]:
        """`M z`."""
        (WW, Wb), (bW, bb) = self.M
        return added(added(0.0, WW, W), Wb, b), added(added(0.0, bW, W), bb, b)

    def backward(self, r: Pair) -> tuple[Coefficient, Pair]:
        """`H = r · n`, and `r M`."""
        (WW, Wb), (bW, bb) = self.M
        return _dot(r, self.n), (_dot(r, (WW, bW)), _dot(r, (Wb, bb)))


def as_tensor(value: Value, like: Tensor) -> Tensor:
    """The value, zeros where it is nothing.

    >>> as_tensor(0.0, torch.ones(2))
    tensor([0., 0.])
    """
    return value if isinstance(value, Tensor) else torch.full_like(like, value)


def _dot(r: Pair, column: Pair) -> Coefficient:
    return plus(times(r[0], column[0]), times(r[1], column[1]))


STILL = Transition(((1.0, 0.0), (0.0, 1.0)), (0.0, 0.0))
SEEN = Transition(((1.0, 0.0), (0.0, 1.0)), (1.0, 0.0))


def walk_back(
    transitions: Sequence[Step], r: Pair, shares: Sequence[float]
) -> tuple[list[Coefficient], Pair]:
    """The coefficients of some consecutive steps, and `r` before the first of them.

    `shares` says how much the parameter after each step counts: for `W_T`, 1 after the last.

    >>> halving = Transition(((0.5, 0.0), (0.0, 1.0)), (-0.1, 0.0))
    >>> walk_back([halving, halving], (0.0, 0.0), [0.0, 1.0])
    ([-0.05, -0.1], (0.25, 0.0))
    """
    found: list[Coefficient] = []
    for transition, share in zip(reversed(transitions), reversed(shares), strict=True):
        coefficients, r = transition.coefficients((plus(r[0], share), r[1]))
        found += reversed(coefficients)
    return found[::-1], r


@dataclass(frozen=True)
class DescentStep:
    """`d = ±g + λ W`; `b ← keep b + take d`; `W ← kept W - along_b b - along_d d`.

    Coupled weight decay λ is part of the direction; decoupled, it is in `kept = 1 - η λ`.

    >>> import torch
    >>> uphill = DescentStep.of({"lr": 0.1, "weight_decay": 0.5, "maximize": 1.0})
    >>> uphill.direction(torch.ones(2), torch.tensor([1.0, 2.0]))
    tensor([-0.5000, -1.5000])
    >>> uphill.transition(along_b=1.0, keep=0.5, take=1.0).written_out
    Transition(M=((0.5, -0.5), (0.5, 0.5)), n=(1.0, -1.0))
    """

    sign: float
    coupled: float
    kept: float

    @classmethod
    def of(cls, hyper: Hyper) -> DescentStep:
        """The descent these hyper-parameters ask for."""
        decay = hyper.get("weight_decay", 0.0)
        sign = -1.0 if hyper.get("maximize") else 1.0
        if hyper.get("decoupled_weight_decay"):
            return cls(sign, 0.0, 1 - hyper["lr"] * decay)
        return cls(sign, decay, 1.0)

    def direction(self, W: Tensor, gradient: Tensor) -> Tensor:
        """`d = ±g + λ W`."""
        d = gradient if self.sign == 1 else self.sign * gradient
        return d if not self.coupled else torch.add(d, W, alpha=self.coupled)

    def transition(
        self,
        along_b: Coefficient = 0.0,
        along_d: Coefficient = 0.0,
        keep: float = 1.0,
        take: Coefficient = 0.0,
    ) -> Descended:
        """The step that goes so far along both."""
        return Descended(self, along_b, along_d, keep, take)


@dataclass(frozen=True)
class Descended(Step):
    """A step of a descent: done as it is said, which takes less arithmetic than written out.

    >>> import torch
    >>> step = DescentStep(1.0, 0.0, kept=0.5).transition(along_b=0.1, keep=0.5, take=1.0)
    >>> step.forward(torch.ones(1), torch.ones(1), torch.ones(1))
    (tensor([0.3500]), tensor([1.5000]))
    """

    descent: DescentStep
    along_b: Coefficient
    along_d: Coefficient
    keep: float
    take: Coefficient

    def forward(self, W: Tensor, b: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """What the step makes of a parameter and its buffer."""
        moved, carried = self._moved(W, b, self.descent.direction(W, gradient))
        return as_tensor(moved, W), as_tensor(carried, b)

    def carry(self, W: Value, b: Value) -> tuple[Value, Value]:
        """The same with `d = λ W`."""
        return self._moved(W, b, added(0.0, self.descent.coupled, W))

    def backward(self, r: Pair) -> tuple[Coefficient, Pair]:
        """The coefficient of this step's gradient, and `r` for the step before it."""
        return self.written_out.backward(r)

    @cached_property
    def written_out(self) -> Transition:
        """The step as matrices over (W, b) and the gradient."""
        sign, coupled = self.descent.sign, self.descent.coupled
        far = plus(times(self.along_b, self.take), self.along_d)
        kept = plus(self.descent.kept, times(far, -coupled))
        back, took = times(self.along_b, -self.keep), times(self.take, coupled)
        return Transition(
            ((kept, back), (took, self.keep)), (times(far, -sign), times(self.take, sign))
        )

    def _moved(self, W: Value, b: Value, d: Value) -> tuple[Value, Value]:
        b = added(added(0.0, self.keep, b), self.take, d)
        W = added(added(0.0, self.descent.kept, W), self.along_b, b, -1.0)
        return added(W, self.along_d, d, -1.0), b
