"""Adadelta as torch.optim does it."""

from __future__ import annotations

import torch
from torch import Tensor

from dualform.optimizers.rule import State, StateRule
from dualform.optimizers.steps import DescentStep, Hyper, Step


class AdadeltaRule(StateRule):
    """Average ρ, coupled weight decay λ, maximize.

    With `d = ±g + λ W`: `v ← ρ v + (1 - ρ) d²`, `P = √(u + ε) / √(v + ε)`, `W ← W - η P d`,
    and then `u ← ρ u + (1 - ρ) (P d)²`.

    >>> rule, start, gradient = AdadeltaRule(), torch.zeros(1), torch.tensor([2.0])
    >>> hyper = dict(zip(rule.fields, (1.0, 0.75, 1.0, 0.0, 0.0)))
    >>> step, state = rule.transition(hyper, {}, start, start, gradient)
    >>> step.forward(start, start, gradient)[0], state["acc_delta"]
    (tensor([-1.4142]), tensor([0.5000]))
    """

    name = "adadelta"
    elementwise = True
    optimizer = "Adadelta"
    fields = ("lr", "rho", "eps", "weight_decay", "maximize")
    state = ("square_avg", "acc_delta")

    def transition(
        self, hyper: Hyper, state: State, W: Tensor, b: Tensor, gradient: Tensor
    ) -> tuple[Step, State]:
        """The step, and both averages after it."""
        descent, rho, eps = DescentStep.of(hyper), hyper["rho"], hyper["eps"]
        d = descent.direction(W, gradient)
        moved = state.get("acc_delta", torch.zeros_like(d))
        v = rho * state.get("square_avg", torch.zeros_like(d)) + (1 - rho) * d**2
        P = (moved + eps).sqrt() / (v + eps).sqrt()
        after = {"square_avg": v, "acc_delta": rho * moved + (1 - rho) * (P * d) ** 2}
        return descent.transition(along_d=hyper["lr"] * P), after
