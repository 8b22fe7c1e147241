"""Summaries: what a sample adds to a parameter's matrix, in the coordinates of two small bases.

A layer's errors and inputs lie mostly in a few directions. `U` (height, k_o) holds those of the
errors and `V` (width, k_i) those of the inputs. The *summary* of a sample is one small matrix,
`S = Uᵀ (Σ a ⊗ b) V`, summed over all its rows, and stands for the block `U S Vᵀ`. What the bases do
not reach is nobody's: a run keeps it as the parameter's residual.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.memory.blocks import BilinearFunctional, Functional, RowBlocks, Sides
from dualform.memory.products import BETWEEN


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

    @property
    def is_whole(self) -> bool:
        """Whether both sides are kept whole, so that nothing is lost."""
        return self.outputs is None and self.inputs is None

    def size(self, shape: tuple[int, ...]) -> tuple[int, int]:
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

    def expand_rows(self, rows: Sides) -> Sides:
        """Rows in these coordinates as they are in the whole matrix: `U a ⊗ V b`.

        >>> bases = Bases(torch.eye(3)[:, 1:], None)
        >>> bases.expand_rows(Sides(torch.tensor([[1.0, 2.0]]), torch.ones(1, 2))).a
        tensor([[0., 1., 2.]])
        """
        a, b, (top, left) = rows.a, rows.b, rows.at
        if self.outputs is not None:
            a, top = a @ self.outputs.to(a).T, 0
        if self.inputs is not None and b is not None:
            b, left = b @ self.inputs.to(b).T, 0
        return Sides(a, b, (top, left))

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

    def question(self, asked: Functional | BilinearFunctional) -> Functional | BilinearFunctional:
        """A question to the matrix as it is put to what is kept in these bases.

        >>> asked = Functional(torch.tensor([2]), torch.tensor([[1.0, 10.0]]))
        >>> Bases(torch.eye(3)[:, 1:], None).question(asked)
        Functional(a=tensor([[0., 1.]]), b=tensor([[ 1., 10.]]))
        """
        if isinstance(asked, BilinearFunctional):
            each = max(1, BETWEEN // max(1, asked.matrices[0].numel()))
            parts = [self.project(some) for some in torch.split(asked.matrices, each)]
            return BilinearFunctional(torch.cat(parts))
        a, b, U, V = asked.a.to(asked.b.device), asked.b, self.outputs, self.inputs
        if U is not None:
            a = U.to(b)[a] if asked.units else a.to(b) @ U.to(b)
        return Functional(a, b if V is None else b @ V.to(b))


@dataclass(frozen=True)
class Matrices(RowBlocks):
    """Rows that are matrices, (rows, height, width): each adds itself.

    >>> rows = Matrices(torch.ones(4, 1, 2))
    >>> rows.answers(Functional(torch.tensor([0]), torch.tensor([[1.0, 10.0]])))[0]
    tensor([11.])
    """

    blocks: Tensor

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, rows: slice | Tensor) -> Matrices:
        return Matrices(self.blocks[rows])

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.blocks.device

    def double(self) -> Matrices:
        """The same in float64."""
        return Matrices(self.blocks.double())

    def weighted(self, weights: Tensor) -> Matrices:
        """Each times a number."""
        return Matrices(self.blocks * weights.to(self.blocks)[:, None, None])

    def answers(self, question: Functional | BilinearFunctional) -> Tensor:
        """(rows, questions): the answer of each row, in the rows' precision."""
        asked = question.dense(self.blocks.shape[1]).matrices.to(self.blocks)
        return self.blocks.flatten(1) @ asked.flatten(1).T

    def total(self, coefficients: Tensor, shape: tuple[int, ...]) -> Tensor:
        """`Σ c S` over the rows, as a float64 matrix."""
        summed = coefficients.double() @ self.blocks.flatten(1).double()
        return summed.reshape(self.blocks.shape[1:])


@dataclass(frozen=True)
class SummarySides(RowBlocks):
    """Rows that are kept in bases: each adds the block `U S Vᵀ` to the matrix.

    `kept` has the rows in the coordinates of the bases: S itself, or `a ⊗ b` for it.

    >>> bases = Bases(torch.eye(2)[:, :1], torch.eye(3)[:, :2])
    >>> rows = SummarySides(Matrices(torch.ones(4, 1, 2)), bases)
    >>> rows.total(torch.ones(4), (2, 3)).tolist()
    [[4.0, 4.0, 0.0], [0.0, 0.0, 0.0]]
    >>> rows.answers(Functional(torch.tensor([0]), torch.tensor([[1.0, 10.0, 100.0]])))[0]
    tensor([11.])
    """

    kept: Matrices | Sides
    bases: Bases

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, rows: slice | Tensor) -> SummarySides:
        return SummarySides(self.kept[rows], self.bases)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.kept.device

    def double(self) -> SummarySides:
        """The same in float64."""
        return SummarySides(self.kept.double(), self.bases)

    def weighted(self, weights: Tensor) -> SummarySides:
        """Each times a number."""
        return SummarySides(self.kept.weighted(weights), self.bases)

    def answers(self, question: Functional | BilinearFunctional) -> Tensor:
        """(rows, questions): the answer of each row, in the rows' precision."""
        return self.kept.answers(self.bases.question(question))

    def total(self, coefficients: Tensor, shape: tuple[int, ...]) -> Tensor:
        """`U (Σ c S) Vᵀ` over the rows, as a float64 matrix."""
        return self.bases.expand(self.kept.total(coefficients, self.bases.size(shape)))
