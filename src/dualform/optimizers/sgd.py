"""Stochastic gradient descent as torch.optim.SGD does it, in every variant."""

from __future__ import annotations

from torch.optim import Optimizer

from dualform.optimizers.rule import ScalarRule
from dualform.optimizers.steps import Hyper, Transition


class SGDRule(ScalarRule):
    """Momentum μ, dampening, Nesterov, coupled weight decay λ, maximize; any schedule.

    With `k = 1 - dampening` (and `k = 1, μ = 0` for the step that creates the buffer):
    `b ← μ b + k (±g + λ W)`, then `W ← W - η b`, or with Nesterov `W ← W - η (±g + λ W + μ b)`.

    >>> values = (0.1, 0.5, 0.0, 0.0, 0.0, 0.0)
    >>> SGDRule().transition(dict(zip(SGDRule.fields, values)), buffered=True)
    Transition(M=((1.0, -0.05), (0.0, 0.5)), n=(-0.1, 1.0))
    """

    name = "sgd"
    optimizer = "SGD"
    buffer = "momentum_buffer"
    fields = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")

    def refusal(self, optimizer: Optimizer) -> str:
        """None: numbers serve complex parameters as well."""
        return ""

    def makes_buffer(self, hyper: Hyper) -> bool:
        """torch creates the buffer at the first step with momentum."""
        return hyper["momentum"] != 0

    def transition(self, hyper: Hyper, buffered: bool) -> Transition:
        """The matrices of maths: `M` over (W, b), `n` on the gradient."""
        eta, decay, mu = hyper["lr"], hyper["weight_decay"], hyper["momentum"]
        sign = -1.0 if hyper["maximize"] else 1.0
        if mu == 0:
            return Transition(((1 - eta * decay, 0.0), (0.0, 1.0)), (-eta * sign, 0.0))
        k = 1 - hyper["dampening"] if buffered else 1.0
        keep = mu if buffered else 0.0
        # the direction as a combination of W, b and g: plain momentum takes b, Nesterov g + μ b
        on_W, on_b, on_g = k * decay, keep, k * sign
        if hyper["nesterov"]:
            on_W, on_b, on_g = decay + mu * on_W, mu * keep, sign + mu * on_g
        return Transition(
            ((1 - eta * on_W, -eta * on_b), (k * decay, keep)), (-eta * on_g, k * sign)
        )
