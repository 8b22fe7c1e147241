"""Muon, momentum made orthogonal, as torch.optim does it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dualform.optimizers.operators import Sided, apply
from dualform.optimizers.rule import State, StateRule
from dualform.optimizers.steps import DescentStep, Hyper, Step

ADJUSTMENTS = {None: 0.0, "original": 0.0, "match_rms_adamw": 1.0}
"""What `adjust_lr_fn` is called, as a number; any other adjusts nothing."""
SPAN = 1e-3
"""How long directions of `u` must be, relative to the longest, to have their rounding corrected."""


class MuonRule(StateRule):
    """Momentum μ, Nesterov, Newton–Schulz of any kind, decoupled weight decay λ, both adjustments.

    `b ← μ b + (1 - μ) g`, `u = b` or with Nesterov `u = μ b + (1 - μ) g`, `W ← (1 - η λ) W - η' O`.
    Each round of Newton–Schulz multiplies by a matrix made of what it multiplies, so `O = A u`
    with `A` found alongside (`u A` where that is smaller): values become `A e`, keys stay.

    torch computes in bfloat16, and its steps differ from the exact ones by 1 to 15 %. `A` is the
    matrix nearest to the exact one that gives torch's own step, as far as a matrix times `u` can;
    what bfloat16 adds outside the span of `u`, most where `u` lacks rank, is in the remainder.

    >>> rule, start, gradient = MuonRule(), torch.zeros(2, 3), torch.eye(2, 3)
    >>> hyper = dict(zip(rule.fields, (0.1, 0.0, 0.5, 0.0, 1e-7, 1.0, 1.5, -0.5, 0.0, 0.0)))
    >>> step, state = rule.transition(hyper, {}, start, start, gradient)
    >>> step.forward(start, start, gradient)[0]  # 1.5 x - 0.5 x³ at x = √½: 0.884, or in 16 bits
    tensor([[-0.0883,  0.0000,  0.0000],
            [ 0.0000, -0.0883,  0.0000]])
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
        return super().hyper({**group, **powers, "adjustment": adjustment})

    def transition(
        self, hyper: Hyper, state: State, W: Tensor, b: Tensor, gradient: Tensor
    ) -> tuple[Step, State]:
        """The step; nothing but the momentum is remembered."""
        mu = hyper["momentum"]
        u = mu * b + (1 - mu) * gradient
        if hyper["nesterov"]:
            u = mu * u + (1 - mu) * gradient
        far = rounded_orthogonalizer(hyper, u) * (hyper["lr"] * _adjusted(hyper, *W.shape))
        on_b, on_d = (far * mu, far * (1 - mu)) if hyper["nesterov"] else (far, 0.0)
        descent = DescentStep.of({**hyper, "decoupled_weight_decay": 1.0})
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


def rounded_orthogonalizer(hyper: Hyper, u: Tensor) -> Sided:
    """`A + (O - A u) u⁺`: the orthogonalizer whose step is `O`, what torch's rounds give.

    >>> hyper = {"eps": 1e-7, "ns_steps": 5.0, "ns_1": 3.4445, "ns_3": -4.775, "ns_5": 2.0315}
    >>> u = torch.diag(torch.tensor([1.0, 4.0]))
    >>> [found(hyper, u).matrix.diag() @ u for found in (orthogonalizer, rounded_orthogonalizer)]
    [tensor([0.7429, 0.7374]), tensor([0.7305, 0.7305])]
    """
    A = orthogonalizer(hyper, u)
    off, inverse = rounded_step(hyper, u) - apply(A, u), torch.linalg.pinv(u, rtol=SPAN)
    return Sided(A.matrix + (off @ inverse if A.left else inverse @ off), A.left)


def rounded_step(hyper: Hyper, u: Tensor) -> Tensor:
    """`O`: the rounds of Newton–Schulz as torch has them, in bfloat16 and in its order."""
    tall = u.shape[0] > u.shape[1]
    x = (u.T if tall else u).bfloat16()
    x = x / x.norm().clamp(min=hyper["eps"])
    for _ in range(int(hyper["ns_steps"])):
        gram = x @ x.T
        gram = torch.addmm(gram, gram, gram, beta=hyper["ns_3"], alpha=hyper["ns_5"])
        x = torch.addmm(x, gram, x, beta=hyper["ns_1"])
    return (x.T if tall else x).to(u)


def _adjusted(hyper: Hyper, rows: int, columns: int) -> float:
    if hyper["adjustment"] == ADJUSTMENTS["original"]:
        return math.sqrt(max(1.0, rows / columns))
    if hyper["adjustment"] == ADJUSTMENTS["match_rms_adamw"]:
        return 0.2 * math.sqrt(max(rows, columns))
    return 1.0
