"""X ← C(X + a ∇G_X(X)): tokens attend to each other, move, and are the measure of the next step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dualform.families import Empirical, LogNormalizer
from dualform.families.fixed_points import Decay, Normalize, Project

Contract = Callable[[Tensor], Tensor]
ATTRACT, REPEL = 1.0, -1.0
"""The sign of the values: x or −x."""
CONTRACTIONS: dict[float, tuple[str, ...]] = {
    ATTRACT: (
        "decay",
        "sphere",
        "layer norm",
        "learned layer norm",
        "standardize",
        "mean and covariance",
    ),
    REPEL: ("sphere", "layer norm", "learned layer norm", "standardize", "mean and covariance"),
}
"""What each sign is tried with; under −x a Gaussian shrinks, and a decay would not hold it."""
FAR = 1e6
STILL = 1e-5


def standardize(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """Every coordinate brought back to mean 0 and variance 1, over the tokens."""
    if weights is None:
        weights = torch.full_like(x[:, 0], 1 / len(x))
    w = (weights / weights.sum()).unsqueeze(-1)
    centered = x - (w * x).sum(0)
    return centered / (w * centered.square()).sum(0).sqrt().clamp(min=1e-30)


def whiten(x: Tensor) -> Tensor:
    """Mean 0 and covariance I, over the tokens: turned as little as can be.

    >>> x = whiten(torch.randn(50, 3, generator=torch.Generator().manual_seed(0)).double())
    >>> torch.allclose(x.T @ x / 50, torch.eye(3).double())
    True
    """
    centered = x - x.mean(0)
    values, vectors = torch.linalg.eigh(centered.T @ centered / len(x))
    found: Tensor = centered @ (vectors / values.clamp(min=1e-30).sqrt()) @ vectors.T
    return found


def learned_norm(width: int) -> Contract:
    """Layer normalization with a scale and a shift that a training might have left.

    They are drawn once, near 1 and 0: the question is whether any such numbers change the end.
    """
    generator = torch.Generator().manual_seed(0)
    scale = 1 + 0.3 * torch.randn(width, generator=generator)
    shift = 0.3 * torch.randn(width, generator=generator)
    normalize = Normalize()
    return lambda y: shift.to(y) + scale.to(y) * normalize(y)


def learned_moments(width: int) -> Contract:
    """Tokens brought to a mean and a covariance that a training might have left.

    Both are drawn once. The covariance has the eigenvalues 0.5 to 1.5, in directions of its own.
    """
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q
    root = (turn * torch.linspace(0.5, 1.5, width).sqrt()) @ turn.T
    mean = 0.3 * torch.randn(width, generator=generator)
    return lambda y: mean.to(y) + whiten(y) @ root.to(y)


def contraction(name: str, width: int, temperature: float) -> Contract:
    """A contraction by name; the decay is the one under which N(0, I) is a fixed point."""
    chosen: dict[str, Callable[[], Contract]] = {
        "decay": lambda: Decay(temperature / (1 + temperature)),
        "sphere": lambda: Project(width**0.5),
        "layer norm": Normalize,
        "learned layer norm": lambda: learned_norm(width),
        "standardize": lambda: standardize,
        "mean and covariance": lambda: learned_moments(width),
    }
    return chosen[name]()


@torch.no_grad()
def iterate(
    x: Tensor, contract: Contract, temperature: float, steps: int, gain: float = ATTRACT
) -> Iterator[tuple[Tensor, float]]:
    """Tokens and how far they moved on average, step by step, until still, far away or done."""
    yield x, float("nan")
    for _ in range(steps):
        moved = contract(x + gain * LogNormalizer(Empirical(x), temperature).mean(x))
        distance = float((moved - x).square().sum(-1).mean().sqrt())
        x = moved
        yield x, distance
        if distance < STILL or not float(x.abs().max()) < FAR:
            return


@torch.no_grad()
def transport(
    x: Tensor,
    weights: Tensor,
    temperature: float,
    steps: int,
    gain: float = ATTRACT,
    mean: float = 0.0,
    deviation: float = 1.0,
) -> Iterator[Tensor]:
    """The same without sampling: a density's quadrature nodes (n, 1) move, and keep their mass.

    `gain` times the mean is added: with −1 tokens move away from what they attend to. After each
    step the mass has this mean and deviation again; x is given, and comes, standardized.
    """
    yield x
    for _ in range(steps):
        placed = mean + deviation * x
        G = LogNormalizer(Empirical(placed, weights), temperature)
        x = standardize(placed + gain * G.mean(placed), weights)
        yield x
