"""Adagrad as torch.optim does it, in every variant."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.optimizers.adam import inverse_root
from dualform.optimizers.options import count, kept
from dualform.optimizers.rule import State, StateRule
from dualform.optimizers.steps import DescentStep, Hyper, Step


class AdagradRule(StateRule):
    """Decay ψ of the learning rate, an initial sum, coupled weight decay λ, maximize.

    With `d = ±g + λ W`: `s ← s + d²`, `W ← W - η / (1 + (t - 1) ψ) d / (√s + ε)`.

    >>> rule, start, gradient = AdagradRule(), torch.zeros(1), torch.tensor([2.0])
    >>> hyper = dict(zip(rule.fields, (0.1, 0.0, 0.0, 0.0, 0.0)))
    >>> step, state = rule.transition(hyper, {"sum": torch.zeros(1)}, start, start, gradient)
    >>> step.forward(start, start, gradient)[0], state["sum"]
    (tensor([-0.1000]), tensor([4.]))
    """

    name = "adagrad"
    elementwise = True
    optimizer = "Adagrad"
    fields = ("lr", "lr_decay", "eps", "weight_decay", "maximize")
    state = ("step", "sum")

    def memory(self, optimizer: Optimizer, parameter: Tensor) -> State:
        """The sum so far; the optimizer's initial value before it has met the parameter."""
        initial = optimizer.defaults["initial_accumulator_value"]  # whatever the group says
        first = {"step": kept(0), "sum": torch.full_like(parameter, initial)}
        return super().memory(optimizer, parameter) or first

    def transition(
        self, hyper: Hyper, state: State, W: Tensor, b: Tensor, gradient: Tensor
    ) -> tuple[Step, State]:
        """The step, and the sum after it."""
        descent, (step, counted) = DescentStep.of(hyper), count(state)
        total = state["sum"] + descent.direction(W, gradient) ** 2
        eta = hyper["lr"] / (1 + (step - 1) * hyper["lr_decay"])
        after = {"step": counted, "sum": total}
        return descent.transition(along_d=inverse_root(total, eta, hyper["eps"])), after
