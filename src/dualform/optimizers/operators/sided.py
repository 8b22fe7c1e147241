"""A matrix from one side: the coefficients of Muon."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.memory.views import Region, View
from dualform.optimizers.operators.operator import Coefficient, Operator, Question, Restricted


@dataclass(frozen=True, eq=False)
class Sided(Operator):
    """`G ↦ A G` (left) or `G ↦ G A` (right), for parameters that are matrices.

    Sums and products of those on one side are on that side.

    >>> double = Sided(2 * torch.eye(2))
    >>> (double * 3 + 1).matrix.tolist()
    [[7.0, 0.0], [0.0, 7.0]]
    >>> double.apply(torch.ones(2, 3)).tolist()
    [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]
    """

    matrix: Tensor
    left: bool = True
    is_dense = False

    def apply(self, dense: Tensor) -> Tensor:
        """`A G` or `G A`."""
        matrix = self.matrix.to(dense)
        return matrix @ dense if self.left else dense @ matrix

    @property
    def adjoint(self) -> Sided:
        """The transpose, on the same side."""
        return Sided(self.matrix.T, self.left)

    def scaled(self, number: float) -> Sided:
        """The matrix times a number."""
        return Sided(self.matrix * number, self.left)

    def composed(self, first: Coefficient) -> Operator:
        """The product of both matrices, if they are on one side."""
        if not isinstance(first, Sided) or first.left != self.left:
            return super().composed(first)
        pair = (self.matrix, first.matrix) if self.left else (first.matrix, self.matrix)
        return Sided(torch.matmul(*pair), self.left)

    def summed(self, other: Coefficient) -> Operator:
        """The sum of both matrices, if they are on one side; a number is a multiple of 1."""
        if isinstance(other, float | int):
            return Sided(
                self.matrix + other * torch.eye(len(self.matrix)).to(self.matrix), self.left
            )
        if not isinstance(other, Sided) or other.left != self.left:
            return super().summed(other)
        return Sided(self.matrix + other.matrix, self.left)

    def asked(self, question: Question, view: View) -> Question:
        """Rank one stays so."""
        seen = self._seen(view)
        if seen is None:
            return super().asked(question, view)
        matrix = seen.matrix.cpu()
        return question.left(matrix) if seen.left else question.right(matrix)

    def restricted(self, region: Region, view: View) -> Restricted:
        """Needs whole columns for a matrix from the left, whole rows for one from the right."""
        seen, whole = self._seen(view), view.whole
        if seen is None:
            return super().restricted(region, view)
        if seen.left:
            part = Sided(seen.matrix[region.rows], left=True)
            return Restricted(Region(whole.rows, region.columns), part.apply)
        part = Sided(seen.matrix[:, region.columns], left=False)
        return Restricted(Region(region.rows, whole.columns), part.apply)

    def _seen(self, view: View) -> Sided | None:
        """The same on the matrix that is seen; None where that has other sides."""
        if view.has_own_sides:
            return self
        return Sided(self.matrix.T, not self.left) if view.is_transposed else None
