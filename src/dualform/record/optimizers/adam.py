"""Adam and AdamW as torch.optim does them, in every variant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.record.optimizers.descent import Descent, is_plain
from dualform.record.optimizers.options import clock, count, flat, kept
from dualform.record.optimizers.rule import Hyper, State, StateRule, Transition


class AdamRule(StateRule):
    """Betas, amsgrad, weight decay λ in the direction or decoupled, maximize; any schedule.

    With `d = ±g + λ W` (decoupled: `d = ±g`, `W ← (1 - η λ) W`) at the optimizer's step t:
    `b ← β1 b + (1 - β1) d`, `v ← β2 v + (1 - β2) d²`, `P = 1 / (√(v / (1 - β2^t)) + ε)`,
    `W ← W - η / (1 - β1^t) P b`; amsgrad takes the largest `v` so far.

    >>> rule, start, gradient = AdamRule(), torch.zeros(1), torch.tensor([2.0])
    >>> hyper = dict(zip(rule.fields, (0.1, 0.9, 0.999, *[0.0] * 7)))
    >>> step, state = rule.transition(hyper, {}, start, start, gradient)
    >>> step.forward(start, start, gradient)  # the first step is η long, whatever the gradient
    (tensor([-0.1000]), tensor([0.2000]))
    """

    name = "adam"
    fields = (
        "lr",
        "beta1",
        "beta2",
        "eps",
        "weight_decay",
        "decoupled_weight_decay",
        "amsgrad",
        "maximize",
        "capturable",
        "double",
    )
    buffer = "exp_avg"
    state = ("step", "exp_avg_sq", "max_exp_avg_sq")
    optimizer: ClassVar[str] = "Adam"
    decoupled: ClassVar[bool] = False
    """What weight decay is in versions of torch whose groups do not say."""

    def accepts(self, optimizer: Optimizer) -> bool:
        """Exactly torch's own class."""
        return is_plain(optimizer, self.optimizer)

    def hyper(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """The group's options, `betas` as two; `differentiable` counts as `capturable` does."""
        options = flat(group, decoupled_weight_decay=self.decoupled)
        tensors = options["capturable"] or options["differentiable"]
        return super().hyper({**options, "capturable": tensors and not options["fused"]})

    def transition(
        self, hyper: Hyper, state: State, W: Tensor, b: Tensor, gradient: Tensor
    ) -> tuple[Transition, State]:
        """The step, and `v` after it."""
        descent, step = Descent.of(hyper), count(state)
        beta1, beta2 = hyper["beta1"], hyper["beta2"]
        d = descent.direction(W, gradient)
        v = beta2 * state.get("exp_avg_sq", torch.zeros_like(d)) + (1 - beta2) * d**2
        after = {**state, "step": kept(step), "exp_avg_sq": v}
        if hyper["amsgrad"]:
            v = torch.maximum(v, state.get("max_exp_avg_sq", v))
            after["max_exp_avg_sq"] = v
        first, second = (float(1 - beta ** clock(step, hyper)) for beta in (beta1, beta2))
        far = hyper["lr"] / first / ((v / second).sqrt() + hyper["eps"])
        return descent.transition(along_b=far, keep=beta1, take=1 - beta1), after


class AdamWRule(AdamRule):
    """Adam with decoupled weight decay: `W ← (1 - η λ) W - η / (1 - β1^t) P b`.

    >>> group = torch.optim.AdamW([torch.zeros(1)], weight_decay=0.1).param_groups[0]
    >>> dict(zip(AdamWRule.fields, AdamWRule().hyper(group)))["decoupled_weight_decay"]
    1.0
    """

    name = "adamw"
    optimizer = "AdamW"
    decoupled = True
