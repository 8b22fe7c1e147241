"""RAdam, Adam with its early steps rectified, as torch.optim does it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.record.optimizers.descent import Descent, is_plain
from dualform.record.optimizers.operators import Operator, times
from dualform.record.optimizers.options import clock, count, flat, kept
from dualform.record.optimizers.rule import Hyper, State, StateRule, Transition


class RAdamRule(StateRule):
    """Betas, weight decay in the direction or decoupled, maximize.

    With Adam's `d`, `b` and `v`, `ρ_∞ = 2 / (1 - β2) - 1` and `ρ_t = ρ_∞ - 2 t β2^t / (1 - β2^t)`:
    `W ← W - η / (1 - β1^t) P b`, where `P = 1` up to `ρ_t = 5`, and beyond it
    `P = √((ρ_t - 4) (ρ_t - 2) ρ_∞ / ((ρ_∞ - 4) (ρ_∞ - 2) ρ_t)) √(1 - β2^t) / (√v + ε)`.

    >>> rule, start, gradient = RAdamRule(), torch.zeros(1), torch.tensor([2.0])
    >>> hyper = dict(zip(rule.fields, (0.1, 0.9, 0.999, *[0.0] * 6)))
    >>> step, state = rule.transition(hyper, {}, start, start, gradient)
    >>> step.forward(start, start, gradient)  # early on a step is as long as its gradient
    (tensor([-0.2000]), tensor([0.2000]))
    """

    name = "radam"
    fields = (
        "lr",
        "beta1",
        "beta2",
        "eps",
        "weight_decay",
        "decoupled_weight_decay",
        "maximize",
        "capturable",
        "double",
    )
    buffer = "exp_avg"
    state = ("step", "exp_avg_sq")

    def accepts(self, optimizer: Optimizer) -> bool:
        """Exactly torch's own class."""
        return is_plain(optimizer, "RAdam")

    def hyper(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """The group's options, `betas` as two."""
        return super().hyper(flat(group, maximize=False))

    def transition(
        self, hyper: Hyper, state: State, W: Tensor, b: Tensor, gradient: Tensor
    ) -> tuple[Transition, State]:
        """The step, and `v` after it."""
        descent, step = Descent.of(hyper), count(state)
        beta1, beta2 = hyper["beta1"], hyper["beta2"]
        d = descent.direction(W, gradient)
        v = beta2 * state.get("exp_avg_sq", torch.zeros_like(d)) + (1 - beta2) * d**2
        first = float(1 - beta1 ** clock(step, hyper))
        far = times(hyper["lr"] / first, _rectified(hyper, clock(step, hyper), v))
        after = {"step": kept(step), "exp_avg_sq": v}
        return descent.transition(along_b=far, keep=beta1, take=1 - beta1), after


def _rectified(hyper: Hyper, t: Any, v: Tensor) -> Operator:
    beta2 = hyper["beta2"]
    unbiased = 1 - beta2**t
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * t * beta2**t / unbiased
    if length <= 5:
        return 1.0
    rectify = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    return float((rectify * unbiased) ** 0.5) / (v.sqrt() + hyper["eps"])
