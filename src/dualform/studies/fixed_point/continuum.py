"""Infinitely many tokens: Gaussians in closed form, densities on a line by transport."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualform.studies.fixed_point.dynamics import standardize, transport
from dualform.studies.fixed_point.normality import measure

Density = Callable[[Tensor], Tensor]
NODES, REACH = 1200, 11.0
TEMPERATURES = (1.0, 1.5, 2.0, 3.0, 4.0, 8.0)
AFFINE = ((0.0, 1.0), (0.5, 1.0), (0.0, 1.2), (0.5, 0.8))
"""Means and deviations that a step restores."""
SMALL = 1e-4


def variance_after(v: float, temperature: float, rate: float) -> float:
    """λ² (1 + v/T)² v: what a step with decay makes of a Gaussian's variance.

    N(0, v) stays Gaussian, and v = T(1/λ − 1) is a fixed point; but it repels.

    >>> variance_after(1.0, temperature=4.0, rate=0.8), variance_after(1.1, 4.0, 0.8) > 1.1
    (1.0, True)
    """
    return (rate * (1 + v / temperature)) ** 2 * v


def cumulant_growth(
    order: int, temperature: float, gain: float = 1.0, deviation: float = 1.0
) -> float:
    """1 + a k/(τ^{k−2}(a + τ)), τ = T/s²: what a step multiplies a small k-th cumulant by.

    The step is x + a ∇G, and then the mean m and the deviation s are restored. Measured in s from
    m, a token z is read at the tilt (m + sz)s/T. With cumulant generating function u²/2 + κ u^k/k!
    it moves by a(u + κ u^{k−1}/(k−1)!) at u = sm/T + z/τ. Of the last term, the part that is no
    affine map and no lower cumulant is a Hermite polynomial, and adds a κ k/τ^{k−1} to what the
    scale 1 + a/τ makes of κ. So m does not matter, and s only makes another temperature of T.

    With values x the gain a is 1 and all factors exceed 1: a Gaussian repels in every direction, at
    every temperature. With values −x, where a = −1, they lie between −1 and 1 for every k ≥ 3 where
    τ > (1 + √7)/2: there a Gaussian attracts, high orders ever more slowly.

    >>> cumulant_growth(3, 1.0), cumulant_growth(4, 1.0), cumulant_growth(2, 4.0)
    (2.5, 3.0, 1.4)
    >>> cumulant_growth(3, 3.0, gain=-1.0), cumulant_growth(3, 12.0, gain=-1.0, deviation=2.0)
    (0.5, 0.5)
    """
    own = temperature / deviation**2
    return 1 + gain * order / (own ** (order - 2) * (gain + own))


ATTRACTS_FROM = (1 + math.sqrt(7)) / 2
"""Where the factor of order 3 reaches −1 for values −x; all other orders are inside by then."""


@dataclass(frozen=True)
class Growth:
    """One cumulant's factor, predicted and measured."""

    order: int
    temperature: float
    gain: float
    mean: float
    deviation: float
    predicted: float
    measured: float


@dataclass(frozen=True)
class Path:
    """A density's moments and energy distance, step by step, and where its mass ended."""

    start: str
    gain: float
    temperature: float
    skewness: tuple[float, ...]
    kurtosis: tuple[float, ...]
    energy: tuple[float, ...]
    points: tuple[float, ...]
    mass: tuple[float, ...]


def normal(x: Tensor, mean: float = 0.0, deviation: float = 1.0) -> Tensor:
    """The normal density."""
    z = (x - mean) / deviation
    return torch.exp(-z.square() / 2) / (deviation * math.sqrt(2 * math.pi))


DENSITIES: dict[str, Density] = {
    "gaussian": normal,
    "uniform": lambda x: (x.abs() <= math.sqrt(3)).double(),
    "two bumps": lambda x: normal(x, -0.8, 0.6) + normal(x, 0.8, 0.6),
    "skewed": lambda x: 0.75 * normal(x) + 0.25 * normal(x, 3.5, 2.0),
    "mixed scales": lambda x: normal(x, 0, 0.8) + normal(x, 0, 1.2),
}


def nodes(density: Density, reach: float = REACH) -> tuple[Tensor, Tensor]:
    """Quadrature nodes (n, 1) and their masses, standardized."""
    t, w = np.polynomial.legendre.leggauss(NODES)
    x = reach * torch.from_numpy(t)
    mass = torch.from_numpy(w) * density(x)
    x, mass = x[mass > 0].unsqueeze(-1), mass[mass > 0]
    return standardize(x, mass), mass / mass.sum()


HERMITE: dict[int, Density] = {
    3: lambda x: (x**3 - 3 * x) / 6,
    4: lambda x: (x**4 - 6 * x**2 + 3) / 24,
}


def growth(
    order: int, temperature: float, gain: float = 1.0, mean: float = 0.0, deviation: float = 1.0
) -> Growth:
    """One step from a Gaussian with a trace of skewness (order 3) or kurtosis (4)."""
    x, mass = nodes(lambda x: normal(x) * (1 + SMALL * HERMITE[order](x)).clamp(min=0))
    clouds = transport(x, mass, temperature, 1, gain, mean, deviation)
    normal_moment = {3: 0, 4: 3}[order]
    before, after = (float(mass @ y[:, 0] ** order) - normal_moment for y in clouds)
    predicted = cumulant_growth(order, temperature, gain, deviation)
    return Growth(order, temperature, gain, mean, deviation, predicted, after / before)


def follow(start: str, temperature: float, steps: int, gain: float = 1.0) -> Path:
    """The iteration from a density on the line."""
    reach = math.sqrt(3) if start == "uniform" else REACH
    x, mass = nodes(DENSITIES[start], reach)
    found, last = [], x
    for last in transport(x, mass, temperature, steps, gain):
        found.append(measure(last, mass))
    return Path(
        start,
        gain,
        temperature,
        tuple(m.skewness for m in found),
        tuple(m.kurtosis for m in found),
        tuple(m.energy for m in found),
        tuple(last.flatten().tolist()),
        tuple(mass.tolist()),
    )
