"""Gradients of a fixed point without its history: g (I − J)⁻¹, by solving, not by unrolling."""

import torch
from torch import Tensor

from dualform.errors import FamilyError
from dualform.families.fixed_points.attached import attached
from dualform.families.fixed_points.linear import Linearized
from dualform.families.fixed_points.solve import Step, solve


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
    return attached(Linearized(step, found.x, symmetric, tolerance, steps, dims))
