"""Parameters as sums of rank-one rows, and linear questions to them.

Whatever a layer does with a parameter, each of its training rows adds one rank-one block `a ⊗ b` to
the parameter seen as a matrix P; `memory.forms` says which.

A question to the parameter is a functional `Σ α_a P_ab β_b`: one output of a layer asks with α the
output's unit and β the layer's input. So a row's answer is `(α·a)(b·β)`, for every kind of layer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby

import torch
from torch import Tensor

from dualform.memory.products import bilinear_answers, by_group, summed_products


def as_matrix(parameter: Tensor, view: str, groups: int = 1) -> Tensor:
    """A parameter as a matrix: by "rows", "swapped" (second dimension first), "flat", or "01|2".

    The last kind names the dimensions that make up the height, a bar, and those of the width.

    >>> as_matrix(torch.zeros(8, 3, 5, 5), "rows").shape
    torch.Size([8, 75])
    >>> as_matrix(torch.zeros(8, 3, 5, 5), "swapped", groups=2).shape
    torch.Size([6, 100])
    >>> as_matrix(torch.zeros(4, 6, 5), "02|1").shape  # four experts of 6 inputs and 5 outputs
    torch.Size([20, 6])
    """
    if view == "flat":
        return parameter.reshape(-1, 1)
    if view == "rows":
        return parameter.reshape(len(parameter), -1)
    if "|" in view:
        down, across = sides_of(view)
        height = math.prod(parameter.shape[dim] for dim in down)
        return parameter.permute(*down, *across).reshape(height, -1)
    inputs, outputs, *kernel = parameter.shape
    split = parameter.reshape(groups, inputs // groups, outputs, *kernel).transpose(1, 2)
    return split.reshape(groups * outputs, -1)


def sides_of(view: str) -> tuple[list[int], list[int]]:
    """The dimensions that a view such as "02|1" puts into the height, and into the width.

    >>> sides_of("02|1")
    ([0, 2], [1])
    """
    down, _, across = view.partition("|")
    return [int(dim) for dim in down], [int(dim) for dim in across]


@cache
def keeps_order(view: str) -> bool:
    """Whether the matrix has the parameter's elements in their own order, so that none moves.

    >>> [keeps_order(view) for view in ("rows", "flat", "swapped", "01|2", "02|1")]
    [True, True, False, True, False]
    """
    if "|" not in view:
        return view != "swapped"
    dims = [dim for side in sides_of(view) for dim in side]
    return dims == sorted(dims)


@cache
def matrix_shape(shape: tuple[int, ...], view: str, groups: int = 1) -> tuple[int, int]:
    """Height and width of a parameter of this shape, as a matrix.

    >>> matrix_shape((8, 3, 5, 5), "swapped", groups=2)
    (6, 100)
    """
    height, width = as_matrix(torch.empty(shape, device="meta"), view, groups).shape
    return height, width


def from_matrix(matrix: Tensor, shape: tuple[int, ...], view: str, groups: int = 1) -> Tensor:
    """The inverse of `as_matrix`.

    >>> p = torch.randn(4, 3, 2)
    >>> torch.equal(from_matrix(as_matrix(p, "swapped", 2), (4, 3, 2), "swapped", 2), p)
    True
    >>> torch.equal(from_matrix(as_matrix(p, "20|1"), (4, 3, 2), "20|1"), p)
    True
    """
    if keeps_order(view):
        return matrix.reshape(shape)
    if "|" in view:
        dims = [dim for side in sides_of(view) for dim in side]
        back = sorted(range(len(dims)), key=dims.__getitem__)
        return matrix.reshape([shape[dim] for dim in dims]).permute(back).contiguous()
    inner = (groups, shape[1], shape[0] // groups, *shape[2:])
    return matrix.reshape(inner).transpose(1, 2).reshape(shape)


class RowBlocks(ABC):
    """Rows, each of which adds a block to a matrix."""

    @abstractmethod
    def __getitem__(self, rows: slice | Tensor) -> RowBlocks: ...

    @abstractmethod
    def total(self, coefficients: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The sum of all blocks, each times its coefficient, as a float64 matrix of this shape."""

    def totals(
        self,
        parts: Sequence[slice],
        coefficients: Tensor,
        shape: tuple[int, ...],
        view: str,
        groups: int = 1,
    ) -> list[Tensor]:
        """The total of each of some parts of the rows, as parameters of this shape."""
        found: list[Tensor] = []
        for some in self.matrix_totals(parts, coefficients, matrix_shape(shape, view, groups)):
            if keeps_order(view):
                found.extend(some.reshape(len(some), *shape).unbind())
            else:
                found.extend(from_matrix(matrix, shape, view, groups) for matrix in some)
        return found

    def matrix_totals(
        self, parts: Sequence[slice], coefficients: Tensor, shape: tuple[int, ...]
    ) -> Iterator[Tensor]:
        """(some, *shape): the totals of the parts as matrices, those together that come at once."""
        for part in parts:
            yield self[part].total(coefficients[part], shape)[None]

    def equal_totals(self, count: int, coefficients: Tensor, shape: tuple[int, ...]) -> Tensor:
        """(count, *shape): the totals of so many parts of as many rows, as matrices."""
        each = len(coefficients) // count
        parts = [slice(at, at + each) for at in range(0, len(coefficients), each)]
        return torch.cat(list(self.matrix_totals(parts, coefficients, shape)))


