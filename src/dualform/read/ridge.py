"""The ridge dual of the ledger: `S = (1 + C Cᵀ/λ)⁻¹ C g`, exactly or in leading directions.

`C` is samples × parameters. Few samples have a Gram matrix `C Cᵀ`; many are seen in the basis `Q`
of its leading directions, found by a randomized method in two scans. What the basis leaves out is
not dropped: there the Gram matrix is taken for a multiple of the identity, its mean.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dualform.errors import ReadingError
from dualform.read.matrix import Matrix

OVERSAMPLED = 16
"""How many more directions are tried than are kept."""


@dataclass(frozen=True)
class Ridge:
    """`C Cᵀ` as `Q M Qᵀ + τ (1 − Q Qᵀ)`, ready to be damped and solved.

    >>> exact = Ridge(None, torch.tensor([[2.0]], dtype=torch.float64), 0.0, 2.0, 1)
    >>> round(float(exact.solve(torch.tensor([[6.0]], dtype=torch.float64), damping=0.5)), 6)
    2.0
    """

    Q: Tensor | None
    """(samples, rank), orthonormal; None where M is the Gram matrix itself."""
    M: Tensor
    tail: float
    """τ: the mean of the eigenvalues outside the basis."""
    trace: float
    samples: int

    @property
    def scale(self) -> float:
        """The mean of the Gram matrix's diagonal, in units of which it is damped."""
        return self.trace / max(1, self.samples)

    @property
    def kept(self) -> float:
        """The share of the contributions' squared size that lies within the basis."""
        return float(self.M.diagonal().sum()) / self.trace if self.trace else 1.0

    def solve(self, b: Tensor, damping: float) -> Tensor:
        """(samples, queries): `(1 + C Cᵀ / λ)⁻¹ b` with `λ = damping · scale`."""
        added = damping * self.scale
        if not added:  # nothing was contributed
            return b
        b = b * added
        system = self.M + added * torch.eye(len(self.M), dtype=torch.float64)
        inside = b if self.Q is None else self.Q.T @ b
        solved = torch.cholesky_solve(inside, torch.linalg.cholesky(system))
        if self.Q is None:
            return solved
        return self.Q @ solved + (b - self.Q @ inside) / (added + self.tail)


def make_ridge(matrix: Matrix, rank: int) -> Ridge:
    """The Gram matrix where the rank is as large as the number of samples, else its basis."""
    n = matrix.groups
    if rank >= n:
        parts = ((c.values @ c.values.T).double().cpu() for c in matrix.columns())
        gram = sum(parts, torch.zeros(n, n, dtype=torch.float64))
        return Ridge(None, gram, 0.0, float(gram.diagonal().sum()), n)
    tried = min(rank + OVERSAMPLED, n)
    start = torch.randn(n, tried, generator=torch.Generator().manual_seed(0))
    found, trace = _gram_times(matrix, start)
    basis = torch.linalg.qr(found).Q
    return _nystrom(basis, _gram_times(matrix, basis)[0], rank, trace)


def _gram_times(matrix: Matrix, basis: Tensor) -> tuple[Tensor, float]:
    """`C Cᵀ B` and the trace of `C Cᵀ`, in one scan."""
    found, trace = torch.zeros(basis.shape, dtype=torch.float64), 0.0
    for columns in matrix.columns():
        C = columns.values
        found += (C @ (C.T @ basis.to(C))).double().cpu()
        trace += float(C.square().sum(dtype=torch.float64))
    return found, trace


def _nystrom(basis: Tensor, product: Tensor, rank: int, trace: float) -> Ridge:
    """The leading eigenvectors of `K B (Bᵀ K B)⁻¹ Bᵀ K`, given `K B` for an orthonormal B."""
    small = basis.T @ product
    values, vectors = torch.linalg.eigh((small + small.T) / 2)
    kept = values > values[-1] * 1e-12
    root = product @ (vectors[:, kept] / values[kept].sqrt())
    U, S, _ = torch.linalg.svd(root, full_matrices=False)
    Q, M = U[:, :rank], torch.diag(S[:rank].square())
    left = max(0.0, trace - float(M.diagonal().sum()))
    return Ridge(Q, M, left / max(1, len(Q) - rank), trace, len(Q))


def check_memory(samples: int, rank: int) -> None:
    """Says before anything is allocated that it will not fit."""
    exact = rank >= samples
    need, free = 8 * samples * (3 * samples if exact else 3 * (rank + OVERSAMPLED)), free_memory()
    if need > free:
        what = "the Gram matrix" if exact else f"a basis of {rank:,} directions"
        smaller = max(16, int(free / (48 * samples)) // 16 * 16)
        raise ReadingError(
            f"{what} of {samples:,} samples needs {need / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB "
            f"are free; fewer directions need less: rank={min(smaller, 1024)}."
        )


def free_memory() -> float:
    """Bytes that may still be allocated, as far as the system says."""
    known = Path("/proc/meminfo")
    if known.exists():
        lines = dict(line.split(":") for line in known.read_text().splitlines())
        return 1024.0 * int(lines["MemAvailable"].split()[0])
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return float("inf")
