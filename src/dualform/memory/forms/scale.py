"""A scale: `y = p ∘ x`, and `a = error ∘ input`, `b = 1`."""

from __future__ import annotations

from torch import Tensor

from dualform.memory.blocks import Functional, Sides
from dualform.memory.forms.form import Form, asked, one


class ScaleForm(Form):
    """Normalizations, layer scales.

    >>> import torch
    >>> ScaleForm().rows(keys=torch.tensor([[2.0, 3.0]]), values=torch.tensor([[10.0, 1.0]])).a
    tensor([[20.,  3.]])
    """

    name = "scale"

    def rows(
        self, keys: Tensor, values: Tensor, groups: int = 1, at: tuple[int, int] = (0, 0)
    ) -> Sides:
        """Errors times inputs."""
        return Sides(values * keys, None, at)

    def output(
        self, matrix: Tensor, keys: Tensor, width: int, groups: int, at: tuple[int, int]
    ) -> Tensor:
        """`p ∘ x`."""
        return keys.double() * matrix[at[0] : at[0] + keys.shape[1], 0]

    def question(
        self,
        size: tuple[int, int],
        keys: Tensor,
        directions: Tensor,
        units: Tensor | None,
        groups: int,
        at: tuple[int, int],
    ) -> Functional:
        """α the output's unit, β the unit's input."""
        keys, beta = keys.double(), one(directions)
        if units is None:
            directions = directions * keys
        else:
            beta = keys.gather(1, units[:, None])
        return Functional(asked(directions, units, at[0], size[0]), beta)
