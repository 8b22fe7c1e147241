"""An offset: `y = x + p`, and `a = error`, `b = 1`."""

from __future__ import annotations

from torch import Tensor

from dualform.memory.blocks import Functional, Sides
from dualform.memory.forms.form import Form, asked, one


class OffsetForm(Form):
    """Biases, class tokens, positions.

    >>> import torch
    >>> OffsetForm().rows(keys=torch.ones(3, 2), values=torch.ones(3, 4)).b is None
    True
    """

    name = "sum"
    needs_keys = False
    is_cast = True

    def rows(
        self, keys: Tensor, values: Tensor, groups: int = 1, at: tuple[int, int] = (0, 0)
    ) -> Sides:
        """The errors."""
        return Sides(values, None, at)

    def output(
        self, matrix: Tensor, keys: Tensor, width: int, groups: int, at: tuple[int, int]
    ) -> Tensor:
        """The column, for all queries."""
        return matrix[at[0] : at[0] + width, 0]

    def question(
        self,
        size: tuple[int, int],
        keys: Tensor,
        directions: Tensor,
        units: Tensor | None,
        groups: int,
        at: tuple[int, int],
    ) -> Functional:
        """α the output's unit, β = 1."""
        return Functional(asked(directions, units, at[0], size[0]), one(directions))
