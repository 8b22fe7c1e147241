"""The Laplace transform of any density, by quadrature, where the dimension is low."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import FamilyError
from dualform.families.measures.empirical import Empirical

Density = Callable[[Tensor], Tensor]
MOST_NODES = 4_000_000
LOOSE = 1e-2
"""How much the mass may differ between the grid and one half as fine."""


class Laplace(Empirical):
    """G(η) = log ∫ exp(η·x) h(x) dx of a density of one's own, on a grid of Gauss and Legendre.

    `density` maps points (n, d) to numbers ≥ 0 (n,), which need not integrate to 1. `low` and
    `high` bound it, one number a dimension, and may be infinite. With a `statistic` u, x in the
    exponent becomes u(x). The nodes are the points of an `Empirical`, so there are also
    expectations of values, one row a node; draws are nodes.

    >>> gauss = Laplace(lambda x: torch.exp(-x[:, 0] ** 2 / 2), low=[-math.inf], high=[math.inf])
    >>> eta = torch.tensor([0.0, 2.0], dtype=torch.float64).unsqueeze(-1)
    >>> gauss.log_normalizer(eta).exp() / math.sqrt(2 * math.pi)  # exp(η²/2)
    tensor([1.0000, 7.3891], dtype=torch.float64)
    """

    def __init__(
        self,
        density: Density,
        low: Sequence[float],
        high: Sequence[float],
        nodes: int = 200,
        statistic: Density | None = None,
    ) -> None:
        _require_box(low, high, nodes)
        x, w = _grid(low, high, nodes)
        mass = _masses(density, x) * w
        rough_x, rough_w = _grid(low, high, nodes // 2)
        rough = _masses(density, rough_x) * rough_w
        _require_normal(float(mass.sum()), float(rough.sum()))
        u = (lambda x: x) if statistic is None else statistic
        super().__init__(u(x[mass > 0]), mass[mass > 0])
        self.rough = Empirical(u(rough_x[rough > 0]), rough[rough > 0])
        self.density = density if statistic is None else None

    def __repr__(self) -> str:
        return f"Laplace({len(self):,} nodes, width={self.width})"

    @property
    def continuous(self) -> bool:
        """Yes."""
        return True

    def error(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """How far G(η) is from that of a grid half as fine: as a rule, far more than its error.

        >>> box = Laplace(lambda x: torch.ones(len(x)), low=[0.0], high=[1.0], nodes=40)
        >>> bool(box.error(torch.ones(1, dtype=torch.float64)) < 1e-12)
        True
        """
        return (self.log_normalizer(eta) - self.rough.log_normalizer(eta)).abs()

    def log_base(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """log h(x), anywhere; not known of a statistic."""
        if self.density is None:
            raise FamilyError("the density of a statistic u(x) is not known; ask without one.")
        flat = self.density(x.reshape(-1, self.width))
        return flat.to(x.dtype).log().reshape(x.shape[:-1])


def _grid(low: Sequence[float], high: Sequence[float], nodes: int) -> tuple[Tensor, Tensor]:
    """Nodes (n, d) and weights (n,) of a product of Gauss–Legendre rules."""
    lines = [_line(a, b, nodes) for a, b in zip(low, high, strict=True)]
    x = torch.cartesian_prod(*(x for x, _ in lines)).reshape(-1, len(lines))
    w = torch.cartesian_prod(*(w for _, w in lines)).reshape(-1, len(lines))
    return x, w.prod(-1)


def _line(low: float, high: float, nodes: int) -> tuple[Tensor, Tensor]:
    """One rule; infinite ends are brought in by x = 4t/(1 − t²), or by 4(1 + t)/(1 − t)."""
    t, w = map(torch.from_numpy, np.polynomial.legendre.leggauss(nodes))
    if math.isfinite(low) and math.isfinite(high):
        return low + (high - low) * (1 + t) / 2, w * (high - low) / 2
    if math.isfinite(low):
        return low + 4 * (1 + t) / (1 - t), w * 8 / (1 - t) ** 2
    if math.isfinite(high):
        return high - 4 * (1 + t) / (1 - t), w * 8 / (1 - t) ** 2
    return 4 * t / (1 - t**2), w * 4 * (1 + t**2) / (1 - t**2) ** 2


def _masses(density: Density, x: Tensor) -> Tensor:
    h = density(x).double()
    if h.shape != x.shape[:1]:
        raise FamilyError(
            f"the density gave shape {tuple(h.shape)} for points of shape {tuple(x.shape)}; it "
            f"must give one number a point: shape {tuple(x.shape[:1])}."
        )
    if not bool((h >= 0).all()):
        raise FamilyError("the density is negative or NaN somewhere; densities are ≥ 0.")
    return h


def _require_box(low: Sequence[float], high: Sequence[float], nodes: int) -> None:
    if len(low) != len(high) or not low or any(a >= b for a, b in zip(low, high, strict=True)):
        raise FamilyError(
            f"low={list(low)} and high={list(high)} bound no box; give one low < high a dimension."
        )
    if nodes < 4 or nodes ** len(low) > MOST_NODES:
        raise FamilyError(
            f"nodes={nodes} in {len(low)} dimensions make {nodes ** len(low):,} points; 4 or more "
            f"a dimension, and {MOST_NODES:,} in all at most, are possible."
        )


def _require_normal(mass: float, rough: float) -> None:
    if not (math.isfinite(mass) and mass > 0) or abs(mass - rough) > LOOSE * mass:
        raise FamilyError(
            f"the density does not normalize on this grid: its mass is {mass:.6g}, and {rough:.6g} "
            "on one half as fine. Give one that is integrable, narrower bounds or more nodes."
        )
