"""(I − Jᵀ)⁻¹ g at a fixed point: what a gradient becomes through infinitely many steps."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.errors import FamilyError
from dualform.families.fixed_points.solve import Step, solve

SOLVED = 1e-3
"""The share of a gradient that may be left over: far more than rounding leaves."""


@dataclass(frozen=True, eq=False)
class Linearized:
    """A step near its fixed point x, where it is f(x) + J (· − x), and how to solve with I − J.

    >>> halves = Linearized(lambda x: x / 2, torch.zeros(1, 2))
    >>> halves.solved(torch.ones(1, 2))[0]  # 1 / (1 − ½)
    tensor([[2.0000, 2.0000]])
    """

    step: Step
    x: Tensor
    symmetric: bool = False
    tolerance: float = 1e-6
    steps: int = 500
    dims: int = 1

    @torch.no_grad()
    def solved(self, g: Tensor, transposed: bool = True) -> tuple[Tensor, Tensor]:
        """u = g + Jᵀu and Jᵀu, or both with J; by conjugate gradients where J is symmetric."""
        product = self._jacobian(transposed or self.symmetric)
        close = max(self.tolerance, 8 * torch.finfo(g.dtype).eps)
        scale = close * float(g.norm()) / max(1.0, g.numel() ** 0.5)
        if self.symmetric:
            u = conjugate_gradients(
                lambda u: u - product(u), g, tolerance=scale, steps=self.steps, dims=self.dims
            )
        else:
            u = solve(
                lambda u: g + product(u), g, tolerance=scale, steps=self.steps, dims=self.dims
            ).x
        moved = product(u)
        _require_solved(float((g + moved - u).norm() / g.norm().clamp(min=1e-30)))
        return u, moved

    def _jacobian(self, transposed: bool) -> Callable[[Tensor], Tensor]:
        """u ↦ Jᵀu by one backward pass, or u ↦ Ju by the backward pass of that."""
        with torch.enable_grad():
            x = self.x.detach().requires_grad_()
            y = self.step(x)
            if not y.requires_grad:
                return torch.zeros_like
            if transposed:
                return lambda u: _gradient(y, x, u)
            dual = torch.zeros_like(y, requires_grad=True)
            (pulled,) = torch.autograd.grad(y, x, dual, create_graph=True, allow_unused=True)
        if pulled is None or not pulled.requires_grad:
            return torch.zeros_like
        return lambda u: _gradient(pulled, dual, u)


def _gradient(y: Tensor, x: Tensor, u: Tensor) -> Tensor:
    """uᵀ ∂y/∂x; 0 where y does not depend on x."""
    (pulled,) = torch.autograd.grad(y, x, u, retain_graph=True, allow_unused=True)
    return torch.zeros_like(x) if pulled is None else pulled


def _require_solved(residual: float) -> None:
    if not residual <= SOLVED:
        raise FamilyError(
            f"the gradient of a fixed point was not reached: a share of {residual:.1g} of it is "
            "left. The step does not contract there, or its Jacobian is not symmetric though "
            "symmetric=True says so; contract more, allow more steps, or give symmetric=False."
        )


@torch.no_grad()
def conjugate_gradients(
    A: Callable[[Tensor], Tensor], b: Tensor, *, tolerance: float, steps: int, dims: int = 1
) -> Tensor:
    """A⁻¹ b, for symmetric positive A that acts on each state (the last `dims` dimensions) alone.

    >>> A = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    >>> conjugate_gradients(lambda u: u @ A, torch.tensor([[3.0, 4.0]]), tolerance=1e-6, steps=9)
    tensor([[1.0000, 1.0000]])
    """
    inner = tuple(range(-dims, 0))
    x, r = torch.zeros_like(b), b
    p, size = r, r.square().sum(inner, keepdim=True)
    for _ in range(steps):
        if float(size.max()) <= tolerance**2:
            break
        Ap = A(p)
        curve = (p * Ap).sum(inner, keepdim=True)
        rate = torch.where(size > 0, size / torch.where(curve == 0, 1, curve), 0)
        x, r = x + rate * p, r - rate * Ap
        grown = r.square().sum(inner, keepdim=True)
        p = r + torch.where(size > 0, grown / torch.where(size == 0, 1, size), 0) * p
        size = grown
    return x
