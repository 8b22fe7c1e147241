"""The contract of an operator: all that it does is what a dense matrix does."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from dualform.memory.blocks import BilinearFunctional, Functional, Sides
from dualform.memory.views import Region, View
from dualform.optimizers import Coefficient, Memo, Operator, apply


class OperatorContract(ABC):
    """Inherit, write `make` and `twin`, and the whole suite runs on your type of operator.

    ```python
    class TestElementwise(OperatorContract):
        def make(self, shape): return Elementwise(torch.randn(shape, dtype=torch.float64))
        def twin(self, operator, shape): return operator.numbers.flatten().diag()
    ```
    """

    shapes: ClassVar[tuple[tuple[int, ...], ...]] = ((4, 6), (6, 4), (5,), (4, 6, 2))
    """The parameters that the type is for."""

    @abstractmethod
    def make(self, shape: tuple[int, ...]) -> Operator:
        """A random operator on parameters of this shape, in float64."""

    @abstractmethod
    def twin(self, operator: Operator, shape: tuple[int, ...]) -> Tensor:
        """The same as a dense matrix, on gradients that are flattened."""

    def each(self) -> Iterator[tuple[tuple[int, ...], Operator, Tensor]]:
        """Every shape, with an operator and its twin."""
        for seed, shape in enumerate(self.shapes):
            torch.manual_seed(seed)
            operator = self.make(shape)
            yield shape, operator, self.twin(operator, shape)

    def test_apply(self) -> None:
        """`H G`, of one gradient and of many, in their own precision; gradients stay."""
        for shape, operator, twin in self.each():
            many = torch.randn(3, *shape, dtype=torch.float64)
            before, found = many.clone(), operator.apply(many)
            assert found.data_ptr() != many.data_ptr()
            assert torch.equal(many, before)
            close(found, (many.flatten(1) @ twin.T).view_as(many))
            close(operator.apply(many[0]), found[0])
            close(operator.apply(many.float()).double(), found, 1e-5)

    def test_adjoint(self) -> None:
        """`⟨D, H G⟩ = ⟨Hᵀ D, G⟩`."""
        for shape, operator, twin in self.each():
            close(dense(operator.adjoint, shape), twin.T)

    def test_composed_and_added(self) -> None:
        """With numbers, with one number for each element, and with its own type; both ways."""
        for shape, operator, twin in self.each():
            other, numbers = self.make(shape), torch.randn(shape, dtype=torch.float64)
            others: list[tuple[Coefficient, Tensor]] = [
                (2.5, 2.5 * torch.eye(len(twin)).to(twin)),
                (numbers, numbers.flatten().diag()),
                (other, self.twin(other, shape)),
            ]
            for second, matrix in others:
                close(dense(operator * second, shape), twin @ matrix)
                close(dense(second * operator, shape), matrix @ twin)
                close(dense(operator + second, shape), twin + matrix)
                close(dense(second + operator, shape), twin + matrix)
                both = (second + operator) * 0.5 + other * second
                expected = 0.5 * (twin + matrix) + others[-1][1] @ matrix
                close(dense(both, shape), expected)
                close(dense(both.adjoint, shape), expected.T)

    def test_asked(self) -> None:
        """`⟨D, H G⟩ = ⟨asked(D), G⟩`, however the parameter is seen, whatever is asked."""
        for shape, operator, _ in self.each():
            G = torch.randn(shape, dtype=torch.float64)
            for view in views(shape):
                after = view.matrix(operator.apply(G))
                for question in questions(*view.size):
                    asked = operator.asked(question, view)
                    close(asked.at(view.matrix(G)), question.at(after))

    def test_answers(self) -> None:
        """Each row's own answer, also where steps share a memo."""
        for shape, operator, twin in self.each():
            other = self.make(shape)
            steps = [(operator, twin), (other, self.twin(other, shape)), (operator, twin)]
            for view in (view for view in views(shape) if view.groups == 1):
                height, width = view.size
                sides = [torch.randn(4, side, dtype=torch.float64) for side in (height, width)]
                rows = Sides(sides[0], sides[1])
                blocks = torch.einsum("ra,rb->rab", *sides)
                for question in questions(height, width):
                    memo: Memo = {}
                    for step, matrix in steps:
                        found = step.answers(question, rows, view, memo)
                        through = view.through(partial(_by, matrix), blocks)
                        close(found, torch.stack([question.at(block) for block in through]))

    def test_restricted(self) -> None:
        """A part of the result, from the part of a gradient that it says it needs."""
        for shape, operator, _ in self.each():
            many = torch.randn(3, *shape, dtype=torch.float64)
            for view in views(shape):
                height, width = view.size
                before, after = (
                    torch.stack([view.matrix(one) for one in part])
                    for part in (many, operator.apply(many))
                )
                for rows in (slice(0, height), slice(height // 2, height)):
                    for columns in (slice(0, width), slice(0, (width + 1) // 2)):
                        region = Region(rows, columns)
                        part = operator.restricted(region, view)
                        close(part.apply(part.needs.of(before).clone()), region.of(after))

    def test_diagonal_narrow_and_shared(self) -> None:
        """What it says of itself is so."""
        for shape, operator, twin in self.each():
            numbers = operator.diagonal(shape)
            if numbers is not None:
                close(numbers.flatten().diag(), twin)
            close(dense(operator.narrow(), shape), twin, 1e-6)
            number, shared = operator.shared or (0.0, operator)
            close(dense(operator.own, shape) + number * dense(shared, shape), twin)


def _by(matrix: Tensor, many: Tensor) -> Tensor:
    return (many.flatten(1) @ matrix.T).view_as(many)


def dense(coefficient: Coefficient, shape: tuple[int, ...]) -> Tensor:
    """Any coefficient as a dense matrix on gradients that are flattened.

    >>> dense(2.0, (2,)).tolist()
    [[2.0, 0.0], [0.0, 2.0]]
    """
    size = math.prod(shape)
    units = torch.eye(size, dtype=torch.float64).reshape(size, *shape)
    return torch.stack([apply(coefficient, unit).flatten() for unit in units], 1)


def views(shape: tuple[int, ...]) -> list[View]:
    """The ways in which a parameter of this shape can be seen as a matrix.

    >>> [view.kind for view in views((4, 6))]
    ['rows', 'flat', 'swapped', '1|0']
    """
    found = [View(shape), View(shape, "flat")]
    if len(shape) > 1:
        found += [View(shape, "swapped"), View(shape, "|".join("10") + "2"[: len(shape) - 2])]
    if len(shape) > 2:
        found += [View(shape, groups=2), View(shape, "swapped", 2), View(shape, "02|1")]
    return found


def questions(height: int, width: int) -> list[Functional | BilinearFunctional]:
    """About single rows of a matrix, of rank one, and dense.

    >>> [type(question).__name__ for question in questions(3, 2)]
    ['Functional', 'Functional', 'BilinearFunctional']
    """
    b = torch.randn(3, width, dtype=torch.float64)
    units = Functional(torch.randint(height, (3,)), b)
    ranked = Functional(torch.randn(3, height, dtype=torch.float64), b)
    return [units, ranked, BilinearFunctional(torch.randn(3, height, width, dtype=torch.float64))]


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    """Asserts that both are equal, relative to the largest number.

    >>> close(torch.ones(2), torch.ones(2))
    """
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance * expected.abs().max().clamp_min(1e-300)
