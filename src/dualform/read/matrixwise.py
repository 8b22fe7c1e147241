"""What a step's operator makes of gradients that are seen as matrices, or as parts of them."""

from __future__ import annotations

from torch import Tensor

from dualform.ledger import Term
from dualform.memory.blocks import as_matrix, through_views
from dualform.optimizers import Modewise, Operator, Sided, Turned
from dualform.read.grouped import Region


class Matrixwise:
    """A step's operator, applied to a part of many gradients, seen as matrices."""

    def __init__(self, operator: Operator, term: Term, region: Region, whole: Region) -> None:
        self._operator, self._term, self._region = operator, term, region
        self.needs = self._needed(whole)
        """The part of a gradient that it takes to know that part of the result."""

    def __call__(self, dense: Tensor) -> Tensor:
        operator, view, groups = self._operator, self._term.view, self._term.groups
        if isinstance(operator, Modewise | Turned):
            return self._region.of(through_views(operator, dense, operator.shape, view, groups))
        if isinstance(operator, Sided):
            matrix, left = self._sided(operator)
            matrix = matrix.to(dense)
            rows, columns = self._region.rows, self._region.columns
            return matrix[rows] @ dense if left else dense @ matrix[:, columns]
        if isinstance(operator, Tensor):
            return dense.mul_(self._region.of(as_matrix(operator, view, groups)).to(dense))
        return dense.mul_(operator)

    def _needed(self, whole: Region) -> Region:
        if isinstance(self._operator, Modewise | Turned):
            return whole
        if isinstance(self._operator, Sided):
            left = self._sided(self._operator)[1]
            across, down = (whole.rows, self._region.columns), (self._region.rows, whole.columns)
            return Region(*(across if left else down))
        return self._region

    def _sided(self, operator: Sided) -> tuple[Tensor, bool]:
        """The matrix as the term sees the parameter, and whether it stands left of it."""
        if self._term.view == "swapped":
            return operator.matrix.T, not operator.left
        return operator.matrix, operator.left
