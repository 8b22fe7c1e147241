"""SOAP, Adam in the eigenbasis of Shampoo's moments, as the package pytorch-optimizer does it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.optimizers.operators import Basis, Coefficient, Turned, along, apply
from dualform.optimizers.package import is_packaged, option, packed, second_moment, unpacked
from dualform.optimizers.rule import State, StateRule
from dualform.optimizers.steps import STILL, DescentStep, Hyper, Step


class SOAPRule(StateRule):
    """Betas, bias correction or none, normalized steps, decoupled weight decay λ, maximize.

    With `Qᵀ G = G ×₁ Q_1ᵀ ×₂ Q_2ᵀ …` (dimensions that are too large, and vectors unless asked for,
    have no `Q`): `b ← β1 b + (1 - β1) (±g)`, `V ← β2 V + (1 - β2) (Qᵀ g)²`, `P = 1 / (√V + ε)`,
    `W ← (1 - η λ) (W - η' Q (P ∘ Qᵀ b))`, `η' = η √(1 - β2^(t-1)) / (1 - β1^(t-1))` at the group's
    step t. The first step makes the basis and moves nothing. The momentum is not turned, and `V`
    is when the basis changes, only by the order of its elements.

    Bases are not replayed. Where moments have no full rank, as those of the longer side after the
    first step, rounding alone decides on a part of the basis. So at every step that changes it,
    what the optimizer remembers is kept: `precondition_frequency` says how often.

    A direction in which all gradients are zero but for rounding, as where the errors of a softmax
    add up, is divided by that rounding: with ε = 1e-8 full steps of it, found in the remainder.

    >>> rule, start, gradient = SOAPRule(), torch.zeros(2), torch.tensor([2.0, 0.0])
    >>> hyper = {"lr": 0.1, "beta1": 0.5, "beta2": 0.5, "eps": 0.0, "max_precondition_dim": 9.0}
    >>> hyper |= dict.fromkeys(("weight_decay", "normalize_gradient", "precondition_1d"), 0.0)
    >>> hyper |= {"correct_bias": 1.0, "step": 1.0}
    >>> state = {"maximize": torch.tensor(0.0), "exp_avg_sq": torch.ones(2)}
    >>> step, _ = rule.transition(hyper, state, start, start, gradient)
    >>> step.forward(start, start, gradient)[0]  # 0.1 · √0.5 / 0.5 · 1 / √2.5
    tensor([-0.0894,  0.0000])
    """

    name = "soap"
    optimizer = "SOAP"
    turns = True
    fields = (
        "lr",
        "beta1",
        "beta2",
        "eps",
        "weight_decay",
        "correct_bias",
        "normalize_gradient",
        "precondition_1d",
        "max_precondition_dim",
        "step",
    )
    buffer = "exp_avg"
    state = ("exp_avg_sq", "Q", "maximize")

    def describes(self, optimizer: Optimizer) -> bool:
        """Exactly the package's own class."""
        return is_packaged(optimizer, "SOAP")

    def group_refusal(self, group: Mapping[str, Any]) -> str:
        """Dimensions that are not as the parameter has them."""
        merged = "SOAP with merge_dims=True has bases for merged dimensions"
        return f"{merged}; by row is merge_dims=False" if group["merge_dims"] else ""

    def hyper(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """The group's options, and how many steps it has made."""
        return super().hyper({"step": 0, **group})

    def memory(self, optimizer: Optimizer, parameter: Tensor) -> State:
        """The averages, the basis end to end, and the optimizer's own option."""
        known = optimizer.state.get(parameter, {})
        found = {name: known[name] for name in ("exp_avg", "exp_avg_sq") if name in known}
        if any(len(Q) for Q in known.get("Q") or ()):
            found["Q"] = packed(known["Q"])
        return {**found, "maximize": option(optimizer, "maximize")}

    def keeps(self, optimizer: Optimizer, joined: bool) -> bool:
        """After the first step of a parameter, which makes its basis, and wherever one is due."""
        return joined or any(
            (group["step"] - 1) % optimizer.state[parameter]["precondition_frequency"] == 0
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter in optimizer.state  # which has the frequency it began with
        )

    def transition(
        self, hyper: Hyper, state: State, W: Tensor, b: Tensor, gradient: Tensor
    ) -> tuple[Step, State]:
        """The step, and `V` after it."""
        if not hyper["step"]:
            return STILL, state
        beta1, beta2 = hyper["beta1"], hyper["beta2"]
        decoupled = {"decoupled_weight_decay": 1.0, "maximize": float(state["maximize"])}
        descent = DescentStep.of({**hyper, **decoupled})
        d = descent.direction(W, gradient)
        Q, state = _basis(hyper, state, gradient)
        there = along([None if one is None else one.T for one in Q], d)
        V = torch.lerp(state.get("exp_avg_sq", torch.zeros_like(d)), there**2, 1 - beta2)
        D = 1 / (V.sqrt() + hyper["eps"])
        P: Coefficient = D if all(one is None for one in Q) else Turned.of(Q, D)
        far = _length(hyper) * descent.kept
        if hyper["normalize_gradient"]:
            step = apply(P, beta1 * b + (1 - beta1) * d)
            far /= float(step.square().mean().sqrt()) + hyper["eps"]
        made = descent.transition(along_b=P * far, keep=beta1, take=1 - beta1)
        return made, {**state, "exp_avg_sq": V}


def _length(hyper: Hyper) -> float:
    """How far to go along a step."""
    far, made = hyper["lr"], hyper["step"]
    if hyper["correct_bias"]:
        far *= math.sqrt(1 - hyper["beta2"] ** made) / (1 - hyper["beta1"] ** made)
    return far


def _basis(hyper: Hyper, state: State, gradient: Tensor) -> tuple[Basis, State]:
    """The basis of each dimension; of a parameter that joins late, that of its first gradient."""
    turned = [_has_basis(hyper, size, gradient.ndim) for size in gradient.shape]
    if not any(turned):
        return (None,) * gradient.ndim, state
    if "Q" not in state:
        moments = [second_moment(gradient, at) for at, own in enumerate(turned) if own]
        state = {**state, "Q": packed([torch.linalg.eigh(S)[1].flip(1) for S in moments])}
    sizes = [size for size, own in zip(gradient.shape, turned, strict=True) if own]
    found = iter(unpacked(state["Q"], sizes))
    return tuple(next(found) if own else None for own in turned), state


def _has_basis(hyper: Hyper, size: int, dimensions: int) -> bool:
    fits = size <= hyper["max_precondition_dim"]
    return fits and (dimensions > 1 or bool(hyper["precondition_1d"]))
