"""Gradients of a fixed point without its history: g (I − J)⁻¹, by solving, not by unrolling."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dualform.errors import FamilyError
from dualform.families.fixed_points.solve import Step, solve

SOLVED = 1e-3
"""The share of a gradient that may be left over: far more than rounding leaves."""


def implicit(
    step: Step,
    x: Tensor,
    *,
    symmetric: bool = False,
    method: str = "anderson",
    tolerance: float = 1e-6,
    steps: int = 500,
    dims: int = 1,
) -> Tensor:
    """x* = step(x*), found from x, and differentiable in whatever `step` is made of.

    The gradient g becomes u = g + Jᵀu: by conjugate gradients where J is `symmetric` (steps that
    descend an energy), otherwise by the solver that found x*. Memory does not grow with the steps.

    >>> w = torch.tensor(0.5, requires_grad=True)
    >>> root = implicit(lambda x: w * x + 1, torch.zeros(1, 1))  # 1 / (1 − w)
    >>> torch.autograd.grad(root.sum(), w)  # 1 / (1 − w)²
    (tensor(4.0000),)
    """
    found = solve(step, x, method=method, tolerance=tolerance, steps=steps, dims=dims)
    if not found.converged:
        raise FamilyError(
            f"no fixed point was reached: {found!r}. Contract more (a smaller decay, a larger "
            "temperature), allow more steps, or a larger tolerance."
        )
    if not torch.is_grad_enabled():
        return found.x
    return _Attached(step, found.x, symmetric, tolerance, steps, dims)()


class _Attached:
    """A fixed point with the graph of one step behind it, and a hook that solves for the rest."""

    def __init__(
        self, step: Step, x: Tensor, symmetric: bool, tolerance: float, steps: int, dims: int
    ) -> None:
        self.step, self.x, self.symmetric = step, x, symmetric
        self.tolerance, self.steps, self.dims = tolerance, steps, dims

    def __call__(self) -> Tensor:
        y = self.step(self.x)
        if y.requires_grad:
            y.register_hook(self._solved)  # type: ignore[no-untyped-call]
        return y

    def _solved(self, g: Tensor) -> Tensor:
        with torch.enable_grad():
            x = self.x.detach().requires_grad_()
            y = self.step(x)

        def pulled(u: Tensor) -> Tensor:
            return torch.autograd.grad(y, x, u, retain_graph=True)[0]

        close = max(self.tolerance, 8 * torch.finfo(g.dtype).eps)
        scale = close * float(g.norm()) / max(1.0, g.numel() ** 0.5)
        options: dict[str, Any] = {"tolerance": scale, "steps": self.steps, "dims": self.dims}
        if self.symmetric:
            u = conjugate_gradients(lambda u: u - pulled(u), g, **options)
        else:
            u = solve(lambda u: g + pulled(u), g, **options).x
        _require_solved(float((g + pulled(u) - u).norm() / g.norm().clamp(min=1e-30)))
        return u


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
