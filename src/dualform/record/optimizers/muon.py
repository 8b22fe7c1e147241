"""Muon, momentum made orthogonal, as torch.optim does it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dualform.record.optimizers.descent import Descent
from dualform.record.optimizers.operators import Sided
from dualform.record.optimizers.options import flat
from dualform.record.optimizers.rule import Hyper, State, StateRule, Step

ADJUSTMENTS = {None: 0.0, "original": 0.0, "match_rms_adamw": 1.0}
"""What `adjust_lr_fn` is called, as a number; any other adjusts nothing."""


class MuonRule(StateRule):
    """Momentum μ, Nesterov, Newton–Schulz of any kind, decoupled weight decay λ, both adjustments.

    `b ← μ b + (1 - μ) g`, `u = b` or with Nesterov `u = μ b + (1 - μ) g`, `W ← (1 - η λ) W - η' O`.
    Each round of Newton–Schulz multiplies by a matrix made of what it multiplies, so `O = A u`
    with `A` found alongside (`u A` where that is smaller): values become `A e`, keys stay.

    `A` is exact, but torch computes in bfloat16: its steps differ from `A u` by 1 to 15 %, most
    where `u` has directions that are all rounding. No matrix times gradients can say that part;
    over training it averages out to 0.1 to 1.5 % of the change, and is found in the remainder.

    >>> rule, start, gradient = MuonRule(), torch.zeros(2, 3), torch.eye(2, 3)
    >>> hyper = dict(zip(rule.fields, (0.1, 0.0, 0.5, 0.0, 1e-7, 1.0, 1.5, -0.5, 0.0, 0.0)))
    >>> step, state = rule.transition(hyper, {}, start, start, gradient)
    >>> step.forward(start, start, gradient)[0]  # one round of 1.5 x - 0.5 x³ at x = √½
    tensor([[-0.0884,  0.0000,  0.0000],
            [ 0.0000, -0.0884,  0.0000]])
    """

    name = "muon"
    optimizer = "Muon"
    fields = (
        "lr",
        "weight_decay",
        "momentum",
        "nesterov",
        "eps",
        "ns_steps",
        "ns_1",
        "ns_3",
        "ns_5",
        "adjustment",
    )
    buffer = "momentum_buffer"

    def hyper(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """The group's options, the polynomial's coefficients by power, the adjustment a number."""
        powers = dict(zip(("ns_1", "ns_3", "ns_5"), group["ns_coefficients"], strict=True))
        adjustment = ADJUSTMENTS.get(group["adjust_lr_fn"], 2.0)
        return super().hyper(flat(group, **powers, adjustment=adjustment))

    def transition(
        self, hyper: Hyper, state: State, W: Tensor, b: Tensor, gradient: Tensor
    ) -> tuple[Step, State]:
        """The step; nothing but the momentum is remembered."""
        mu = hyper["momentum"]
        u = mu * b + (1 - mu) * gradient
        if hyper["nesterov"]:
            u = mu * u + (1 - mu) * gradient
        far = orthogonalizer(hyper, u) * (hyper["lr"] * _adjusted(hyper, *W.shape))
        on_b, on_d = (far * mu, far * (1 - mu)) if hyper["nesterov"] else (far, 0.0)
        descent = Descent.of({**hyper, "decoupled_weight_decay": 1.0})
        return descent.transition(on_b, on_d, keep=mu, take=1 - mu), state


def orthogonalizer(hyper: Hyper, u: Tensor) -> Sided:
    """`A` of `O = A u` (or `u A`): what the rounds of Newton–Schulz multiply `u` by.

    >>> hyper = {"eps": 1e-7, "ns_steps": 20.0, "ns_1": 1.5, "ns_3": -0.5, "ns_5": 0.0}
    >>> orthogonalizer(hyper, torch.diag(torch.tensor([1.0, 4.0]))).matrix
    tensor([[1.0000, 0.0000],
            [0.0000, 0.2500]])
    """
    left = u.shape[0] <= u.shape[1]
    x = u if left else u.T
    size = float(x.norm().clamp(min=hyper["eps"]))
    one = torch.eye(len(x)).to(x)
    A, x = one / size, x / size
    for _ in range(int(hyper["ns_steps"])):
        gram = x @ x.T
        round_ = hyper["ns_1"] * one + hyper["ns_3"] * gram + hyper["ns_5"] * gram @ gram
        A, x = round_ @ A, round_ @ x
    return Sided(A if left else A.T, left)


def _adjusted(hyper: Hyper, rows: int, columns: int) -> float:
    if hyper["adjustment"] == ADJUSTMENTS["original"]:
        return math.sqrt(max(1.0, rows / columns))
    if hyper["adjustment"] == ADJUSTMENTS["match_rms_adamw"]:
        return 0.2 * math.sqrt(max(rows, columns))
    return 1.0
