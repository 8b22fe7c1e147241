"""Clusters that have formed: do they hold together, and do they stay apart?"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import jacrev

from dualform.families import Empirical, LogNormalizer
from dualform.families.fixed_points import Project
from dualform.studies.fixed_point.dynamics import standardize

NEUTRAL = 1e-9
GRID = 200


@dataclass(frozen=True)
class Escape:
    """Equal clusters at the corners of a simplex on a sphere, one step of attention linearized."""

    clusters: int
    temperature: float
    within: float
    """By which factor a token's distance to its own cluster changes in a step."""
    between: float
    """The largest factor of a small displacement of the clusters: 1 for turning all of them."""

    @property
    def is_stable(self) -> bool:
        """Whether nothing grows."""
        return max(self.within, self.between) <= 1 + NEUTRAL

    @property
    def lifetime(self) -> float:
        """Steps in which what grows fastest grows e times; infinite where nothing does."""
        fastest = max(self.within, self.between)
        return math.inf if self.is_stable else 1 / math.log(fastest)


def simplex(clusters: int, width: int) -> Tensor:
    """(clusters, width): points at equal distances on the sphere of radius √width, around 0.

    >>> points = simplex(3, 4)
    >>> torch.allclose(points.sum(0), torch.zeros(4).double(), atol=1e-12)
    True
    """
    corners = torch.eye(clusters, dtype=torch.float64)
    points = torch.zeros(clusters, width, dtype=torch.float64)
    if clusters == 1:
        points[0, 0] = 1.0
    else:
        around = corners - corners.mean(0)
        turned = torch.linalg.svd(around).Vh[:-1]  # the plane in which they lie
        points[:, : clusters - 1] = around @ turned.T
    points *= width**0.5 / points.norm(dim=-1, keepdim=True)
    return points


def escape(clusters: int, width: int, temperature: float) -> Escape:
    """Whether equal clusters on a sphere are stable.

    Two clusters at opposite poles bend to one side by 1 + exp(−2 width/T) a step:

    >>> two = escape(2, 4, 2.0)
    >>> two.is_stable, math.isclose(two.between, 1 + math.exp(-2 * 4 / 2.0), rel_tol=1e-9)
    (False, True)
    >>> escape(1, 4, 2.0).is_stable
    True
    """
    x = simplex(clusters, width)
    project = Project(width**0.5)

    def token(one: Tensor) -> Tensor:
        return project(one + LogNormalizer(Empirical(x), temperature).mean(one))

    def all_of_them(points: Tensor) -> Tensor:
        return project(points + LogNormalizer(Empirical(points), temperature).mean(points))

    within = jacrev(token)(x[:1])[0, :, 0]
    between = jacrev(all_of_them)(x).reshape(x.numel(), x.numel())
    return Escape(clusters, temperature, _largest(within), _largest(between))


def _largest(matrix: Tensor) -> float:
    return float(torch.linalg.eigvals(matrix).abs().max())


def line_factor(masses: Tensor, places: Tensor, temperature: float) -> float:
    """The largest factor of a small displacement, of a token or a cluster, on a standardized line.

    Two clusters of equal mass hold at every temperature, three of equal mass at none:

    >>> half, third = torch.full((2,), 0.5).double(), torch.full((3,), 1 / 3).double()
    >>> line_factor(half, torch.tensor([-1.0, 1.0]).double(), 4.0) < 1
    True
    >>> line_factor(third, torch.tensor([-1.0, 0.0, 1.0]).double(), 4.0) > 1
    True
    """
    x = standardize(places.unsqueeze(-1), masses)
    G = LogNormalizer(Empirical(x, masses), temperature)
    moved = x + G.mean(x)
    deviation = (masses @ (moved - masses @ moved).square()).sqrt()

    def all_of_them(points: Tensor) -> Tensor:
        own = LogNormalizer(Empirical(points, masses), temperature)
        return standardize(points + own.mean(points), masses)

    def token(one: Tensor) -> Tensor:
        found: Tensor = (one + G.mean(one)) / deviation
        return found

    within = max(float(jacrev(token)(one[None]).abs()) for one in x)
    between = jacrev(all_of_them)(x).reshape(len(x), len(x))
    return max(within, _largest(between))


@dataclass(frozen=True)
class StableMasses:
    """Of which masses clusters on a standardized line are stable, at a temperature."""

    temperature: float
    two: tuple[tuple[float, float], ...]
    """Ranges of the smaller cluster's mass."""
    three: tuple[tuple[float, float], ...]
    """Ranges of the mass of each outer cluster; both are equal, and the third lies between."""


def stable_masses(temperature: float) -> StableMasses:
    """Both ranges, on a grid of masses."""
    two = [at / GRID for at in range(1, GRID // 2 + 1)]
    places = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    pairs = [
        line_factor(torch.tensor([q, 1 - q], dtype=torch.float64), places, temperature) < 1
        for q in two
    ]
    wide = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    outer = [at / (2 * GRID) for at in range(1, GRID)]
    triples = [
        line_factor(torch.tensor([q, 1 - 2 * q, q], dtype=torch.float64), wide, temperature) < 1
        for q in outer
    ]
    return StableMasses(temperature, _ranges(two, pairs), _ranges(outer, triples))


def _ranges(values: list[float], holds: list[bool]) -> tuple[tuple[float, float], ...]:
    """The stretches of neighboring values for which something holds."""
    found: list[tuple[float, float]] = []
    for at, (value, good) in enumerate(zip(values, holds, strict=True)):
        if good and at and holds[at - 1]:
            found[-1] = (found[-1][0], value)
        elif good:
            found.append((value, value))
    return tuple(found)
