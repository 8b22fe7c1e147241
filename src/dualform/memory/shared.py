"""Rows that share a matrix: each stands for `M ∘ (a ⊗ b)`, with one M for all rows of a use.

Where a weight is computed from a parameter, a row of the layer may add to that parameter what is no
rank-one block, but a rank-one block times a matrix, element by element. All rows of one use of the
layer have the same matrix. A block of width 1 is repeated along the matrix first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from dualform.memory.blocks import (
    BilinearFunctional,
    Functional,
    RowBlocks,
    Sides,
)
from dualform.memory.products import BETWEEN
from dualform.memory.summary import SummarySides


@dataclass(frozen=True)
class SharedSides(RowBlocks):
    """Rows `M ∘ (a ⊗ b)`: some rank-one rows, and the matrix of each.

    `matrices` is (count, height, width), with a height of 1 where all lines of M are the same.
    `which` is (rows,): the number of each row's matrix.

    >>> plain = Sides(torch.tensor([[1.0, 10.0]]), None)  # 1 and 10 times the lines of M
    >>> rows = SharedSides(plain, torch.ones(1, 2, 3), torch.tensor([0]))
    >>> rows.total(torch.ones(1), (2, 3)).tolist()
    [[1.0, 1.0, 1.0], [10.0, 10.0, 10.0]]
    >>> rows.answers(Functional(torch.tensor([1]), torch.tensor([[0.0, 1.0, 1.0]])))
    tensor([[20.]])
    """

    plain: Sides
    matrices: Tensor
    which: Tensor

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.plain.device

    @property
    def a(self) -> Tensor:
        """(rows, height) of the rank-one blocks."""
        return self.plain.a

    @property
    def b(self) -> Tensor | None:
        """(rows, width) of the rank-one blocks, or None for 1."""
        return self.plain.b

    def __len__(self) -> int:
        return len(self.plain)

    def __getitem__(self, rows: slice | Tensor) -> SharedSides:
        return SharedSides(self.plain[rows], self.matrices, self.which[rows])

    def double(self) -> SharedSides:
        """The same in float64."""
        return SharedSides(self.plain.double(), self.matrices.double(), self.which)

    def by_matrix(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each matrix that rows have, and the numbers of its rows."""
        for number in torch.unique(self.which).tolist():
            yield self.matrices[number], torch.nonzero(self.which == number).flatten()

    @property
    def narrow(self) -> bool:
        """Whether the rank-one blocks have a single column, to be repeated."""
        return self.b is None or self.b.shape[-1] == 1

    def total(self, coefficients: Tensor, shape: tuple[int, ...]) -> Tensor:
        """`Σ c M ∘ (a ⊗ b)` over the rows, as a float64 matrix of this shape."""
        total = torch.zeros(shape, dtype=torch.float64, device=self.a.device)
        block = (shape[0], 1 if self.narrow else shape[1])
        for M, rows in self.by_matrix():
            total += M * self.plain[rows].total(coefficients[rows], block)
        return total

    def answers(self, question: Functional | BilinearFunctional) -> Tensor:
        """(rows, questions): the answer of each row, in the rows' precision."""
        found = self.a.new_empty(len(self), len(question))
        dense = isinstance(question, Functional) and not question.units
        each = max(1, BETWEEN // max(1, self.matrices[0].numel()) if dense else len(question))
        for M, rows in self.by_matrix():
            for at in range(0, len(question), each):
                asked = self._summed(_multiplied(question[at : at + each], M))
                found[rows, at : at + each] = asked.of(self.plain[rows])
        return found

    def sizes(self) -> Tensor:
        """(rows,): the norm of each block."""
        a, b, width = self.a.square(), self.b, self.matrices.shape[2]
        squares = Sides(a, None if b is None else b.square())
        ones = a.new_ones(1, a.shape[1], width if b is None else max(width, b.shape[-1]))
        blocks = SharedSides(squares, self.matrices.square(), self.which)
        return blocks.answers(BilinearFunctional(ones))[:, 0].sqrt()

    def _summed(self, question: Functional | BilinearFunctional) -> Functional | BilinearFunctional:
        """A question about matrices as one about the blocks, which may be repeated along them."""
        if not self.narrow:
            return question
        if isinstance(question, BilinearFunctional):
            return BilinearFunctional(question.matrices.sum(2, keepdim=True))
        return Functional(question.a, question.b.sum(1, keepdim=True))


AnySides: TypeAlias = Sides | SharedSides | SummarySides


def _multiplied(
    question: Functional | BilinearFunctional, M: Tensor
) -> Functional | BilinearFunctional:
    """The question as it is put to what M is multiplied with."""
    if isinstance(question, BilinearFunctional):
        return BilinearFunctional(question.matrices.to(M.device) * M)
    a, b = question.a.to(M.device), question.b.to(M.device)
    if question.units:
        return Functional(a, b * (M if len(M) == 1 else M[a]))
    return Functional(a, b * M) if len(M) == 1 else Functional(a, b).scaled(M)
