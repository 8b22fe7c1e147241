"""The contract of a form: what it outputs, what rows add, and what queries ask agree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from dualform.memory.forms import Form
from dualform.testing.operators import close


class FormContract(ABC):
    """Inherit, write `form` and `keys`, and the whole suite runs on your form.

    ```python
    class TestOuter(FormContract):
        def form(self): return Outer()
        def keys(self, count): return torch.randn(count, 4)
    ```
    """

    outputs: ClassVar[int] = 6
    """How many outputs a query has."""
    size: ClassVar[tuple[int, int]] = (6, 4)
    """Height and width of the block."""
    margins: ClassVar[tuple[tuple[int, int], ...]] = ((0, 0), (2, 3))
    """How much larger the matrix is than the block, above and to the left of it."""
    groups: ClassVar[tuple[int, ...]] = (1,)
    """In how many groups it can be tried."""

    @abstractmethod
    def form(self) -> Form:
        """The form under test."""

    @abstractmethod
    def keys(self, count: int) -> Tensor:
        """Random keys of some rows."""

    def problems(self) -> list[tuple[Tensor, Tensor, Tensor, int, tuple[int, int]]]:
        """Matrices, keys and errors of seven rows, groups, and where the block begins."""
        torch.manual_seed(0)
        found = []
        for groups, at in [(g, at) for g in self.groups for at in self.margins]:
            if groups > 1 and at != (0, 0):
                continue
            size = (self.size[0] + at[0], self.size[1] // groups + at[1])
            matrix = torch.randn(size, dtype=torch.float64)
            keys, errors = self.keys(7), torch.randn(7, self.outputs, dtype=torch.float64)
            if keys.is_floating_point():
                keys = keys.double()
            found.append((matrix, keys, errors, groups, at))
        return found

    def test_rows_are_the_gradient(self) -> None:
        """The sum of what rows add is the gradient of the errors' sum along the output."""
        for matrix, keys, errors, groups, at in self.problems():
            weight = matrix.clone().requires_grad_()
            out = self.form().output(weight, keys, self.outputs, groups, at)
            (out * errors).sum().backward()  # type: ignore[no-untyped-call]
            assert weight.grad is not None
            rows = self.form().rows(keys, errors, groups, at)
            close(rows.total(torch.ones(7, dtype=torch.float64), tuple(matrix.shape)), weight.grad)

    def test_a_question_is_the_output(self) -> None:
        """The matrix's answer is the output along the direction, for single outputs and all."""
        for matrix, keys, directions, groups, at in self.problems():
            units = torch.arange(7) % self.outputs
            single = torch.eye(self.outputs, dtype=torch.float64)[units]
            for along, asked in ((directions, None), (single, units)):
                out = self.form().output(matrix, keys, self.outputs, groups, at)
                size = (matrix.shape[0], matrix.shape[1])
                question = self.form().question(size, keys, along, asked, groups, at)
                close(question.at(matrix), (out * along).sum(1))

    def test_rows_answer(self) -> None:
        """Each row's answer is that of its block."""
        for matrix, keys, errors, groups, at in self.problems():
            rows = self.form().rows(keys, errors, groups, at)
            size = (matrix.shape[0], matrix.shape[1])
            question = self.form().question(size, self.keys(7).to(keys), errors, None, groups, at)
            one = torch.ones(1, dtype=torch.float64)
            blocks = [rows[at : at + 1].total(one, size) for at in range(7)]
            close(rows.answers(question), torch.stack([question.at(block) for block in blocks]))

    def test_a_block_is_as_large_as_it_says(self) -> None:
        """No more numbers of the matrix are touched by a row."""
        matrix, keys, errors, groups, at = self.problems()[0]
        rows, one = self.form().rows(keys, errors, groups, at), torch.ones(1, dtype=torch.float64)
        touched = int((rows[:1].total(one, tuple(matrix.shape)) != 0).sum())
        assert touched == self.form().block(self.outputs, self.size[1])
