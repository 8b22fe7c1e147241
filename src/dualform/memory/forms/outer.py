"""A matrix product: `y = P x`, and `a = error`, `b = input`."""

from __future__ import annotations

import torch
from torch import Tensor

from dualform.memory.blocks import BilinearFunctional, Functional, Sides
from dualform.memory.forms.form import Form, asked, placed
from dualform.memory.products import by_group


class OuterForm(Form):
    """Matrix products, convolutions (a row is a patch), recurrent layers (a row is a time step).

    >>> rows = OuterForm().rows(keys=torch.ones(3, 2), values=torch.ones(3, 4))
    >>> rows.total(torch.ones(3), (4, 2)).unique()
    tensor([3.], dtype=torch.float64)
    """

    name = "outer"
    is_product = has_width = is_cast = True

    def rows(
        self, keys: Tensor, values: Tensor, groups: int = 1, at: tuple[int, int] = (0, 0)
    ) -> Sides:
        """`error ⊗ input`."""
        return Sides(values, keys if groups == 1 else by_group(keys, groups), at)

    def output(
        self, matrix: Tensor, keys: Tensor, width: int, groups: int, at: tuple[int, int]
    ) -> Tensor:
        """`x Pᵀ`, group by group."""
        (top, left), keys = at, keys.double()
        if groups == 1:
            return keys @ matrix[top : top + width, left : left + keys.shape[1]].T
        weight = by_group(matrix[None], groups)[0]
        return torch.einsum("goi,qgi->qgo", weight, by_group(keys, groups)).flatten(1)

    def question(
        self,
        size: tuple[int, int],
        keys: Tensor,
        directions: Tensor,
        units: Tensor | None,
        groups: int,
        at: tuple[int, int],
    ) -> Functional | BilinearFunctional:
        """α the output's unit, β the input."""
        keys = keys.double()
        if groups == 1:
            alpha = asked(directions, units, at[0], size[0])
            return Functional(alpha, placed(keys, at[1], size[1]))
        grouped, each = by_group(keys, groups), directions.shape[1] // groups
        if units is not None:
            return Functional(units, grouped[torch.arange(len(units)), units // each])
        along = by_group(directions, groups)
        return BilinearFunctional((along[:, :, :, None] * grouped[:, :, None, :]).flatten(1, 2))

    def block(self, outputs: int, inputs: int) -> int:
        """All of its inputs, for each output."""
        return outputs * inputs
