"""A table that is read: `y = P[k]`, and `a` is the row's place, `b = error`."""

from __future__ import annotations

from torch import Tensor

from dualform.memory.blocks import Functional, Sides
from dualform.memory.forms.form import Form, placed


class LookupForm(Form):
    """Embeddings; keys are whole numbers.

    >>> import torch
    >>> LookupForm().rows(keys=torch.tensor([[7]]), values=torch.ones(1, 4)).a
    tensor([7])
    """

    name = "lookup"
    has_width = True
    has_sides = False

    def rows(
        self, keys: Tensor, values: Tensor, groups: int = 1, at: tuple[int, int] = (0, 0)
    ) -> Sides:
        """The errors, each at its place."""
        return Sides(keys[:, 0], values, at)

    def output(
        self, matrix: Tensor, keys: Tensor, width: int, groups: int, at: tuple[int, int]
    ) -> Tensor:
        """Rows of the table."""
        return matrix[keys[:, 0] + at[0], at[1] : at[1] + width]

    def question(
        self,
        size: tuple[int, int],
        keys: Tensor,
        directions: Tensor,
        units: Tensor | None,
        groups: int,
        at: tuple[int, int],
    ) -> Functional:
        """α the place, β the direction."""
        return Functional(keys[:, 0] + at[0], placed(directions, at[1], size[1]))
