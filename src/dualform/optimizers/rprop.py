"""Rprop, which follows the signs of the gradient, as torch.optim does it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dualform.optimizers.rule import State, StateRule
from dualform.optimizers.steps import DescentStep, Hyper, Step


class RpropRule(StateRule):
    """One length h for each element, larger by η⁺ while the sign stays and smaller by η⁻ when not.

    `W ← W - h sign(d)` with `d = ±g`, and `d = 0` where the sign has just changed. As a linear form
    `P = h / |d|`: a sign has no parts, so a row's share is what `d / |d|` gives it, and
    rows that pull against the sum count against it.

    >>> rule, start, gradient = RpropRule(), torch.zeros(2), torch.tensor([2.0, 0.0])
    >>> hyper = dict(zip(rule.fields, (0.1, 0.5, 1.2, 1e-6, 50.0, 0.0)))
    >>> step, state = rule.transition(hyper, {}, start, start, gradient)
    >>> step.forward(start, start, gradient)[0]
    tensor([-0.1000,  0.0000])
    """

    name = "rprop"
    elementwise = True
    follows_signs = True
    optimizer = "Rprop"
    fields = ("lr", "shrink", "grow", "shortest", "longest", "maximize")
    state = ("prev", "step_size")

    def hyper(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """The group's options, `etas` and `step_sizes` as two each."""
        names = ("shrink", "grow", "shortest", "longest")
        pairs = zip(names, (*group["etas"], *group["step_sizes"]), strict=True)
        return super().hyper({**group, **dict(pairs)})

    def transition(
        self, hyper: Hyper, state: State, W: Tensor, b: Tensor, gradient: Tensor
    ) -> tuple[Step, State]:
        """The step, and its lengths and direction."""
        descent = DescentStep.of(hyper)
        d = descent.direction(W, gradient)
        h = state.get("step_size", torch.full_like(d, hyper["lr"]))
        same = torch.sign(d * state.get("prev", torch.zeros_like(d)))
        h = torch.where(same > 0, h * hyper["grow"], torch.where(same < 0, h * hyper["shrink"], h))
        h = h.clamp(hyper["shortest"], hyper["longest"])
        d = torch.where(same < 0, 0.0, d)
        P = torch.where(d == 0, 0.0, h / d.abs())
        return descent.transition(along_d=P), {"prev": d, "step_size": h}
