"""The form most steps share: a direction, its running average, and how far to go along both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dualform.optimizers.operators import Coefficient, Value, added, plus, times
from dualform.optimizers.rule import Hyper, Pair, Step, Transition, as_tensor


@dataclass(frozen=True)
class Descent:
    """`d = ±g + λ W`; `b ← keep b + take d`; `W ← kept W - along_b b - along_d d`.

    Coupled weight decay λ is part of the direction; decoupled, it is in `kept = 1 - η λ`.

    >>> import torch
    >>> uphill = Descent.of({"lr": 0.1, "weight_decay": 0.5, "maximize": 1.0})
    >>> uphill.direction(torch.ones(2), torch.tensor([1.0, 2.0]))
    tensor([-0.5000, -1.5000])
    >>> uphill.transition(along_b=1.0, keep=0.5, take=1.0).written_out
    Transition(M=((0.5, -0.5), (0.5, 0.5)), n=(1.0, -1.0))
    """

    sign: float
    coupled: float
    kept: float

    @classmethod
    def of(cls, hyper: Hyper) -> Descent:
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
    >>> step = Descent(1.0, 0.0, kept=0.5).transition(along_b=0.1, keep=0.5, take=1.0)
    >>> step.forward(torch.ones(1), torch.ones(1), torch.ones(1))
    (tensor([0.3500]), tensor([1.5000]))
    """

    descent: Descent
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
