"""What a layer can do with a parameter, and what follows from it for rows and questions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from dualform.memory.blocks import BilinearFunctional, Functional, Sides


class Form(ABC):
    """How keys and a parameter, seen as a matrix, become outputs; and rows become blocks.

    A form writes three methods, which must agree: the gradient of what it `output`s is the sum of
    its `rows`, and the answer of a matrix to its `question` is what it `output`s for that matrix.
    `at` is where the block begins in the matrix; `groups` of outputs have keys of their own.
    """

    name: ClassVar[str]
    """What ledgers call it: it stays."""
    needs_keys: ClassVar[bool] = True
    """Whether rows depend on keys."""
    is_product: ClassVar[bool] = False
    """Whether it is a matrix product: keys are vectors that can be compared with each other."""
    has_width: ClassVar[bool] = False
    """Whether the parameter is a matrix of some width, and no single column."""
    has_sides: ClassVar[bool] = True
    """Whether both sides of a block are vectors; a place in a table is none."""
    is_cast: ClassVar[bool] = False
    """Whether autocast computes it in 16 bits."""

    @abstractmethod
    def rows(
        self, keys: Tensor, values: Tensor, groups: int = 1, at: tuple[int, int] = (0, 0)
    ) -> Sides:
        """The blocks that rows add to the matrix, from their keys and values (errors)."""

    @abstractmethod
    def output(
        self, matrix: Tensor, keys: Tensor, width: int, groups: int, at: tuple[int, int]
    ) -> Tensor:
        """(queries, width) in float64, or one line for all: what the matrix makes of keys."""

    @abstractmethod
    def question(
        self,
        size: tuple[int, int],
        keys: Tensor,
        directions: Tensor,
        units: Tensor | None,
        groups: int,
        at: tuple[int, int],
    ) -> Functional | BilinearFunctional:
        """What queries ask of a matrix of this size: their output along their directions.

        `units` are the outputs asked about, where every direction is a single one.
        """

    def block(self, outputs: int, inputs: int) -> int:
        """How many numbers of the matrix a row adds to."""
        return outputs


def one(directions: Tensor) -> Tensor:
    """(queries, 1): the other side of a single column.

    >>> one(torch.zeros(2, 5)).tolist()
    [[1.0], [1.0]]
    """
    return torch.ones(len(directions), 1, dtype=torch.float64, device=directions.device)


def placed(part: Tensor, start: int, size: int) -> Tensor:
    """Lines of a block in the width of the whole.

    >>> placed(torch.ones(1, 2), 1, 4)
    tensor([[0., 1., 1., 0.]])
    """
    return F.pad(part, (start, size - start - part.shape[1]))


def asked(directions: Tensor, units: Tensor | None, top: int, height: int) -> Tensor:
    """α of a question: the unit that each direction is, or the directions in full height.

    >>> asked(torch.eye(2), torch.tensor([0, 1]), 3, 9)
    tensor([3, 4])
    """
    return placed(directions, top, height) if units is None else units + top
