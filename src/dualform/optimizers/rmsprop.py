"""RMSprop as torch.optim does it, in every variant."""

from __future__ import annotations

import torch
from torch import Tensor

from dualform.optimizers.adam import average_square, inverse_root
from dualform.optimizers.rule import State, StateRule
from dualform.optimizers.steps import DescentStep, Hyper, Step


class RMSpropRule(StateRule):
    """Momentum μ, centered, coupled weight decay λ, maximize.

    With `d = ±g + λ W`: `v ← α v + (1 - α) d²`, `P = 1 / (√v + ε)`, `W ← W - η P d`.
    Centered, `a ← α a + (1 - α) d` and `P = 1 / (√(v - a²) + ε)`.
    With momentum, `b ← μ b + P d` and `W ← W - η b`.

    >>> rule, start, gradient = RMSpropRule(), torch.zeros(1), torch.tensor([2.0])
    >>> hyper = dict(zip(rule.fields, (0.1, 0.75, 0.0, 0.0, 0.5, 0.0, 0.0)))
    >>> step, state = rule.transition(hyper, {}, start, start, gradient)
    >>> step.forward(start, start, gradient)
    (tensor([-0.2000]), tensor([2.]))
    """

    name = "rmsprop"
    elementwise = True
    optimizer = "RMSprop"
    fields = ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize")
    buffer = "momentum_buffer"
    state = ("square_avg", "grad_avg")

    def transition(
        self, hyper: Hyper, state: State, W: Tensor, b: Tensor, gradient: Tensor
    ) -> tuple[Step, State]:
        """The step, and the averages after it."""
        descent, alpha = DescentStep.of(hyper), hyper["alpha"]
        d = descent.direction(W, gradient)
        v = average_square(state.get("square_avg"), d, alpha)
        after = {**state, "square_avg": v}
        if hyper["centered"]:
            a = alpha * state.get("grad_avg", torch.zeros_like(d)) + (1 - alpha) * d
            v, after["grad_avg"] = v - a**2, a
        P = inverse_root(v, 1.0, hyper["eps"])
        if hyper["momentum"] > 0:
            return descent.transition(hyper["lr"], keep=hyper["momentum"], take=P), after
        return descent.transition(along_d=hyper["lr"] * P), after
