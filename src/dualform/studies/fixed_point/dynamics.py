"""X ← C(X + ∇G_X(X)): tokens attend to each other, move, and are the measure of the next step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dualform.families import Empirical, LogNormalizer
from dualform.families.fixed_points import Decay, Normalize, Project

Contract = Callable[[Tensor], Tensor]
CONTRACTIONS = ("decay", "sphere", "layer norm", "standardize")
FAR = 1e6
STILL = 1e-5


def standardize(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """Every coordinate brought back to mean 0 and variance 1, over the tokens."""
    if weights is None:
        weights = torch.full_like(x[:, 0], 1 / len(x))
    w = (weights / weights.sum()).unsqueeze(-1)
    centered = x - (w * x).sum(0)
    return centered / (w * centered.square()).sum(0).sqrt().clamp(min=1e-30)


def contraction(name: str, width: int, temperature: float) -> Contract:
    """A contraction by name; the decay is the one under which N(0, I) is a fixed point."""
    chosen: dict[str, Contract] = {
        "decay": Decay(temperature / (1 + temperature)),
        "sphere": Project(width**0.5),
        "layer norm": Normalize(),
        "standardize": standardize,
    }
    return chosen[name]


@torch.no_grad()
def iterate(
    x: Tensor, contract: Contract, temperature: float, steps: int
) -> Iterator[tuple[Tensor, float]]:
    """Tokens and how far they moved on average, step by step, until still, far away or done."""
    yield x, float("nan")
    for _ in range(steps):
        moved = contract(x + LogNormalizer(Empirical(x), temperature).mean(x))
        distance = float((moved - x).square().sum(-1).mean().sqrt())
        x = moved
        yield x, distance
        if distance < STILL or not float(x.abs().max()) < FAR:
            return


@torch.no_grad()
def transport(
    x: Tensor, weights: Tensor, temperature: float, steps: int, gain: float = 1.0
) -> Iterator[Tensor]:
    """The same without sampling: a density's quadrature nodes (n, 1) move, and keep their mass.

    `gain` times the mean is added: with −1 tokens move away from what they attend to.
    """
    yield x
    for _ in range(steps):
        G = LogNormalizer(Empirical(x, weights), temperature)
        x = standardize(x + gain * G.mean(x), weights)
        yield x
