"""Principal component pursuit: a matrix as the sum of a low-rank matrix and a sparse one.

    min ‖L‖_* + λ‖S‖_1   where   L + S = K

The alternating direction method of multipliers solves it (Candès, Li, Ma and Wright, *Robust
Principal Component Analysis?*, Journal of the ACM 2011). With U = Y/μ for the multipliers Y, each
round takes

    S ← soft(K − L + U, λ/μ),   L ← D_{1/μ}(K − S + U),   U ← U + K − L − S.

`soft` moves every entry toward 0, `D` every singular value. RPC-Attention puts an attention layer
in the place of D. Its published code moves entries by λμ, and gives K − S − U to the low-rank step;
that is the variant "published", here so that both can be compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dualform.errors import AttentionError

VARIANTS = ("correct", "published")


class SparseStep(NamedTuple):
    """What the first half of a round makes: S, and the matrix whose low-rank part is taken."""

    sparse: Tensor
    rest: Tensor


def sparse_step(K: Tensor, L: Tensor, U: Tensor, threshold: Tensor, variant: str) -> SparseStep:
    """S = soft(K − L + U, threshold), and K − S + U; K − S − U in the published variant.

    >>> K, zero = torch.tensor([[3.0, -0.5]]), torch.zeros(1, 2)
    >>> sparse_step(K, zero, zero, torch.tensor(1.0), "correct")
    SparseStep(sparse=tensor([[2., 0.]]), rest=tensor([[ 1.0000, -0.5000]]))
    """
    free = K - L + U
    S = torch.relu(free - threshold) - torch.relu(-free - threshold)
    return SparseStep(S, K - S + U if variant == "correct" else K - S - U)


def require_options(rounds: int, sparsity: float | None, variant: str) -> None:
    """Raise unless the options of a pursuit are such.

    >>> require_options(3, None, "corrected")
    Traceback (most recent call last):
    dualform.errors.AttentionError: variant='corrected' is unknown; choose one of 'correct', ...
    """
    if variant not in VARIANTS:
        known = ", ".join(map(repr, VARIANTS))
        raise AttentionError(f"variant='{variant}' is unknown; choose one of {known}.")
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 0:
        raise AttentionError(f"{rounds=} must be a whole number from 0.")
    if sparsity is not None and not 0 < sparsity < math.inf:
        raise AttentionError(
            f"{sparsity=} must be positive and finite: the larger it is, the fewer entries are "
            "taken for corrupted."
        )


@dataclass(frozen=True)
class Pursuit:
    """A matrix in two parts, and how exactly they are that.

    >>> found = principal_component_pursuit(torch.ones(3, 4, dtype=torch.float64))
    >>> found.error < 1e-6, bool(torch.linalg.matrix_norm(found.multipliers, 2) < 1 + 1e-6)
    (True, True)
    """

    low_rank: Tensor
    sparse: Tensor
    multipliers: Tensor
    """Y, in both subdifferentials: |Y| ≤ λ, λ sign(S) where S ≠ 0, and ‖Y‖₂ ≤ 1."""
    rounds: int
    error: float
    """‖K − L − S‖ / ‖K‖."""


@torch.no_grad()
def principal_component_pursuit(
    K: Tensor,
    sparsity: float | None = None,
    *,
    rounds: int = 1000,
    tolerance: float = 1e-7,
    variant: str = "correct",
) -> Pursuit:
    """Splits K (rows, columns) into L + S with the least ‖L‖_* + λ‖S‖_1.

    λ is `sparsity`, 1/√(the longer side) unless given, and μ = rows · columns / (4 ‖K‖_1). It ends
    when L + S is K to a `tolerance`, or after so many rounds.

    >>> _ = torch.manual_seed(0)
    >>> L = torch.randn(40, 2, dtype=torch.float64) @ torch.randn(2, 30, dtype=torch.float64)
    >>> S = 10 * torch.randn_like(L) * (torch.rand_like(L) < 0.05)
    >>> found = principal_component_pursuit(L + S)
    >>> bool((found.low_rank - L).norm() < 1e-5 * L.norm())
    True
    """
    require_options(rounds, sparsity, variant)
    if K.ndim != 2:
        raise AttentionError(f"K has shape {tuple(K.shape)}; give one matrix, (rows, columns).")
    if not K.isfinite().all():
        raise AttentionError("K has entries that are not finite; give numbers only.")
    L = S = U = torch.zeros_like(K)
    size = 4 * K.abs().mean()
    if not K.numel() or not size:
        return Pursuit(L, S, U, 0, 0.0)
    weight = sparsity or max(K.shape) ** -0.5
    threshold = weight * size if variant == "correct" else weight / size
    made, error = 0, 1.0
    while made < rounds and error > tolerance:
        S, rest = sparse_step(K, L, U, threshold, variant)
        left, values, right = torch.linalg.svd(rest, full_matrices=False)
        L = (left * torch.relu(values - size)) @ right
        U = U + K - L - S
        made, error = made + 1, float((K - L - S).norm() / K.norm())
    return Pursuit(L, S, U / size, made, error)
