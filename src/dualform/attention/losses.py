"""Other losses than the ε-insensitive one: smooth ones, of one's own too.

    min ½ βᵀGβ + C Σ_j ℓ(r_j),   r = y − Gβ − b,

is at its optimum where β_j = C ℓ'(r_j) and Σβ = 0: the representer theorem, so the expansion, and
with it the attention layer, is the same for every loss. Newton's method finds the duals. As
ℓ*(ℓ'(r)) = r ℓ'(r) − ℓ(r), the dual objective at C ℓ'(r) tells how far they are from the optimum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dualform.attention.svr import GAP, Array, Duals
from dualform.errors import AttentionError

STEPS = 200
HALVINGS = 40


class Loss(ABC):
    """ℓ(r), convex and differentiable: what a residual costs.

    >>> from dualform.attention import Primal
    >>> @dataclass(frozen=True)
    ... class LogCosh(Loss):
    ...     formula = r"\\log\\cosh r"
    ...     def value(self, r):
    ...         return r.cosh().log()
    >>> Primal(loss=LogCosh()).solve(torch.randn(8, 3), torch.randn(8, 1)).gap < 1e-6
    True
    """

    formula: ClassVar[str]
    """ℓ(r) in LaTeX."""

    @abstractmethod
    def value(self, r: Tensor) -> Tensor:
        """ℓ of each residual; torch differentiates it twice."""


@dataclass(frozen=True)
class Squared(Loss):
    """ℓ(r) = r²/2: a ridge regression, whose duals are C times the residuals.

    >>> Squared().value(torch.tensor([3.0]))
    tensor([4.5000])
    """

    formula = r"\tfrac12 r^2"

    def value(self, r: Tensor) -> Tensor:
        """r²/2."""
        return r.square() / 2


@dataclass(frozen=True)
class Huber(Loss):
    """ℓ(r) = r²/2 up to δ, then δ|r| − δ²/2: no residual pulls harder than δ.

    >>> Huber(1.0).value(torch.tensor([0.5, 3.0]))
    tensor([0.1250, 2.5000])
    """

    delta: float = 1.0
    formula = r"\mathrm{Huber}_\delta(r)"

    def value(self, r: Tensor) -> Tensor:
        """r²/2 or δ|r| − δ²/2."""
        inside = r.abs() <= self.delta
        return torch.where(inside, r.square() / 2, self.delta * (r.abs() - self.delta / 2))


def solve_smooth(G: Array, y: Array, loss: Loss, C: float) -> Duals:
    """The regression of y on the features whose Gram matrix is G, with this loss.

    >>> import numpy as np
    >>> duals = solve_smooth(np.eye(2), np.array([1.0, -1.0]), Squared(), C=1.0)
    >>> bool(np.allclose(duals.beta, [0.5, -0.5])), duals.gap < 1e-9
    (True, True)
    """
    problem = _Smooth(torch.from_numpy(G), torch.from_numpy(y.copy()), loss, C)
    beta, b = problem.newton()
    found = problem.duals(beta, b)
    if not abs(found.gap) <= GAP:
        raise AttentionError(
            f"the regression of {len(y)} targets with {loss} was solved to a duality gap of "
            f"{found.gap:.1e} only, and {GAP:.0e} is asked for; the loss must be convex and "
            "differentiable, or choose a smaller C."
        )
    return found


@dataclass(frozen=True)
class _Smooth:
    G: Tensor
    y: Tensor
    loss: Loss
    C: float

    def newton(self) -> tuple[Tensor, Tensor]:
        """β and b where F = (β − C ℓ'(r), Σβ) is 0; steps are halved until ‖F‖ falls."""
        x = torch.zeros(len(self.y) + 1, dtype=torch.float64)
        x[-1] = self.y.mean()
        for _ in range(STEPS):
            F, slope = self._equations(x)
            size = F.norm()
            if size <= 1e-13 * (1 + x[:-1].norm()):
                break
            step = torch.linalg.lstsq(self._jacobian(slope), F[:, None], driver="gelsd").solution[
                :, 0
            ]
            for _ in range(HALVINGS):
                if self._equations(x - step)[0].norm() < size:
                    break
                step = step / 2
            x = x - step
        return x[:-1], x[-1]

    def duals(self, beta: Tensor, b: Tensor) -> Duals:
        """The duals C ℓ'(r), and both objectives."""
        r = self.y - self.G @ beta - b
        first, _ = self._slopes(r)
        dual = self.C * first
        costs = self.C * float(self.loss.value(r).sum())
        primal = float(beta @ self.G @ beta) / 2 + costs
        lower = float(self.y @ dual - dual @ self.G @ dual / 2 - r @ dual) + costs
        size = float(self.y.abs().max() * dual.abs().max())
        return Duals(dual.numpy(), float(b), primal, lower, size)

    def _equations(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self._slopes(self.y - self.G @ x[:-1] - x[-1])
        return torch.cat([x[:-1] - self.C * first, x[:-1].sum()[None]]), second

    def _jacobian(self, slope: Tensor) -> Tensor:
        n, weights = len(self.y), self.C * slope[:, None]
        J = torch.zeros(n + 1, n + 1, dtype=torch.float64)
        J[:n, :n] = torch.eye(n, dtype=torch.float64) + weights * self.G
        J[:n, n:], J[n, :n] = weights, 1
        return J

    def _slopes(self, r: Tensor) -> tuple[Tensor, Tensor]:
        """ℓ' and ℓ'' of each residual."""
        with torch.enable_grad():
            r = r.detach().requires_grad_()
            (first,) = torch.autograd.grad(self.loss.value(r).sum(), r, create_graph=True)
            if not first.requires_grad:
                return first.detach(), torch.zeros_like(r)
            second = torch.autograd.grad(first.sum(), r, allow_unused=True)[0]
        second = torch.zeros_like(r) if second is None else second
        if bool((second < -1e-9).any()):
            where = float(r[second.argmin()].detach())
            raise AttentionError(
                f"{self.loss} is not convex: its second derivative at r = {where:.3g} is "
                f"{float(second.min()):.3g}; a regression has one optimum for convex losses only."
            )
        return first.detach(), second
