"""NAdam, Adam with Nesterov's momentum, as torch.optim does it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.record.optimizers.descent import Descent, is_plain
from dualform.record.optimizers.options import clock, count, flat, kept, rounded
from dualform.record.optimizers.rule import Hyper, State, StateRule, Transition


class NAdamRule(StateRule):
    """Betas, momentum decay ψ, weight decay in the direction or decoupled, maximize.

    With Adam's `d`, `b`, `v` and `P`, `μ_t = β1 (1 - 0.96^(t ψ) / 2)` and `Π_t = μ_1 ⋯ μ_t`:
    `W ← W - η P (μ_{t+1} / (1 - Π_{t+1}) b + (1 - μ_t) / (1 - Π_t) d)`.

    >>> rule, start, gradient = NAdamRule(), torch.zeros(1), torch.tensor([2.0])
    >>> hyper = dict(zip(rule.fields, (0.1, 0.9, 0.999, 0.0, 0.0, 0.0, 0.004, *[0.0] * 3)))
    >>> step, state = rule.transition(hyper, {}, start, start, gradient)
    >>> step.forward(start, start, gradient)
    (tensor([-0.1056]), tensor([0.2000]))
    """

    name = "nadam"
    fields = (
        "lr",
        "beta1",
        "beta2",
        "eps",
        "weight_decay",
        "decoupled_weight_decay",
        "momentum_decay",
        "maximize",
        "capturable",
        "double",
    )
    buffer = "exp_avg"
    state = ("step", "exp_avg_sq", "mu_product")

    def accepts(self, optimizer: Optimizer) -> bool:
        """Exactly torch's own class."""
        return is_plain(optimizer, "NAdam")

    def hyper(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """The group's options, `betas` as two."""
        return super().hyper(flat(group))

    def transition(
        self, hyper: Hyper, state: State, W: Tensor, b: Tensor, gradient: Tensor
    ) -> tuple[Transition, State]:
        """The step, and `v` and `Π` after it."""
        descent, step = Descent.of(hyper), count(state)
        beta1, beta2 = hyper["beta1"], hyper["beta2"]
        d = descent.direction(W, gradient)
        v = beta2 * state.get("exp_avg_sq", torch.zeros_like(d)) + (1 - beta2) * d**2
        second = float(1 - beta2 ** clock(step, hyper))
        P = hyper["lr"] / ((v / second).sqrt() + hyper["eps"])
        mu, mu_next = _momentum(hyper, step), _momentum(hyper, step + 1)
        product = float(rounded(float(state.get("mu_product", 1.0)), hyper) * mu)
        after = {"step": kept(step), "exp_avg_sq": v, "mu_product": kept(product)}
        on_b, on_d = mu_next / (1 - product * mu_next), (1 - mu) / (1 - product)
        return descent.transition(on_b * P, on_d * P, keep=beta1, take=1 - beta1), after


def _momentum(hyper: Hyper, step: float) -> float:
    return hyper["beta1"] * (1 - 0.5 * float(0.96 ** (step * hyper["momentum_decay"])))
