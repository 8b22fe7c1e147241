"""The form most steps share: a direction, its running average, and how far to go along both."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dualform.record.optimizers.operators import Operator, plus, times
from dualform.record.optimizers.rule import Hyper, Transition


@dataclass(frozen=True)
class Descent:
    """`d = ±g + λ W`; `b ← keep b + take d`; `W ← kept W - along_b b - along_d d`.

    Coupled weight decay λ is part of the direction; decoupled, it is in `kept = 1 - η λ`.

    >>> import torch
    >>> uphill = Descent.of({"lr": 0.1, "weight_decay": 0.5, "maximize": 1.0})
    >>> uphill.direction(torch.ones(2), torch.tensor([1.0, 2.0]))
    tensor([-0.5000, -1.5000])
    >>> uphill.transition(along_b=1.0, keep=0.5, take=1.0)
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
        return self.sign * gradient + self.coupled * W

    def transition(
        self,
        along_b: Operator = 0.0,
        along_d: Operator = 0.0,
        keep: float = 1.0,
        take: Operator = 0.0,
    ) -> Transition:
        """The step as matrices over (W, b) and the gradient."""
        far = plus(times(along_b, take), along_d)
        kept = plus(self.kept, times(far, -self.coupled))
        back, took = times(along_b, -keep), times(take, self.coupled)
        return Transition(
            ((kept, back), (took, keep)), (times(far, -self.sign), times(take, self.sign))
        )