@dataclass(frozen=True)
class Sides(RowBlocks):
    """Rows as blocks `a ⊗ b`; the blocks begin at `at`.

    `a` is (rows, height), or (rows,) integers that each name one row of the matrix.
    `b` is (rows, width), or (rows, groups, width) where every group of `a` has its own, or None
    for 1.

    >>> rows = Sides(torch.ones(3, 4), torch.ones(3, 2))
    >>> rows.total(torch.ones(3), (4, 2)).unique()
    tensor([3.], dtype=torch.float64)
    """

    a: Tensor
    b: Tensor | None
    at: tuple[int, int] = (0, 0)

    def __len__(self) -> int:
        return len(self.a)

    def __getitem__(self, rows: slice | Tensor) -> Sides:
        return Sides(self.a[rows], None if self.b is None else self.b[rows], self.at)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.a.device

    def double(self) -> Sides:
        """The same in float64."""
        a = self.a if self.a.ndim == 1 else self.a.double()
        return Sides(a, None if self.b is None else self.b.double(), self.at)

    def weighted(self, weights: Tensor) -> Sides:
        """Each times a number, on the side where it costs less."""
        a, b, column = self.a, self.b, weights[:, None]
        if b is None:
            b = column.to(a)
        elif b.ndim == 2 and (a.ndim == 1 or b.shape[1] <= a.shape[1]):
            b = b * column.to(b)
        else:
            a = a * column.to(a)
        return Sides(a, b, self.at)

    def answers(self, question: Functional | BilinearFunctional) -> Tensor:
        """(rows, questions): the answer of each row to each question."""
        return question.of(self)

    def total(self, coefficients: Tensor, shape: tuple[int, ...]) -> Tensor:
        """`Σ c a ⊗ b` over the rows, as a float64 matrix of this shape."""
        top, left = self.at
        if self.a.ndim == 1:
            assert self.b is not None
            total = torch.zeros(shape, dtype=torch.float64, device=self.a.device)
            scaled = self.b.double() * coefficients[:, None]
            total[:, left : left + scaled.shape[1]].index_add_(0, self.a + top, scaled)
            return total
        scaled = self.a.double() * coefficients[:, None]
        if self.b is None:
            block = scaled.sum(0)[:, None]
        elif self.b.ndim == 2:
            block = summed_products(scaled, self.b)
        else:
            grouped = by_group(scaled, self.b.shape[1])
            block = torch.einsum("rgo,rgi->goi", grouped, self.b.double()).flatten(0, 1)
        return self._placed(block, shape)

    def matrix_totals(
        self, parts: Sequence[slice], coefficients: Tensor, shape: tuple[int, ...]
    ) -> Iterator[Tensor]:
        """Those of neighboring parts of as many rows by one product."""
        for some in _alike(parts):
            if len(some) == 1 or not self._plain:
                yield from super().matrix_totals(some, coefficients, shape)
                continue
            rows = slice(some[0].start, some[-1].stop)
            yield self[rows].equal_totals(len(some), coefficients[rows], shape)

    def equal_totals(self, count: int, coefficients: Tensor, shape: tuple[int, ...]) -> Tensor:
        """(count, *shape): those of parts of as many rows, by one product."""
        if not self._plain:
            return super().equal_totals(count, coefficients, shape)
        rows = len(coefficients) // count  # there may be none
        a = (self.a.double() * coefficients[:, None]).reshape(count, rows, self.a.shape[1])
        b = None if self.b is None else self.b.double().reshape(count, rows, self.b.shape[1])
        return self._placed(a.sum(1)[:, :, None] if b is None else a.mT @ b, shape)

    @property
    def _plain(self) -> bool:
        """Whether each row is a vector on both sides."""
        return self.a.ndim == 2 and (self.b is None or self.b.ndim == 2)

    def _placed(self, blocks: Tensor, shape: tuple[int, ...]) -> Tensor:
        """(..., *shape): blocks where they begin, and zeros around them."""
        if blocks.shape[-2:] == shape:
            return blocks
        (top, left), (height, width) = self.at, blocks.shape[-2:]
        around = (left, shape[1] - left - width, top, shape[0] - top - height)
        return torch.nn.functional.pad(blocks, around)


