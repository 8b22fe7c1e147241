"""Adafactor, whose second moment is kept as rows and columns, as torch.optim does it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dualform.optimizers.options import count
from dualform.optimizers.rule import State, StateRule
from dualform.optimizers.steps import DescentStep, Hyper, Step


class AdafactorRule(StateRule):
    """Decay τ of β2, clipping at d, decoupled weight decay λ, maximize.

    With `β = 1 - t^τ`: `R ← β R + (1 - β) mean_row(g²)`, `C ← β C + (1 - β) mean_col(g²)`,
    `V = R C / max(mean(R), ε1)` (vectors: `V ← β V + (1 - β) g²`), `P = 1 / max(√V, ε1)`,
    `W ← (1 - η λ) W - α / max(1, rms(P g) / d) P (±g)`, `α = max(ε2, rms(W)) min(η, 1 / √t)`.
    Of the weights only their size matters to a step, through α. Parameters of more than two
    dimensions are taken as torch has them: as matrices of their last two.

    >>> rule, start, gradient = AdafactorRule(), torch.ones(2, 2), torch.full((2, 2), 3.0)
    >>> hyper = dict(zip(rule.fields, (0.1, -0.8, 1e-7, 1e-3, 1.0, 0.0, 0.0)))
    >>> step, state = rule.transition(hyper, {}, start, start * 0, gradient)
    >>> step.forward(start, start * 0, gradient)[0][0], state["row_var"][0]
    (tensor([0.9000, 0.9000]), tensor([9.]))
    """

    name = "adafactor"
    optimizer = "Adafactor"
    fields = ("lr", "beta2_decay", "eps1", "eps2", "d", "weight_decay", "maximize")
    state = ("step", "row_var", "col_var", "variance")

    def hyper(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """The group's options, `eps` as two; where the first is None, the dtype's resolution."""
        eps1, eps2 = group["eps"]
        if eps1 is None:  # torch takes it from the first parameter it steps, for the whole group
            stepped = [p for p in group["params"] if p.grad is not None]
            eps1 = torch.finfo((stepped or group["params"])[0].dtype).eps
        return super().hyper({**group, "eps1": eps1, "eps2": eps2})

    def transition(
        self, hyper: Hyper, state: State, W: Tensor, b: Tensor, gradient: Tensor
    ) -> tuple[Step, State]:
        """The step, and the second moment after it."""
        step, counted = count(state)
        V, after = _second_moment(hyper, state, gradient, step ** hyper["beta2_decay"])
        P = 1 / V.clamp(min=hyper["eps1"] ** 2).sqrt()
        alpha = max(hyper["eps2"], _rms(W)) * min(hyper["lr"], step**-0.5)
        far = alpha / max(1.0, _rms(P * gradient) / hyper["d"]) * P
        descent = DescentStep.of({**hyper, "decoupled_weight_decay": 1.0})
        return descent.transition(along_d=far), {**after, "step": counted}


def _second_moment(hyper: Hyper, state: State, g: Tensor, new: float) -> tuple[Tensor, State]:
    if g.dim() < 2:
        before = state.get("variance", torch.zeros_like(g))
        V = torch.lerp(before, g**2, new)
        return V, {"variance": V}
    means = {"row_var": (g**2).mean(-1, keepdim=True), "col_var": (g**2).mean(-2, keepdim=True)}
    after = {
        name: torch.lerp(state.get(name, torch.zeros_like(mean)), mean, new)
        for name, mean in means.items()
    }
    R, C = after["row_var"], after["col_var"]
    return R @ C / R.mean(-2, keepdim=True).clamp(min=hyper["eps1"]), after


def _rms(values: Tensor) -> float:
    return float(values.norm()) / math.sqrt(values.numel())
