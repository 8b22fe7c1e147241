"""Adamax, Adam in the infinity norm, as torch.optim does it."""

from __future__ import annotations

import torch
from torch import Tensor

from dualform.optimizers.options import clock, count
from dualform.optimizers.rule import State, StateRule
from dualform.optimizers.steps import DescentStep, Hyper, Step


class AdamaxRule(StateRule):
    """Betas, coupled weight decay λ, maximize.

    With `d = ±g + λ W`: `b ← β1 b + (1 - β1) d`, `u ← max(β2 u, |d| + ε)`,
    `W ← W - η / (1 - β1^t) b / u`.

    >>> rule, start, gradient = AdamaxRule(), torch.zeros(1), torch.tensor([2.0])
    >>> hyper = dict(zip(rule.fields, (0.1, 0.9, 0.999, *[0.0] * 5)))
    >>> step, state = rule.transition(hyper, {}, start, start, gradient)
    >>> step.forward(start, start, gradient)
    (tensor([-0.1000]), tensor([0.2000]))
    """

    name = "adamax"
    elementwise = True
    optimizer = "Adamax"
    fields = ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize", "capturable", "double")
    buffer = "exp_avg"
    state = ("step", "exp_inf")

    def transition(
        self, hyper: Hyper, state: State, W: Tensor, b: Tensor, gradient: Tensor
    ) -> tuple[Step, State]:
        """The step, and `u` after it."""
        descent, (step, counted) = DescentStep.of(hyper), count(state)
        beta1 = hyper["beta1"]
        size = descent.direction(W, gradient).abs() + hyper["eps"]
        u = torch.maximum(hyper["beta2"] * state.get("exp_inf", torch.zeros_like(size)), size)
        far = hyper["lr"] / float(1 - beta1 ** clock(step, hyper)) / u
        after = {"step": counted, "exp_inf": u}
        return descent.transition(along_b=far, keep=beta1, take=1 - beta1), after
