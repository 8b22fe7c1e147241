"""Shampoo, which divides by roots of second moments along each dimension, as the package
pytorch-optimizer does it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.optimizers.operators import Modewise
from dualform.optimizers.package import is_packaged, option, packed, second_moment, unpacked
from dualform.optimizers.rule import State, StateRule
from dualform.optimizers.steps import DescentStep, Hyper, Step

AGAIN = "divides again what earlier steps have divided"


class ShampooRule(StateRule):
    """Any interval of roots, decoupled weight decay λ (fixed or times η), maximize; no momentum.

    Along each of the k dimensions of the parameter, `G_i` the gradient unfolded along it:
    `S_i ← S_i + G_i G_iᵀ` (from ε I on), `A_i = S_i^(-1/2k)` at every n-th step, zero before the
    first, and `W ← (1 - η λ) W ∓ η g ×₁ A_1 ×₂ A_2 …`: values become `A_1 e`, keys `A_2 x`.

    With momentum, or with weight decay in the gradient, a step divides again what earlier steps
    have divided: sums of products of all later roots, which are no matrices along the dimensions.
    Such training is observed.

    Roots are as exact as small eigenvalues are next to the largest. In float32 that is little:
    with ε = 1e-6 the package's own steps may be off by a percent, found in the remainder.

    >>> rule, start, gradient = ShampooRule(), torch.zeros(1, 2), torch.tensor([[0.0, 4.0]])
    >>> hyper = dict(zip(rule.fields, (0.1, 0.0, 0.0, 0.0, 0.0)))
    >>> state = {"every": torch.tensor(1.0), "maximize": torch.tensor(0.0)}
    >>> state["pre_cond"] = packed([torch.zeros(1, 1), torch.diag(torch.tensor([1.0, 0.0]))])
    >>> step, _ = rule.transition(hyper, state, start, start, gradient)
    >>> step.forward(start, start, gradient)[0]  # 4 / (16^¼ 16^¼) = 1
    tensor([[ 0.0000, -0.1000]])
    """

    name = "shampoo"
    optimizer = "Shampoo"
    fields = ("lr", "weight_decay", "fixed_decay", "matrix_eps", "step")
    state = ("pre_cond", "inv_pre_cond", "every", "maximize")

    def describes(self, optimizer: Optimizer) -> bool:
        """Exactly the package's own class."""
        return is_packaged(optimizer, "Shampoo")

    def group_refusal(self, group: Mapping[str, Any]) -> str:
        """Options by which what was divided is divided again."""
        if group["momentum"]:
            return f"Shampoo with momentum={group['momentum']:g} {AGAIN}; by row is momentum=0"
        if group["weight_decay"] and not group["weight_decouple"]:
            return (
                f"Shampoo with weight_decay={group['weight_decay']:g} in the gradient {AGAIN}; by "
                "row is weight_decouple=True"
            )
        return ""

    def hyper(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """The group's options, and how many steps it has made."""
        return super().hyper({"step": 0, **group})

    def memory(self, optimizer: Optimizer, parameter: Tensor) -> State:
        """The moments and roots of all dimensions end to end, and the optimizer's own options."""
        known = optimizer.state.get(parameter, {})
        own = {
            "every": option(optimizer, "preconditioning_compute_steps"),
            "maximize": option(optimizer, "maximize"),
        }
        if "pre_cond_0" not in known:
            return own
        found = {
            name: packed([known[f"{name}_{at}"] for at in range(parameter.ndim)])
            for name in ("pre_cond", "inv_pre_cond")
        }
        return {**found, **own}

    def transition(
        self, hyper: Hyper, state: State, W: Tensor, b: Tensor, gradient: Tensor
    ) -> tuple[Step, State]:
        """The step, the moments and the roots after it."""
        per = 1.0 if hyper["fixed_decay"] else hyper["lr"]
        sign = -1.0 if state["maximize"] else 1.0
        descent = DescentStep(sign, 0.0, 1 - per * hyper["weight_decay"])
        if not W.ndim:
            return descent.transition(along_d=hyper["lr"]), state
        S = _moments(hyper, state, gradient)
        A = [torch.zeros_like(moment) for moment in S]
        if (hyper["step"] + 1) % float(state["every"]) == 0:
            A = [_root(moment, 2 * W.ndim) for moment in S]
        elif "inv_pre_cond" in state:
            A = unpacked(state["inv_pre_cond"], W.shape)
        after = {**state, "pre_cond": packed(S), "inv_pre_cond": packed(A)}
        return descent.transition(along_d=hyper["lr"] * Modewise(tuple(A))), after


def _moments(hyper: Hyper, state: State, gradient: Tensor) -> list[Tensor]:
    sizes = gradient.shape
    before = [hyper["matrix_eps"] * torch.eye(size).to(gradient) for size in sizes]
    if "pre_cond" in state:
        before = unpacked(state["pre_cond"], sizes)
    return [S + second_moment(gradient, at) for at, S in enumerate(before)]


def _root(moment: Tensor, order: int) -> Tensor:
    """`S^(-1/order)`, by the sizes of the eigenvalues."""
    sizes, Q = torch.linalg.eigh(moment)
    found: Tensor = (Q * sizes.abs() ** (-1 / order)) @ Q.T
    return found
