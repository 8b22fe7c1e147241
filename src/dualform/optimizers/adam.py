"""Adam and AdamW as torch.optim does them, in every variant."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from dualform.optimizers.operators import Blend, Diagonal
from dualform.optimizers.options import clock, count, kept
from dualform.optimizers.rule import State, StateRule
from dualform.optimizers.steps import DescentStep, Hyper, Pair, Step
from dualform.optimizers.stretch import descended, running_means


def adam_fields(*own: str) -> tuple[str, ...]:
    """The options that every Adam has, around those of its own.

    >>> adam_fields("amsgrad")[5:8]
    ('decoupled_weight_decay', 'amsgrad', 'maximize')
    """
    numbers = ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled_weight_decay")
    return (*numbers, *own, "maximize", "capturable", "double")


def average_square(v: Tensor | None, d: Tensor, beta: float) -> Tensor:
    """`β v + (1 - β) d²`; v may be nothing yet.

    >>> average_square(torch.tensor([4.0]), torch.tensor([2.0]), 0.5)
    tensor([4.])
    """
    before = torch.zeros_like(d) if v is None else v * beta
    return before.addcmul_(d, d, value=1 - beta)


def inverse_root(v: Tensor, far: float, eps: float, unbiased: float = 1.0) -> Tensor:
    """`far / (√(v / unbiased) + ε)`.

    >>> inverse_root(torch.tensor([4.0]), 3.0, 1.0)
    tensor([1.])
    """
    scale = math.sqrt(unbiased)
    return v.sqrt().add_(eps * scale).reciprocal_().mul_(far * scale)


class AdamLike(StateRule):
    """An Adam: averages of a direction `d = ±g + λ W` and of its square, and a step along them.

    Decoupled, `d = ±g` and `W ← (1 - η λ) W`. At every step `b ← β1 b + (1 - β1) d` and
    `v ← β2 v + (1 - β2) d²`; how far the step goes along `b` and `d`, each Adam says in `along`.
    """

    elementwise = True
    fields = adam_fields()
    buffer = "exp_avg"
    state: ClassVar[tuple[str, ...]] = ("step", "exp_avg_sq")

    def hyper(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """The group's options; some optimizers do not have `maximize`."""
        return super().hyper({"maximize": False, **group})

    def transition(
        self, hyper: Hyper, state: State, W: Tensor, b: Tensor, gradient: Tensor
    ) -> tuple[Step, State]:
        """The step, and `v` after it."""
        descent, (step, counted) = DescentStep.of(hyper), count(state)
        beta1, beta2 = hyper["beta1"], hyper["beta2"]
        d = descent.direction(W, gradient)
        v = average_square(state.get("exp_avg_sq"), d, beta2)
        after = {**state, "step": counted, "exp_avg_sq": v}
        on_b, on_d = self.along(hyper, step, after)
        return descent.transition(on_b, on_d, keep=beta1, take=1 - beta1), after

    @abstractmethod
    def along(self, hyper: Hyper, step: float, state: State) -> Pair:
        """How far to go along `b` and `d`; `state` has the new `v`, and takes what else is new."""


class AdamRule(AdamLike):
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
    optimizer = "Adam"
    fields = adam_fields("amsgrad")
    state = (*AdamLike.state, "max_exp_avg_sq")
    decoupled: ClassVar[bool] = False
    """What weight decay is in versions of torch whose groups do not say."""

    def hyper(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """The group's options; `differentiable` counts as `capturable` does."""
        options = {"decoupled_weight_decay": self.decoupled, **group}
        tensors = options["capturable"] or options["differentiable"]
        return super().hyper({**options, "capturable": tensors and not options["fused"]})

    def divisor(self, hyper: Hyper, memory: State) -> Tensor | None:
        """`√(v / (1 - β2^t)) + ε`, of the largest `v` so far for amsgrad."""
        v = memory.get("max_exp_avg_sq" if hyper["amsgrad"] else "exp_avg_sq")
        if v is None:
            return None
        corrected: Tensor = v / (1 - hyper["beta2"] ** float(memory["step"]))
        return corrected.sqrt_().add_(hyper["eps"])

    def step_by(self, hyper: Hyper, taken: float, inverse: Diagonal) -> Step:
        """`W ← kept W - η / (1 - β1^t) P b` with P as it was kept."""
        beta1, descent = hyper["beta1"], DescentStep.of(hyper)
        far = hyper["lr"] / (1 - beta1 ** (taken + 1))
        on_b = inverse.numbers * far if descent.coupled else Blend({inverse: far})
        return descent.transition(on_b, 0.0, keep=beta1, take=1 - beta1)

    def stretch(
        self, hypers: Sequence[Hyper], state: State, gradients: Tensor
    ) -> tuple[Step, State] | None:
        """Steps without coupled decay: `v` depends on the gradients alone."""
        kinds = {id(h): DescentStep.of(h) for h in {id(h): h for h in hypers}.values()}
        signs = {descent.sign for descent in kinds.values()}
        coupled = any(descent.coupled for descent in kinds.values())
        if coupled or len(signs) > 1 or any(h["amsgrad"] for h in hypers):
            return None
        v = state.get("exp_avg_sq", torch.zeros_like(gradients[0]))
        squares = running_means(v, gradients.square(), tuple([h["beta2"] for h in hypers]))
        taken = float(state.get("step", 0.0)) + len(hypers)
        after = {**state, "step": kept(taken), "exp_avg_sq": squares[-1].clone()}
        clocks = [clock(taken - left, h) for left, h in enumerate(reversed(hypers))][::-1]
        firsts, seconds = (
            [float(1 - h[beta] ** t) for h, t in zip(hypers, clocks, strict=True)]
            for beta in ("beta1", "beta2")
        )
        scales = gradients.new_tensor(seconds).sqrt_()
        eps = (gradients.new_tensor([h["eps"] for h in hypers]) * scales)[:, None]
        inverse = (
            squares.sqrt_().reshape(len(squares), -1).add_(eps).reciprocal_().view(gradients.shape)
        )
        far = [h["lr"] / first for h, first in zip(hypers, firsts, strict=True)]
        rates, decays = [h["beta1"] for h in hypers], [kinds[id(h)].kept for h in hypers]
        sizes = gradients.new_tensor(far) * scales
        return descended(sizes, inverse, tuple(rates), decays, signs.pop()), after

    def along(self, hyper: Hyper, step: float, state: State) -> Pair:
        """`η / (1 - β1^t) P` along `b`."""
        v = state["exp_avg_sq"]
        if hyper["amsgrad"]:
            v = state["max_exp_avg_sq"] = torch.maximum(v, state.get("max_exp_avg_sq", v))
        t = clock(step, hyper)
        first, second = (float(1 - hyper[beta] ** t) for beta in ("beta1", "beta2"))
        return inverse_root(v, hyper["lr"] / first, hyper["eps"], second), 0.0


class AdamWRule(AdamRule):
    """Adam with decoupled weight decay: `W ← (1 - η λ) W - η / (1 - β1^t) P b`.

    >>> group = torch.optim.AdamW([torch.zeros(1)], weight_decay=0.1).param_groups[0]
    >>> dict(zip(AdamWRule.fields, AdamWRule().hyper(group)))["decoupled_weight_decay"]
    1.0
    """

    name = "adamw"
    optimizer = "AdamW"
    decoupled = True
