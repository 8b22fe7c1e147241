"""Trains one parameter with a real optimizer on given gradients, and replays it by its rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.optimizers.operators import apply
from dualform.optimizers.rule import Rule, State, StateRule
from dualform.optimizers.steps import walk_back

Make = Callable[[Sequence[Tensor]], Optimizer]


@dataclass
class Training:
    """What a real optimizer did, in float64: before each step, and at the end."""

    W: list[Tensor] = field(default_factory=list)
    memory: list[State] = field(default_factory=list)
    hyper: list[dict[str, float]] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    """After how many steps the rule wants the memory to be kept."""


def gradients(kind: str, steps: int, shape: tuple[int, ...]) -> Tensor:
    """Random gradients: "plain", with "gaps" (zeros, some throughout), or of "any size"."""
    found = torch.randn(steps, *shape, dtype=torch.float64)
    if kind == "gaps":
        found = found * (torch.rand_like(found) < 0.5)
        found[:, 0] = 0
    if kind == "any size":
        found = found * 10 ** (torch.rand_like(found) * 14 - 10)
    return found


def train(
    rule: Rule, make: Make, given: Tensor, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> Training:
    """The optimizer's own steps on these gradients; learning rate and decay change as they go."""
    weight = torch.randn(given.shape[1:], dtype=torch.float64).to(device, dtype)
    optimizer = make([weight])
    group, training = optimizer.param_groups[0], Training()
    base = {name: float(group[name]) for name in ("lr", "weight_decay") if name in group}
    for t, gradient in enumerate(given.to(device, dtype)):
        for name, value in base.items():
            change(group, name, value * (1 + 0.5 * math.sin(t)))
        weight.grad = gradient.clone()
        note(training, rule, optimizer, weight)
        training.hyper.append(dict(zip(rule.fields, rule.hyper(group), strict=True)))
        training.gradients.append(gradient.cpu().double())
        optimizer.step()
        if isinstance(rule, StateRule) and rule.keeps(optimizer, joined=t == 0):
            training.kept.add(t + 1)
    note(training, rule, optimizer, weight)
    return training


def change(group: dict[str, Any], name: str, value: float) -> None:
    """As a scheduler does it."""
    if isinstance(group[name], Tensor):
        group[name].fill_(value)
    else:
        group[name] = value


def note(training: Training, rule: Rule, optimizer: Optimizer, weight: Tensor) -> None:
    """Copies of the weight and of what the optimizer remembers."""
    memory = rule.memory(optimizer, weight)
    training.W.append(weight.detach().cpu().double().clone())
    training.memory.append({k: v.detach().cpu().double().clone() for k, v in memory.items()})


def errors(rule: StateRule, training: Training, start: int) -> tuple[float, float]:
    """How far the replay from step `start` is off: going forward, and summed going back."""
    W, state = training.W[start], dict(training.memory[start])
    b = state.pop(rule.buffer, torch.zeros_like(W))
    W_0, b_0, forward, transitions = W, b, 0.0, []
    for t in range(start, len(training.hyper)):
        if t in training.kept:
            state = {k: v for k, v in training.memory[t].items() if k != rule.buffer}
        given = training.hyper[t], state, W, b, training.gradients[t]
        step, state = rule.transition(*given)
        W, b = step.forward(W, b, training.gradients[t])
        transitions.append(step)
        forward = max(forward, off(W, training.W[t + 1]))
        replayed = {**state, rule.buffer: b}
        for name in training.memory[t + 1] if t + 1 not in training.kept else ():
            true = training.memory[t + 1][name]
            forward = max(forward, off(replayed[name], true))
    coefficients, (on_W, on_b) = walk_back(
        transitions, (0.0, 0.0), [*[0.0] * (len(transitions) - 1), 1.0]
    )
    parts = [apply(H, g) for H, g in zip(coefficients, training.gradients[start:], strict=True)]
    summed = apply(on_W, W_0) + apply(on_b, b_0) + sum(parts)
    return forward, off(summed, training.W[-1])


def off(found: Tensor, true: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((found - true).abs().max() / true.abs().max().clamp_min(1e-300))
