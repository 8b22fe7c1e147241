"""Summaries: what a sample adds to a parameter's matrix, in the coordinates of two small bases.

A layer's errors and inputs lie mostly in a few directions. `U` (height, k_o) holds those of the
errors and `V` (width, k_i) those of the inputs. The *summary* of a sample is one small matrix,
`S = Uᵀ (Σ a ⊗ b) V`, summed over all its rows, and stands for the block `U S Vᵀ`. What the bases do
not reach is nobody's: a run keeps it as the parameter's residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dualform.memory.blocks import BilinearFunctional, Functional, RowBlocks, Sides
from dualform.memory.products import BETWEEN

REMEMBERED = 4
"""So many questions are remembered as they are put to summaries."""


@dataclass(frozen=True, eq=False)
class Bases:
    """Directions in which a parameter's matrix is kept; None for a side that is kept whole.

    >>> bases = Bases(torch.eye(3)[:, :1], None)
    >>> bases.project(torch.arange(6.0).reshape(3, 2)), bases.size((3, 2))
    (tensor([[0., 1.]]), (1, 2))
    """

    outputs: Tensor | None
    """U, (height, k_o)."""
    inputs: Tensor | None
    """V, (width, k_i)."""
    _asked: list[tuple[Any, Tensor]] = field(default_factory=list, repr=False)
    """Questions that were projected last, with the results: many rows are asked the same."""

    @property
    def is_whole(self) -> bool:
        """Whether both sides are kept whole, so that nothing is lost."""
        return self.outputs is None and self.inputs is None

    def size(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Height and width of a summary of a matrix of this shape."""
        height = shape[0] if self.outputs is None else self.outputs.shape[1]
        return height, shape[1] if self.inputs is None else self.inputs.shape[1]

    def project(self, matrices: Tensor) -> Tensor:
        """(…, k_o, k_i): `Uᵀ G V` of matrices (…, height, width)."""
        if self.outputs is not None:
            matrices = self.outputs.to(matrices).T @ matrices
        return matrices if self.inputs is None else matrices @ self.inputs.to(matrices)

    def expand(self, summaries: Tensor) -> Tensor:
        """(…, height, width): `U S Vᵀ`."""
        if self.inputs is not None:
            summaries = summaries @ self.inputs.to(summaries).T
        return summaries if self.outputs is None else self.outputs.to(summaries) @ summaries

    def expand_part(self, summaries: Tensor, rows: slice, columns: slice) -> Tensor:
        """(…, rows, columns): a part of `U S Vᵀ`."""
        if self.outputs is None:
            summaries = summaries[..., rows, :]
        if self.inputs is None:
            summaries = summaries[..., columns]
        return self.part(rows, columns).expand(summaries)

    def part(self, rows: slice, columns: slice) -> Bases:
        """The bases of a part of the matrix, where both sides have one."""
        U, V = self.outputs, self.inputs
        return Bases(None if U is None else U[rows], None if V is None else V[columns])

    def to(self, there: torch.device | str | torch.dtype) -> Bases:
        """The same on a device, or of a type."""
        U, V = (None if side is None else side.to(there) for side in (self.outputs, self.inputs))
        return Bases(U, V)

    def reached(self, rows: Sides) -> Sides:
        """Rows as far as the bases reach them: `U Uᵀ a ⊗ V Vᵀ b`.

        >>> bases = Bases(torch.eye(3)[:, :1], None)
        >>> bases.reached(Sides(torch.ones(1, 3), torch.ones(1, 2))).a
        tensor([[1., 0., 0.]])
        """
        a, b, (top, left) = rows.a, rows.b, rows.at
        if self.outputs is not None and a.ndim == 2:  # else a place, which is kept
            U = self.outputs.to(a)
            a, top = a @ U[top : top + a.shape[1]] @ U.T, 0
        if self.inputs is not None and b is not None:
            V = self.inputs.to(b)
            b, left = b @ V[left : left + b.shape[1]] @ V.T, 0
        return Sides(a, b, (top, left))

    def asked(self, question: Functional | BilinearFunctional, like: Tensor) -> Tensor:
        """(questions, k_o × k_i): a question as it is put to summaries; kept for the next rows."""
        for known, found in list(self._asked):
            if known is question and found.dtype == like.dtype:
                return found
        projected = self._projected(question, like)
        self._asked[:] = [*self._asked[1 - REMEMBERED :], (question, projected)]
        return projected

    def _projected(self, question: Functional | BilinearFunctional, like: Tensor) -> Tensor:
        if isinstance(question, BilinearFunctional):
            each = max(1, BETWEEN // max(1, question.matrices[0].numel()))
            some = torch.split(question.matrices, each)
            return torch.cat([self.project(matrices.to(like)).flatten(1) for matrices in some])
        a, b, U, V = question.a.to(like.device), question.b.to(like), self.outputs, self.inputs
        if not question.units:
            left = a.to(like) if U is None else a.to(like) @ U.to(like)
        elif U is not None:
            left = U.to(like)[a]
        else:
            left = torch.zeros(len(a), like.shape[1], dtype=like.dtype, device=like.device)
            left[torch.arange(len(a)), a] = 1.0
        right = b if V is None else b @ V.to(like)
        return (left[:, :, None] * right[:, None, :]).flatten(1)


@dataclass(frozen=True)
class SummarySides(RowBlocks):
    """Rows that are summaries: each adds the block `U S Vᵀ` to the matrix.

    `summaries` is (rows, k_o, k_i).

    >>> bases = Bases(torch.eye(2)[:, :1], torch.eye(3)[:, :2])
    >>> rows = SummarySides(torch.ones(4, 1, 2), bases)
    >>> rows.total(torch.ones(4), (2, 3)).tolist()
    [[4.0, 4.0, 0.0], [0.0, 0.0, 0.0]]
    >>> rows.answers(Functional(torch.tensor([0]), torch.tensor([[1.0, 10.0, 100.0]])))[0]
    tensor([11.])
    """

    summaries: Tensor
    bases: Bases

    def __len__(self) -> int:
        return len(self.summaries)

    def __getitem__(self, rows: slice | Tensor) -> SummarySides:
        return SummarySides(self.summaries[rows], self.bases)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.summaries.device

    def double(self) -> SummarySides:
        """The same in float64."""
        return SummarySides(self.summaries.double(), self.bases)

    def weighted(self, weights: Tensor) -> SummarySides:
        """Each times a number."""
        return SummarySides(self.summaries * weights.to(self.summaries)[:, None, None], self.bases)

    def answers(self, question: Functional | BilinearFunctional) -> Tensor:
        """(rows, questions): the answer of each row, in the rows' precision."""
        return self.summaries.flatten(1) @ self.bases.asked(question, self.summaries).T

    def sums(self, parts: Sequence[slice], coefficients: Tensor) -> Tensor:
        """(parts, k_o, k_i): the summaries of each part, added up in float64."""
        flat = self.summaries.flatten(1)
        found = [coefficients[part].double() @ flat[part].double() for part in parts]
        return torch.stack(found).reshape(len(parts), *self.summaries.shape[1:])

    def total(self, coefficients: Tensor, shape: tuple[int, ...]) -> Tensor:
        """`U (Σ c S) Vᵀ` over the rows, as a float64 matrix."""
        return self.bases.expand(self.sums([slice(0, len(self))], coefficients)[0])
