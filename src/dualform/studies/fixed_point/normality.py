"""How far a cloud of points is from Gaussian, in numbers that are 0 for a Gaussian."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SUBSAMPLE, MANY = 1500, 60
NEGLIGIBLE = 1e-6


@dataclass(frozen=True)
class Normality:
    """The measurements of one cloud."""

    energy: float
    """The energy distance of the standardized coordinates to a normal, averaged over them."""
    skewness: float
    """The mean skewness of the coordinates, without sign."""
    kurtosis: float
    """The mean excess kurtosis of the coordinates: negative where tails are light."""
    spread: float
    """The participation ratio of the covariance's eigenvalues, over d: 1 round, 1/d a line."""
    radius: float
    """The variance of ‖x‖², measured in the cloud's own covariance, over a Gaussian's 2d: 1 for a
    Gaussian, 0 for a sphere. Coordinates hardly tell the two apart in many dimensions."""
    clusters: int
    """Balls of a hundredth of the cloud's size that cover a subsample; counted up to MANY."""
    scale: float
    """The root mean square of the coordinates."""


@torch.no_grad()
def measure(x: Tensor, weights: Tensor | None = None) -> Normality:
    """All measurements of a cloud (n, d), whose points may have weights.

    A cloud that is one point has no shape: its energy and kurtosis are NaN.

    >>> cloud = torch.randn(4000, 4, generator=torch.Generator().manual_seed(0))
    >>> found = measure(cloud)
    >>> found.energy < 1e-3, abs(found.kurtosis) < 0.2, found.spread > 0.95
    (True, True, True)
    >>> sphere = cloud / cloud.norm(dim=1, keepdim=True)
    >>> 0.8 < found.radius < 1.2, measure(sphere).radius < 0.05
    (True, True)
    """
    x = x.double()
    w = torch.full_like(x[:, 0], 1 / len(x)) if weights is None else weights / weights.sum()
    centered = x - w @ x
    covariance = centered.T @ (w.unsqueeze(-1) * centered)
    clusters = _clusters(x)
    shape = _standardized(centered, covariance.diagonal()) if clusters > 1 else None
    return Normality(
        energy=math.nan if shape is None else energy_distance(shape, w),
        skewness=math.nan if shape is None else float((w @ shape**3).abs().mean()),
        kurtosis=math.nan if shape is None else float((w @ shape**4 - 3).mean()),
        spread=float(covariance.trace() ** 2 / (len(covariance) * covariance.square().sum())),
        radius=math.nan if shape is None else _radius(centered, covariance, w),
        clusters=clusters,
        scale=float((w @ x.square()).mean().sqrt()),
    )


def energy_distance(x: Tensor, w: Tensor) -> float:
    """(2 E|x − y| − E|x − x'| − E|y − y'|) / E|y − y'| with y normal, averaged over coordinates.

    Exact: by sorting, and by the normal's closed form. (Székely and Rizzo 2013.)

    >>> nodes = torch.linspace(-8, 8, 4001, dtype=torch.float64).unsqueeze(-1)
    >>> w = torch.exp(-nodes[:, 0] ** 2 / 2)
    >>> abs(energy_distance(nodes, w / w.sum())) < 1e-5
    True
    """
    density = torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)
    to_normal = w @ (x * torch.erf(x / math.sqrt(2)) + 2 * density)
    ordered, order = x.sort(dim=0)
    mass = w[order]
    below = mass.cumsum(0) - mass / 2
    among = 2 * (mass * ordered * (2 * below - 1)).sum(0)
    normal = 2 / math.sqrt(math.pi)
    return float(((2 * to_normal - among - normal) / normal).mean())


@dataclass(frozen=True)
class Null:
    """Where samples that *are* Gaussian lie."""

    energy: float
    """95 % have a smaller energy distance."""
    low: float
    high: float
    """95 % have a radius between these."""


def null_range(count: int, width: int, seeds: int = 40) -> Null:
    """Of so many samples of that size."""
    found = []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(10_000 + seed)
        one = measure(torch.randn(count, width, generator=generator))
        found.append((one.energy, one.radius))
    energy, radius = torch.tensor(found).T
    low, high = radius.quantile(torch.tensor([0.025, 0.975])).tolist()
    return Null(float(energy.quantile(0.95)), low, high)


def _standardized(centered: Tensor, variance: Tensor) -> Tensor:
    extends = variance > NEGLIGIBLE * variance.max()
    return centered[:, extends] / variance[extends].sqrt()


def _radius(centered: Tensor, covariance: Tensor, w: Tensor) -> float:
    values, vectors = torch.linalg.eigh(covariance)
    extends = values > NEGLIGIBLE * values.max()
    white = centered @ vectors[:, extends] / values[extends].sqrt()
    lengths = white.square().sum(-1)
    width = white.shape[-1]
    return float(w @ (lengths - width).square() / (2 * width))


def _clusters(x: Tensor) -> int:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    left, count = x[order[:SUBSAMPLE].to(x.device)], 0
    size = left.square().sum(-1).mean().sqrt().clamp(min=1e-300)
    while len(left) and count < MANY:
        left = left[(left - left[0]).norm(dim=-1) > size / 100]
        count += 1
    return count
