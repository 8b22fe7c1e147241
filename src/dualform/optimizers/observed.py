"""Any optimizer without a rule: every step is booked as the change it was seen to make."""

from __future__ import annotations

from torch.optim import Optimizer

from dualform.optimizers.rule import ScalarRule
from dualform.optimizers.steps import STILL, Hyper, Transition


class ObservedRule(ScalarRule):
    """`W_T = W_0 + Σ_t (W_t - W_{t-1})`: exact, by step.

    >>> import torch
    >>> ObservedRule().accepts(torch.optim.LBFGS([torch.zeros(1)]))
    True
    """

    name = "observed"
    fields = ()

    def describes(self, optimizer: Optimizer) -> bool:
        """Every optimizer can be observed."""
        return True

    def refusal(self, optimizer: Optimizer) -> str:
        """None."""
        return ""

    def transition(self, hyper: Hyper, buffered: bool) -> Transition:
        """Never asked for: no step of an observed run is booked by row."""
        return STILL
