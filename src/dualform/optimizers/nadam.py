"""NAdam, Adam with Nesterov's momentum, as torch.optim does it."""

from __future__ import annotations

from dualform.optimizers.adam import AdamLike, adam_fields, inverse_root
from dualform.optimizers.options import clock, kept, rounded
from dualform.optimizers.rule import State
from dualform.optimizers.steps import Hyper, Pair


class NAdamRule(AdamLike):
    """Betas, momentum decay ψ, weight decay in the direction or decoupled, maximize.

    With Adam's `d`, `b`, `v` and `P`, `μ_t = β1 (1 - 0.96^(t ψ) / 2)` and `Π_t = μ_1 ⋯ μ_t`:
    `W ← W - η P (μ_{t+1} / (1 - Π_{t+1}) b + (1 - μ_t) / (1 - Π_t) d)`.

    >>> import torch
    >>> rule, start, gradient = NAdamRule(), torch.zeros(1), torch.tensor([2.0])
    >>> hyper = dict(zip(rule.fields, (0.1, 0.9, 0.999, 0.0, 0.0, 0.0, 0.004, *[0.0] * 3)))
    >>> step, state = rule.transition(hyper, {}, start, start, gradient)
    >>> step.forward(start, start, gradient)
    (tensor([-0.1056]), tensor([0.2000]))
    """

    name = "nadam"
    optimizer = "NAdam"
    fields = adam_fields("momentum_decay")
    state = (*AdamLike.state, "mu_product")

    def along(self, hyper: Hyper, step: float, state: State) -> Pair:
        """`η P μ_{t+1} / (1 - Π_{t+1})` along `b`, `η P (1 - μ_t) / (1 - Π_t)` along `d`."""
        second = float(1 - hyper["beta2"] ** clock(step, hyper))
        P = inverse_root(state["exp_avg_sq"], hyper["lr"], hyper["eps"], second)
        mu, mu_next = _momentum(hyper, step), _momentum(hyper, step + 1)
        product = float(rounded(float(state.get("mu_product", 1.0)), hyper) * mu)
        state["mu_product"] = kept(product)
        return mu_next / (1 - product * mu_next) * P, (1 - mu) / (1 - product) * P


def _momentum(hyper: Hyper, step: float) -> float:
    return hyper["beta1"] * (1 - 0.5 * float(0.96 ** (step * hyper["momentum_decay"])))
