"""A parameter seen as a matrix, and parts of that matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dualform.memory.blocks import as_matrix, from_matrix, keeps_order, matrix_shape


@dataclass(frozen=True)
class Region:
    """A part of a parameter's matrix.

    >>> import torch
    >>> Region.whole(4, 3).of(torch.zeros(2, 4, 3)).shape
    torch.Size([2, 4, 3])
    """

    rows: slice
    columns: slice

    @classmethod
    def whole(cls, height: int, width: int) -> Region:
        """All of a matrix."""
        return cls(slice(0, height), slice(0, width))

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Its height and width."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    def of(self, matrices: Tensor) -> Tensor:
        """The same part of matrices (…, height, width)."""
        return matrices[..., self.rows, self.columns]


@dataclass(frozen=True)
class View:
    """How a parameter of some shape is seen as a matrix; `as_matrix` explains the kinds.

    >>> import torch
    >>> view = View((4, 3), "swapped")
    >>> view.size, view.matrix(torch.zeros(4, 3)).shape
    ((3, 4), torch.Size([3, 4]))
    >>> view.through(torch.neg, torch.ones(2, 3, 4)).unique()
    tensor([-1.])
    """

    shape: tuple[int, ...]
    kind: str = "rows"
    groups: int = 1

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the matrix."""
        return matrix_shape(self.shape, self.kind, self.groups)

    @property
    def whole(self) -> Region:
        """All of the matrix."""
        return Region.whole(*self.size)

    @property
    def has_own_sides(self) -> bool:
        """Whether the height is the first dimension, and the width all others in their order."""
        rows = self.kind == "rows" or (self.kind == "flat" and len(self.shape) == 1)
        return rows and self.groups == 1

    @property
    def is_transposed(self) -> bool:
        """Whether the parameter is a matrix, and is seen as its transpose.

        >>> View((4, 3), "swapped").is_transposed, View((4, 3, 2), "swapped").is_transposed
        (True, False)
        """
        return self.kind == "swapped" and len(self.shape) == 2 and self.groups == 1

    def matrix(self, parameter: Tensor) -> Tensor:
        """The parameter as a matrix."""
        return as_matrix(parameter, self.kind, self.groups)

    def through(self, mapping: Callable[[Tensor], Tensor], matrices: Tensor) -> Tensor:
        """Matrices as what a mapping of parameters, (count, *shape) of them, makes of them."""
        if keeps_order(self.kind):
            return mapping(matrices.reshape(len(matrices), *self.shape)).reshape(matrices.shape)
        kind = (self.kind, self.groups)
        parameters = torch.stack([from_matrix(matrix, self.shape, *kind) for matrix in matrices])
        return torch.stack([as_matrix(found, *kind) for found in mapping(parameters)])
