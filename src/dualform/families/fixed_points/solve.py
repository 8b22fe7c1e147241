"""x = f(x): plain iteration, and Anderson's, which remembers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.errors import FamilyError

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class FixedPoint:
    """Where the iteration ended, how it got there, and whether that is a fixed point.

    >>> solve(lambda x: x / 2, torch.ones(3, 2), method="plain", tolerance=1e-3)
    FixedPoint(converged, 11 steps, residual 6.9e-04)
    """

    x: Tensor
    residuals: tuple[float, ...]
    """max ‖f(x) − x‖ over the states, step by step."""
    converged: bool

    @property
    def steps(self) -> int:
        """How many times f was called."""
        return len(self.residuals)

    def __repr__(self) -> str:
        verdict = "converged" if self.converged else "not converged"
        return f"FixedPoint({verdict}, {self.steps} steps, residual {self.residuals[-1]:.1e})"


@torch.no_grad()
def solve(
    step: Step,
    x: Tensor,
    *,
    method: str = "anderson",
    tolerance: float = 1e-6,
    steps: int = 500,
    memory: int = 5,
    dims: int = 1,
) -> FixedPoint:
    """Iterates x ← step(x) until no state moves farther than the tolerance.

    A state is the last `dims` dimensions: 1 where rows do not see each other, 2 for tokens that do.
    "anderson" combines the last `memory` steps so that what is left of their residuals is least,
    and falls back to plain ones where that made it worse; "plain" takes each step as it is.

    >>> solve(torch.cos, torch.ones(1, 1), method="plain").steps
    35
    >>> solve(torch.cos, torch.ones(1, 1)).steps
    6
    """
    if method not in ("plain", "anderson"):
        raise FamilyError(f"method='{method}' is unknown; there are 'plain' and 'anderson'.")
    if steps < 1:
        raise FamilyError(f"steps={steps} leave nothing to be found; give 1 or more.")
    past = _Past(memory if method == "anderson" else 1)
    residuals: list[float] = []
    for _ in range(steps):
        y = step(x)
        flat_x, flat_y = _flat(x, dims), _flat(y, dims)
        residuals.append(float((flat_y - flat_x).norm(dim=-1).max()))
        if residuals[-1] <= tolerance:
            return FixedPoint(y, tuple(residuals), True)
        x = past.mixed(flat_x, flat_y).reshape(x.shape)
    return FixedPoint(x, tuple(residuals), False)


def _flat(x: Tensor, dims: int) -> Tensor:
    return x.flatten(x.ndim - dims)


class _Past:
    """The last few steps and what they left over, state by state.

    A state whose residual has grown forgets its past and walks plainly for a while, longer each
    time: so it comes to rest where plain iteration does, as far as was ever seen.
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.y: list[Tensor] = []
        self.r: list[Tensor] = []
        self.known: list[Tensor] = []
        self.size = self.wait = self.patience = torch.empty(0)

    def mixed(self, x: Tensor, y: Tensor) -> Tensor:
        """Σ α_i f(x_i), Σ α_i = 1, with ‖Σ α_i (f(x_i) − x_i)‖ least."""
        if self.memory == 1:
            return y
        r = y - x
        self._watch(r.norm(dim=-1, keepdim=True))
        self.y = [*self.y, y][-self.memory :]
        self.r = [*self.r, r][-self.memory :]
        alpha = _least(torch.stack(self.r, dim=-2), torch.stack(self.known, dim=-2))
        return (alpha.unsqueeze(-1) * torch.stack(self.y, dim=-2)).sum(-2)

    def _watch(self, size: Tensor) -> None:
        if not self.known:
            self.patience, self.wait = torch.full_like(size, self.memory), torch.zeros_like(size)
            self.size = size
        grew = (size > self.size) & (self.wait == 0)
        self.wait = torch.where(grew, self.patience, (self.wait - 1).clamp(min=0))
        self.patience = torch.where(grew, 2 * self.patience, self.patience)
        free = (self.wait == 0).to(size.dtype)
        self.known = [*(one * free for one in self.known), torch.ones_like(size)][-self.memory :]
        self.size = size


def _least(r: Tensor, known: Tensor) -> Tensor:
    """The α of least ‖Σ α_i r_i‖ with Σ α_i = 1, by the differences from the last residual.

    What is not known (0 instead of 1) has no share.
    """
    last = r[..., -1:, :]
    apart = (r[..., :-1, :] - last) * known[..., :-1, :]
    gram = apart @ apart.mT
    size = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    ridge = torch.finfo(r.dtype).eps * 16 * size + torch.finfo(r.dtype).tiny
    eye = torch.eye(gram.shape[-1], dtype=r.dtype, device=r.device)
    share = -torch.linalg.solve(gram + ridge * eye, apart @ last.mT).squeeze(-1)
    return torch.cat([share, 1 - share.sum(-1, keepdim=True)], dim=-1)
