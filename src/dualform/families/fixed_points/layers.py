"""Layers whose output is a fixed point, trained as deep equilibrium models are."""

import warnings
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualform.errors import FamilyError
from dualform.families.checks import require_temperature
from dualform.families.fixed_points.implicit import implicit
from dualform.families.fixed_points.solve import solve
from dualform.families.measures import Empirical
from dualform.families.normalizer import LogNormalizer


class Equilibrium(nn.Module):
    """z = cell(z, x), solved, with implicit gradients: a network of any depth in the memory of one.

    (Bai, Kolter and Koltun, *Deep Equilibrium Models*, NeurIPS 2019.)

    A cell may stop to contract while it is trained. Then no fixed point is reached, and that is an
    error. With `fallback` steps it is a warning instead: the output is what the cell gives after
    that many further steps, with the gradient of those steps. `penalty` keeps a cell from it.

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
        fallback: int = 0,
    ) -> None:
        super().__init__()
        if fallback < 0:
            raise FamilyError(
                f"fallback={fallback} is no number of steps; give 1 or more, or 0 to raise where "
                "no fixed point is reached."
            )
        self.cell = cell
        self.symmetric, self.method, self.dims = symmetric, method, dims
        self.tolerance, self.steps, self.fallback = tolerance, steps, fallback

    def forward(
        self, x: Float[Tensor, "*batch d"], start: Float[Tensor, "*batch d"] | None = None
    ) -> Float[Tensor, "*batch d"]:
        """The z at which the cell rests, found from `start`, or from z = 0.

        A start near the solution, such as that of the last epoch, saves steps; where the cell
        contracts it changes nothing else.
        """

        def step(z: Tensor) -> Tensor:
            return self.cell(z, x)

        z = torch.zeros_like(x) if start is None else start.detach()
        if self.fallback:
            found = solve(
                step,
                z,
                method=self.method,
                tolerance=self.tolerance,
                steps=self.steps,
                dims=self.dims,
            )
            if not found.converged:
                return self._walked(step, found.x, repr(found))
            z = found.x
        return implicit(
            step,
            z,
            symmetric=self.symmetric,
            method=self.method,
            tolerance=self.tolerance,
            steps=self.steps,
            dims=self.dims,
        )

    def penalty(
        self,
        x: Float[Tensor, "*batch d"],
        z: Float[Tensor, "*batch d"],
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, ""]:
        """An estimate of mean ‖J‖²_F, J = ∂cell/∂z at z = layer(x): added to a loss, J stays small.

        It is ‖Jᵀr‖² for one random vector r a state. (Bai, Koltun and Kolter, *Stabilizing
        Equilibrium Models by Jacobian Regularization*, ICML 2021.)

        >>> layer = Equilibrium(lambda z, x: z / 2 + x)
        >>> x = torch.ones(1, 2)
        >>> layer.penalty(x, layer(x))  # (½)² + (½)², as r = ±1
        tensor(0.5000)
        """
        keeps = torch.is_grad_enabled()
        with torch.enable_grad():
            here = z if z.requires_grad else z.detach().requires_grad_()
            y = self.cell(here, x)
        r = torch.rand(y.shape, generator=generator, dtype=y.dtype, device=y.device)
        signs = torch.where(r < 0.5, -torch.ones_like(y), torch.ones_like(y))
        (pulled,) = torch.autograd.grad(y, here, signs, create_graph=keeps)
        states = max(1, y.shape[: y.ndim - self.dims].numel())
        return pulled.square().sum() / states

    def _walked(self, step: Callable[[Tensor], Tensor], z: Tensor, found: str) -> Tensor:
        warnings.warn(
            f"no fixed point was reached: {found}. The output is {self.fallback} further steps "
            "from there, with the gradient of those alone; contract more, add `penalty` to the "
            "loss, or allow more steps.",
            stacklevel=3,
        )
        for _ in range(self.fallback):
            z = step(z)
        return z


class EquilibriumAttention(nn.Module):
    """z = x + λ ∇G(z): attention of a layer's output to learned patterns, at its fixed point.

    Its Jacobian λ ∇²G is symmetric, and at most λ r²/T for patterns within r of their center. Below
    1 there is one fixed point, and every start finds it. Patterns grow as they are trained, so the
    temperature that the layer works at is never below λ r²/`contraction`: ‖J‖ ≤ `contraction`, by
    construction. With `contraction=None` it is `temperature`, and nothing is certain.

    >>> layer = EquilibriumAttention(width=4, patterns=8, decay=0.5)
    >>> layer(torch.randn(6, 4)).shape
    torch.Size([6, 4])
    >>> _ = layer.patterns.data.mul_(100)
    >>> round(layer.bound(), 3)
    0.9
    """

    def __init__(
        self,
        width: int,
        patterns: int,
        *,
        decay: float = 0.5,
        temperature: float = 1.0,
        contraction: float | None = 0.9,
        fallback: int = 0,
    ) -> None:
        super().__init__()
        require_temperature(temperature)
        if not 0 < decay < 1:
            raise FamilyError(f"decay={decay} does not contract; it must lie between 0 and 1.")
        if contraction is not None and not 0 < contraction < 1:
            raise FamilyError(
                f"contraction={contraction} bounds no contraction; it must lie between 0 and 1, or "
                "be None for none."
            )
        self.decay, self.temperature, self.contraction = decay, temperature, contraction
        self.patterns = nn.Parameter(torch.randn(patterns, width) / width**0.5)
        self.equilibrium = Equilibrium(self._cell, symmetric=True, fallback=fallback)

    @property
    def G(self) -> LogNormalizer:
        """The log-normalizer of the patterns, at the temperature that the layer works at."""
        return LogNormalizer(Empirical(self.patterns), self._temperature())

    def forward(
        self, x: Float[Tensor, "*batch d"], start: Float[Tensor, "*batch d"] | None = None
    ) -> Float[Tensor, "*batch d"]:
        """z = x + λ ∇G(z), found from `start`, or from z = 0."""
        output: Tensor = self.equilibrium(x, start)
        return output

    def penalty(
        self,
        x: Float[Tensor, "*batch d"],
        z: Float[Tensor, "*batch d"],
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, ""]:
        """An estimate of mean ‖J‖²_F at z = layer(x), to be added to a loss.

        >>> layer, x = EquilibriumAttention(width=4, patterns=8), torch.randn(6, 4)
        >>> bool(layer.penalty(x, layer(x)) < 4 * layer.bound() ** 2)
        True
        """
        return self.equilibrium.penalty(x, z, generator)

    def bound(self) -> float:
        """λ r²/T, at the temperature that the layer works at: below 1 it contracts everywhere."""
        with torch.no_grad():
            return float(self.decay * self._square_radius() / self._temperature())

    def _cell(self, z: Tensor, x: Tensor) -> Tensor:
        return x + self.decay * self.G.mean(z)

    def _temperature(self) -> float | Tensor:
        if self.contraction is None:
            return self.temperature
        least = self.decay * self._square_radius() / self.contraction
        # a number where it suffices: fused kernels take one
        return self.temperature if float(least.detach()) <= self.temperature else least

    def _square_radius(self) -> Tensor:
        """r²: no pattern lies farther than r from their center."""
        return (self.patterns - self.patterns.mean(0)).square().sum(-1).max()
