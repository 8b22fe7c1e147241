"""Averaged stochastic gradient descent as torch.optim does it; the average itself is not read."""

from __future__ import annotations

from torch import Tensor

from dualform.optimizers.options import count, kept, rounded
from dualform.optimizers.rule import State, StateRule
from dualform.optimizers.steps import DescentStep, Hyper, Step


class ASGDRule(StateRule):
    """Decay λ and its power α, coupled weight decay, maximize; all coefficients are numbers.

    `W ← (1 - λ h) W - h d` with `d = ±g + weight_decay W`, and then `h ← η / (1 + λ η t)^α`:
    each step goes as far as the learning rate of the step before it said.

    >>> import torch
    >>> rule, start = ASGDRule(), torch.zeros(1)
    >>> hyper = dict(zip(rule.fields, (0.5, 0.5, 1.0, 0.0, 0.0, 1.0)))
    >>> step, state = rule.transition(hyper, {}, start, start, start)
    >>> step.along_d, state["eta"].item()
    (0.5, 0.4)
    """

    name = "asgd"
    elementwise = True
    optimizer = "ASGD"
    fields = ("lr", "lambd", "alpha", "weight_decay", "maximize", "double")
    state = ("step", "eta")

    def transition(
        self, hyper: Hyper, state: State, W: Tensor, b: Tensor, gradient: Tensor
    ) -> tuple[Step, State]:
        """The step, and `h` after it."""
        lr, lambd, (step, counted) = hyper["lr"], hyper["lambd"], count(state)
        h = float(state.get("eta", rounded(lr, hyper)))
        later = float(rounded(lr / (1 + lambd * lr * step) ** hyper["alpha"], hyper))
        descent = DescentStep.of(hyper)
        shrunk = DescentStep(descent.sign, descent.coupled, 1 - lambd * h)
        return shrunk.transition(along_d=h), {"step": counted, "eta": kept(later)}
