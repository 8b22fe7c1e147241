"""RAdam, Adam with its early steps rectified, as torch.optim does it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dualform.optimizers.adam import AdamLike, inverse_root
from dualform.optimizers.operators import Coefficient
from dualform.optimizers.options import clock
from dualform.optimizers.rule import State
from dualform.optimizers.steps import Hyper, Pair, times


class RAdamRule(AdamLike):
    """Betas, weight decay in the direction or decoupled, maximize.

    With Adam's `d`, `b` and `v`, `ρ_∞ = 2 / (1 - β2) - 1` and `ρ_t = ρ_∞ - 2 t β2^t / (1 - β2^t)`:
    `W ← W - η / (1 - β1^t) P b`, where `P = 1` up to `ρ_t = 5`, and beyond it
    `P = √((ρ_t - 4) (ρ_t - 2) ρ_∞ / ((ρ_∞ - 4) (ρ_∞ - 2) ρ_t)) √(1 - β2^t) / (√v + ε)`.

    >>> import torch
    >>> rule, start, gradient = RAdamRule(), torch.zeros(1), torch.tensor([2.0])
    >>> hyper = dict(zip(rule.fields, (0.1, 0.9, 0.999, *[0.0] * 6)))
    >>> step, state = rule.transition(hyper, {}, start, start, gradient)
    >>> step.forward(start, start, gradient)  # early on a step is as long as its gradient
    (tensor([-0.2000]), tensor([0.2000]))
    """

    name = "radam"
    optimizer = "RAdam"

    def along(self, hyper: Hyper, step: float, state: State) -> Pair:
        """`η / (1 - β1^t) P` along `b`."""
        t = clock(step, hyper)
        first = float(1 - hyper["beta1"] ** t)
        return times(hyper["lr"] / first, _rectified(hyper, t, state["exp_avg_sq"])), 0.0


def _rectified(hyper: Hyper, t: Any, v: Tensor) -> Coefficient:
    beta2 = hyper["beta2"]
    unbiased = 1 - beta2**t
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * t * beta2**t / unbiased
    if length <= 5:
        return 1.0
    rectify = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    return inverse_root(v, float((rectify * unbiased) ** 0.5), hyper["eps"])
