"""One number for each element: the coefficients of Adam and of its relatives."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dualform.memory.views import Region, View
from dualform.optimizers.operators.operator import Operator, Question, Restricted


@dataclass(frozen=True, slots=True, eq=False)
class Elementwise(Operator):
    """`G ↦ D ∘ G`, with D of the parameter's shape.

    >>> import torch
    >>> Elementwise(torch.tensor([1.0, 2.0])).apply(torch.ones(2))
    tensor([1., 2.])
    """

    numbers: Tensor
    is_dense = False

    def apply(self, dense: Tensor) -> Tensor:
        """`D ∘ G`."""
        return self.numbers.to(dense.device) * dense

    @property
    def adjoint(self) -> Elementwise:
        """Itself."""
        return self

    def scaled(self, number: float) -> Elementwise:
        """Every number times this one."""
        return Elementwise(self.numbers * number)

    def asked(self, question: Question, view: View) -> Question:
        """Rank one stays so where a question is about one row of the matrix."""
        return question.scaled(view.matrix(self.numbers))

    def restricted(self, region: Region, view: View) -> Restricted:
        """Needs that part alone."""
        part = region.of(view.matrix(self.numbers))
        return Restricted(region, lambda dense: dense.mul_(part.to(dense)))

    def diagonal(self, shape: tuple[int, ...]) -> Tensor:
        """The numbers."""
        return self.numbers

    def narrow(self) -> Elementwise:
        """In float32."""
        return Elementwise(self.numbers.float())
