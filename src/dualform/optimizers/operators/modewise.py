"""A symmetric matrix along each dimension: the coefficients of Shampoo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.memory.blocks import Functional
from dualform.memory.views import View
from dualform.optimizers.operators.operator import Operator, Question


@dataclass(frozen=True, eq=False)
class Modewise(Operator):
    """`G ↦ G ×₁ A₁ ×₂ A₂ …`: a symmetric matrix along each dimension, so its own adjoint.

    For a matrix that is `A₁ G A₂`: rank one stays rank one.

    >>> half = Modewise((2 * torch.eye(2), torch.ones(3, 3))) * 0.5
    >>> half.apply(torch.eye(2, 3)).tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """

    matrices: tuple[Tensor, ...]

    def apply(self, dense: Tensor) -> Tensor:
        """Along every dimension."""
        return along(self.matrices, dense)

    @property
    def adjoint(self) -> Modewise:
        """Itself."""
        return self

    def scaled(self, number: float) -> Modewise:
        """With the first matrix scaled."""
        first, *others = self.matrices
        return Modewise((first * number, *others))

    def asked(self, question: Question, view: View) -> Question:
        """Rank one stays so where the sides of the matrix are the parameter's dimensions."""
        if not (isinstance(question, Functional) and view.has_own_sides):
            return super().asked(question, view)
        first, *others = (matrix.cpu() for matrix in self.matrices)
        b = along(others, question.b.reshape(len(question), *view.shape[1:]))
        return Functional(question.left(first).a, b.reshape(question.b.shape))


def along(matrices: Sequence[Tensor | None], dense: Tensor) -> Tensor:
    """`G ×₁ A₁ ×₂ A₂ …` along the last dimensions; None leaves one as it is.

    >>> along([None, torch.ones(1, 3)], torch.eye(2, 3)).tolist()
    [[1.0], [1.0]]
    """
    found = dense
    for at, matrix in enumerate(matrices, start=dense.ndim - len(matrices)):
        if matrix is not None:
            found = _along_one(matrix.to(found), found, dense.ndim - at)
    return found.clone() if found is dense else found


def _along_one(matrix: Tensor, dense: Tensor, back: int) -> Tensor:
    """Along the dimension that is so many from the end."""
    if back == 1:
        return dense @ matrix.T
    if back == 2:
        return matrix @ dense
    found: Tensor = torch.tensordot(dense, matrix, ([-back], [1])).movedim(-1, -back)
    return found