def _alike(parts: Sequence[slice]) -> Iterator[list[slice]]:
    """Parts that follow one another and have the same number of rows, together."""
    sized = [(part.stop - part.start, at, part) for at, part in enumerate(parts)]
    for _, some in groupby(sized, key=lambda one: (one[0], one[2].start - one[1] * one[0])):
        yield [part for _, _, part in some]


@dataclass(frozen=True)
class Functional:
    """Questions to a matrix, `Σ α_a P_ab β_b`: one for each row of α and β.

    `a` is (questions,) integers that each name one row of the matrix, or dense (questions, height).

    >>> ask = Functional(torch.tensor([1]), torch.tensor([[10.0, 100.0]]))
    >>> ask.at(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([430.], dtype=torch.float64)
    >>> ask.of(Sides(torch.tensor([[0.0, 1.0]]), torch.tensor([[3.0, 4.0]])))
    tensor([[430.]])
    """

    a: Tensor
    b: Tensor

    def __len__(self) -> int:
        return len(self.b)

    def __getitem__(self, some: slice) -> Functional:
        return Functional(self.a[some], self.b[some])

    @property
    def units(self) -> bool:
        """Whether each question is about one row of the matrix."""
        return self.a.ndim == 1

    def at(self, matrix: Tensor) -> Tensor:
        """(questions,): the answers of a whole matrix."""
        wide, beta = matrix.double(), self.b.double()
        rows = wide[self.a] if self.units else self.a.double() @ wide
        return (rows * beta).sum(1)

    def of(self, rows: Sides) -> Tensor:
        """(rows, questions): the answer of each row, in the rows' precision."""
        along_b = self._along_b(rows)
        return along_b.mul_(self._along_a(rows))

    def times(self, number: float) -> Functional:
        """Asked of a multiple of the matrix."""
        return Functional(self.a, self.b * number)

    def scaled(self, coefficients: Tensor) -> Functional | BilinearFunctional:
        """Asked of a matrix whose elements are multiplied by these first."""
        if self.units:
            lines = coefficients[self.a.to(coefficients.device)]
            return Functional(self.a, self.b * lines.to(self.b))
        return BilinearFunctional(self.a[:, :, None] * self.b[:, None, :] * coefficients.to(self.b))

    def dense(self, height: int) -> BilinearFunctional:
        """The same with a matrix for each question."""
        a = torch.eye(height).to(self.b)[self.a] if self.units else self.a
        return BilinearFunctional(a[:, :, None] * self.b[:, None, :])

    def left(self, matrix: Tensor) -> Functional:
        """Asked of `A P` for this A."""
        matrix = matrix.to(self.b)
        return Functional(matrix[self.a] if self.units else self.a @ matrix, self.b)

    def right(self, matrix: Tensor) -> Functional:
        """Asked of `P A` for this A."""
        return Functional(self.a, self.b @ matrix.to(self.b).T)

    def _along_a(self, rows: Sides) -> Tensor:
        a, top = self.a.to(rows.a.device), rows.at[0]
        if rows.a.ndim == 1:
            places = rows.a + top
            return places[:, None] == a[None] if self.units else a.T[places]
        height = rows.a.shape[1]
        if not self.units:
            return rows.a @ a[:, top : top + height].to(rows.a).T
        local = a - top
        inside = (local >= 0) & (local < height)
        chosen = rows.a.index_select(1, local.clamp(0, height - 1))
        whole = not inside.is_cuda and bool(inside.all())  # to ask a GPU is to wait for it
        return chosen if whole else chosen * inside

    def _along_b(self, rows: Sides) -> Tensor:
        left = rows.at[1]
        if rows.b is None:
            return self.b[:, left].to(rows.a).expand(len(rows), -1).clone()
        width = rows.b.shape[-1]
        beta = self.b[:, left : left + width].to(rows.b)
        if rows.b.ndim == 2:
            return rows.b @ beta.T
        assert self.units, "where groups have keys of their own, a dense question is bilinear"
        size = rows.a.shape[1] // rows.b.shape[1]
        group = ((self.a.to(rows.a.device) - rows.at[0]) // size).clamp(0, rows.b.shape[1] - 1)
        return torch.einsum("rqi,qi->rq", rows.b[:, group], beta)


@dataclass(frozen=True)
class BilinearFunctional:
    """Questions with a matrix each, `Σ D_ab P_ab`.

    >>> BilinearFunctional(torch.eye(2)[None]).at(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([5.], dtype=torch.float64)
    """

    matrices: Tensor

    def __len__(self) -> int:
        return len(self.matrices)

    def __getitem__(self, some: slice) -> BilinearFunctional:
        return BilinearFunctional(self.matrices[some])

    def at(self, matrix: Tensor) -> Tensor:
        """(questions,): the answers of a whole matrix."""
        return (self.matrices.double() * matrix.double()).sum((1, 2))

    def times(self, number: float) -> BilinearFunctional:
        """Asked of a multiple of the matrix."""
        return BilinearFunctional(self.matrices * number)

    def scaled(self, coefficients: Tensor) -> BilinearFunctional:
        """Asked of a matrix whose elements are multiplied by these first."""
        return BilinearFunctional(self.matrices * coefficients.to(self.matrices.device))

    def dense(self, height: int) -> BilinearFunctional:
        """The same: there is a matrix for each question."""
        return self

    def left(self, matrix: Tensor) -> BilinearFunctional:
        """Asked of `A P` for this A."""
        return BilinearFunctional(matrix.T.to(self.matrices) @ self.matrices)

    def right(self, matrix: Tensor) -> BilinearFunctional:
        """Asked of `P A` for this A."""
        return BilinearFunctional(self.matrices @ matrix.T.to(self.matrices))

    def of(self, rows: Sides) -> Tensor:
        """(rows, questions): the answer of each row."""
        (top, left), b = rows.at, rows.b
        if b is not None and rows.a.ndim == 1:  # only the lines that are asked for are moved
            places = (rows.a + top).to(self.matrices.device)
            lines = self.matrices[:, places, left : left + b.shape[-1]]
            return torch.einsum("qri,ri->rq", lines.to(b), b)
        D = self.matrices.to(rows.a.device)
        if b is None:
            return rows.a @ D[:, top : top + rows.a.shape[1], left].to(rows.a).T
        D = D[:, :, left : left + b.shape[-1]].to(b)
        D = D[:, top : top + rows.a.shape[1]]
        if b.ndim == 2:
            return bilinear_answers(rows.a, D, b)
        groups = b.shape[1]
        return torch.einsum("rgo,qgoi,rgi->rq", by_group(rows.a, groups), by_group(D, groups), b)
