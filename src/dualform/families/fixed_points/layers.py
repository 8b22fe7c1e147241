"""Layers whose output is a fixed point, trained as deep equilibrium models are."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualform.errors import FamilyError
from dualform.families.checks import require_temperature
from dualform.families.fixed_points.implicit import implicit
from dualform.families.measures import Empirical
from dualform.families.normalizer import LogNormalizer


class Equilibrium(nn.Module):
    """z = cell(z, x), solved, with implicit gradients: a network of any depth in the memory of one.

    (Bai, Kolter and Koltun, *Deep Equilibrium Models*, NeurIPS 2019.)

    >>> class Cell(nn.Linear):
    ...     def forward(self, z, x):
    ...         return torch.tanh(0.3 * super().forward(z) + x)
    >>> layer = Equilibrium(Cell(3, 3))
    >>> layer(torch.randn(5, 3)).shape, len(list(layer.parameters()))
    (torch.Size([5, 3]), 2)
    """

    def __init__(
        self,
        cell: Callable[[Tensor, Tensor], Tensor],
        *,
        symmetric: bool = False,
        method: str = "anderson",
        tolerance: float = 1e-6,
        steps: int = 500,
        dims: int = 1,
    ) -> None:
        super().__init__()
        self.cell = cell
        self.symmetric, self.method, self.dims = symmetric, method, dims
        self.tolerance, self.steps = tolerance, steps

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """The z at which the cell rests, from z = 0."""
        return implicit(
            lambda z: self.cell(z, x),
            torch.zeros_like(x),
            symmetric=self.symmetric,
            method=self.method,
            tolerance=self.tolerance,
            steps=self.steps,
            dims=self.dims,
        )


class EquilibriumAttention(nn.Module):
    """z = x + λ ∇G(z): attention of a layer's output to learned patterns, at its fixed point.

    Its Jacobian λ ∇²G is symmetric, and smaller than 1 wherever λ r² < T for patterns within r of
    their center: then there is one fixed point, and every start finds it.

    >>> layer = EquilibriumAttention(width=4, patterns=8, decay=0.5)
    >>> layer(torch.randn(6, 4)).shape
    torch.Size([6, 4])
    """

    def __init__(
        self, width: int, patterns: int, *, decay: float = 0.5, temperature: float = 1.0
    ) -> None:
        super().__init__()
        require_temperature(temperature)
        if not 0 < decay < 1:
            raise FamilyError(f"decay={decay} does not contract; it must lie between 0 and 1.")
        self.decay, self.temperature = decay, temperature
        self.patterns = nn.Parameter(torch.randn(patterns, width) / width**0.5)
        self.equilibrium = Equilibrium(self._cell, symmetric=True)

    @property
    def G(self) -> LogNormalizer:
        """The log-normalizer of the patterns."""
        return LogNormalizer(Empirical(self.patterns), self.temperature)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """z = x + λ ∇G(z)."""
        output: Tensor = self.equilibrium(x)
        return output

    def bound(self) -> float:
        """λ r²/T: below 1 it is certain that the step contracts everywhere."""
        center = self.patterns.detach().mean(0)
        radius = (self.patterns.detach() - center).norm(dim=-1).max()
        return float(self.decay * radius**2 / self.temperature)

    def _cell(self, z: Tensor, x: Tensor) -> Tensor:
        return x + self.decay * self.G.mean(z)
