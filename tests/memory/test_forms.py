"""Every form under its contract, a new one among them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dualform.errors import FormatVersionError
from dualform.memory.blocks import Functional, Sides
from dualform.memory.forms import (
    FORMS,
    Form,
    LookupForm,
    OffsetForm,
    OuterForm,
    ScaleForm,
    form_named,
)
from dualform.memory.forms.form import asked
from dualform.testing import FormContract


class TestOuter(FormContract):
    groups = (1, 2)

    def form(self) -> Form:
        return OuterForm()

    def keys(self, count: int) -> Tensor:
        return torch.randn(count, 4)


class TestOffset(FormContract):
    size, margins = (6, 1), ((0, 0), (2, 0))

    def form(self) -> Form:
        return OffsetForm()

    def keys(self, count: int) -> Tensor:
        return torch.randn(count, 3)


class TestScale(TestOffset):
    def form(self) -> Form:
        return ScaleForm()

    def keys(self, count: int) -> Tensor:
        return torch.randn(count, 6)


class TestLookup(FormContract):
    outputs, size = 4, (6, 4)

    def form(self) -> Form:
        return LookupForm()

    def keys(self, count: int) -> Tensor:
        return torch.randint(6, (count, 1))


class Mean(Form):
    """`y = p · mean(x)`: a form of this test alone."""

    name = "mean"

    def rows(self, keys: Tensor, values: Tensor, groups: int = 1, at: Any = (0, 0)) -> Sides:
        return Sides(values, keys.mean(1, keepdim=True), at)

    def output(self, matrix: Tensor, keys: Tensor, width: int, groups: int, at: Any) -> Tensor:
        return keys.mean(1, keepdim=True) * matrix[at[0] : at[0] + width, 0]

    def question(
        self, size: Any, keys: Tensor, directions: Tensor, units: Any, groups: int, at: Any
    ) -> Functional:
        alpha = asked(directions, units, at[0], size[0])
        return Functional(alpha, keys.mean(1, keepdim=True))


class TestMean(TestOffset):
    def form(self) -> Form:
        return Mean()


def test_every_form_is_found_by_its_name() -> None:
    assert [form_named(name).name for name in FORMS] == ["outer", "sum", "scale", "lookup"]
    with pytest.raises(FormatVersionError, match="'mean', and this dualform knows outer, sum"):
        form_named("mean")
