"""Lion, the sign of a momentum, as the package lion-pytorch does it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.optimizers.options import kept
from dualform.optimizers.rule import State, StateRule
from dualform.optimizers.steps import Hyper, Step, Transition
from dualform.private import first_lr_of

KNOWN = ("lion_pytorch.lion_pytorch", "lion_pytorch.foreach")
"""Where the classes named Lion live that do exactly this; they are never imported here."""


class LionRule(StateRule):
    """Betas and weight decay λ; decoupled from the learning rate, `λ / η_0` in place of λ.

    With `c = β1 b + (1 - β1) g`: `W ← (1 - η λ) W - η sign(c)`, then `b ← β2 b + (1 - β2) g`.
    As a linear form `sign(c) = P c` with `P = 1 / |c|`: a sign has no parts, so a row's share is
    what `c / |c|` gives it, and rows that pull against the sum count against it.

    >>> rule, start, gradient = LionRule(), torch.zeros(2), torch.tensor([4.0, 0.0])
    >>> hyper = dict(zip(rule.fields, (0.1, 0.75, 0.5, 0.0)))
    >>> step, state = rule.transition(hyper, {"first_lr": kept(1.0)}, start, start, gradient)
    >>> step.forward(start, start, gradient)
    (tensor([-0.1000,  0.0000]), tensor([2., 0.]))
    """

    name = "lion"
    optimizer = "Lion"
    elementwise = True
    follows_signs = True
    fields = ("lr", "beta1", "beta2", "weight_decay")
    buffer = "exp_avg"
    state = ("first_lr",)

    def describes(self, optimizer: Optimizer) -> bool:
        """Exactly the package's own classes."""
        kind = type(optimizer)
        return kind.__module__ in KNOWN and kind.__qualname__ == "Lion"

    def refusal(self, optimizer: Optimizer) -> str:
        """Decay that is divided by a first learning rate which may change unseen."""
        if _first_lr(optimizer) is None:
            return (
                "Lion with decoupled_weight_decay=True divides by its first lr, a tensor that may "
                "change unseen; by row is lr=float"
            )
        return super().refusal(optimizer)

    def memory(self, optimizer: Optimizer, parameter: Tensor) -> State:
        """The momentum, and what the optimizer divides λ by where it is decoupled from η."""
        first = _first_lr(optimizer)
        known = super().memory(optimizer, parameter)
        return known if first is None else {**known, "first_lr": kept(first)}

    def transition(
        self, hyper: Hyper, state: State, W: Tensor, b: Tensor, gradient: Tensor
    ) -> tuple[Step, State]:
        """The step; nothing but the momentum is remembered."""
        lr, beta1, beta2 = hyper["lr"], hyper["beta1"], hyper["beta2"]
        c = beta1 * b + (1 - beta1) * gradient
        P = torch.where(c == 0, 0.0, -lr / c.abs())
        shrink = 1 - lr * hyper["weight_decay"] / float(state["first_lr"])
        M = ((shrink, beta1 * P), (0.0, beta2))
        return Transition(M, ((1 - beta1) * P, 1 - beta2)), state


def _first_lr(optimizer: Optimizer) -> float | None:
    """What λ is divided by: η_0, or 1; None where η_0 is a tensor that schedulers may change."""
    if not getattr(optimizer, "decoupled_wd", False):
        return 1.0
    first: Any = first_lr_of(optimizer)
    return None if first is None or isinstance(first, Tensor) else float(first)
