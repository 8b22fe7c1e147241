"""What a coefficient can be: a number, one number for each element, or made of matrices.

Numbers are floats and elementwise coefficients are tensors of the parameter's shape; torch's own
arithmetic serves both. Matrices act from one side, along every dimension, or turn a parameter into
another basis and back; each mixes with numbers, and those that are added up with their own kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sided:
    """`G ↦ A G` (left) or `G ↦ G A` (right), for parameters that are matrices.

    >>> double = Sided(2 * torch.eye(2))
    >>> (double * 3 + 1).matrix.tolist()
    [[7.0, 0.0], [0.0, 7.0]]
    >>> apply(double, torch.ones(2, 3)).tolist()
    [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]
    """

    matrix: Tensor
    left: bool = True

    def __mul__(self, other: float | Sided) -> Sided:
        """The composition, `other` first; both act on the same side."""
        if not isinstance(other, Sided):
            return Sided(self.matrix * other, self.left)
        pair = (self.matrix, other.matrix) if self.left else (other.matrix, self.matrix)
        return Sided(torch.matmul(*pair), self.left)

    __rmul__ = __mul__

    def __add__(self, other: float | Sided) -> Sided:
        if isinstance(other, Sided):
            return Sided(self.matrix + other.matrix, self.left)
        return Sided(self.matrix + other * torch.eye(len(self.matrix)).to(self.matrix), self.left)

    __radd__ = __add__


@dataclass(frozen=True)
class Modewise:
    """`G ↦ G ×₁ A₁ ×₂ A₂ …`: a symmetric matrix along each dimension, so its own adjoint.

    For a matrix that is `A₁ G A₂`: rank one stays rank one.

    >>> apply(Modewise((2 * torch.eye(2), torch.ones(3, 3))) * 0.5, torch.eye(2, 3)).tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """

    matrices: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameters it is for."""
        return tuple(len(matrix) for matrix in self.matrices)

    def __call__(self, dense: Tensor) -> Tensor:
        """On anything whose last dimensions are the parameter's."""
        return along(self.matrices, dense)

    def __mul__(self, number: float) -> Modewise:
        first, *others = self.matrices
        return Modewise((first * number, *others))

    __rmul__ = __mul__


Basis: TypeAlias = tuple[Tensor | None, ...]
"""An orthogonal matrix for each dimension of a parameter; None leaves it as it is."""
FADED = 2.0**-80
"""Parts of a sum that a momentum has let fade below this are left out: nothing can see them."""


@dataclass(frozen=True)
class Part:
    """`G ↦ c Q (D ∘ Qᵀ G)`."""

    Q: Basis
    D: Tensor
    c: float = 1.0

    def __call__(self, dense: Tensor) -> Tensor:
        there = along([None if Q is None else Q.T for Q in self.Q], dense)
        return along(self.Q, there.mul_(self.D.to(there)).mul_(self.c))


@dataclass(frozen=True, eq=False)
class Turned:
    """`G ↦ c Q (D ∘ Qᵀ G) + rest · tail(G)`: elementwise in one basis after the other.

    Its own adjoint. Steps that share a basis share what later bases make of a gradient, their tail,
    up to a number: whoever asks them all applies it once.

    >>> swap = torch.eye(2).flip(0)
    >>> scaled = Turned.of((swap,), torch.tensor([1.0, 10.0]))
    >>> apply(scaled + 2 * scaled, torch.ones(2)), len((scaled + scaled).parts)
    (tensor([30.,  3.]), 1)
    """

    part: Part
    tail: Turned | None = None
    rest: float = 0.0
    multiple: tuple[float, Turned] | None = None
    """What it is a multiple of: that is what becomes a tail, so that steps share theirs."""

    @classmethod
    def of(cls, Q: Basis, D: Tensor) -> Turned:
        """A single one."""
        return cls(Part(Q, D))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameters it is for."""
        return tuple(self.part.D.shape)

    @property
    def parts(self) -> list[Part]:
        """One for each basis, up to those that have faded."""
        found, at, share = [self.part], self.tail, self.rest
        while at is not None and abs(share * at.part.c) > FADED:
            found.append(replace(at.part, c=at.part.c * share))
            share, at = share * at.rest, at.tail
        return found

    def __call__(self, dense: Tensor) -> Tensor:
        """On anything whose last dimensions are the parameter's."""
        first, *others = self.parts
        found = first(dense)
        for part in others:
            found += part(dense)
        return found

    def __mul__(self, number: float) -> Turned:
        part, (scale, of) = replace(self.part, c=self.part.c * number), self._as_multiple
        return Turned(part, self.tail, self.rest * number, (scale * number, of))

    __rmul__ = __mul__

    def __add__(self, other: Turned) -> Turned:
        """The sum, of which one must be single: where the bases differ, the other is its tail."""
        one, sum_ = (self, other) if self.tail is None else (other, self)
        assert one.tail is None, "two sums over bases are never added"
        if not same_basis(one.part.Q, sum_.part.Q):
            rest, tail = sum_._as_multiple
            return Turned(one.part, tail, rest)
        D = one.part.c * one.part.D + sum_.part.c * sum_.part.D
        return Turned(Part(one.part.Q, D), sum_.tail, sum_.rest)

    @property
    def _as_multiple(self) -> tuple[float, Turned]:
        return (1.0, self) if self.multiple is None else self.multiple


def along(matrices: Sequence[Tensor | None], dense: Tensor) -> Tensor:
    """`G ×₁ A₁ ×₂ A₂ …` along the last dimensions; None leaves one as it is.

    >>> along([None, torch.ones(1, 3)], torch.eye(2, 3)).tolist()
    [[1.0], [1.0]]
    """
    found = dense
    for at, matrix in enumerate(matrices, start=dense.ndim - len(matrices)):
        if matrix is not None:
            found = _along_one(matrix.to(found), found, dense.ndim - at)
    return found.clone() if found is dense else found


def _along_one(matrix: Tensor, dense: Tensor, back: int) -> Tensor:
    """Along the dimension that is so many from the end."""
    if back == 1:
        return dense @ matrix.T
    if back == 2:
        return matrix @ dense
    found: Tensor = torch.tensordot(dense, matrix, ([-back], [1])).movedim(-1, -back)
    return found


def same_basis(one: Basis, other: Basis) -> bool:
    """Whether both are the very same, not only equal.

    >>> same_basis((None, torch.eye(2)), (None, torch.eye(2)))
    False
    """
    pairs = zip(one, other, strict=True)
    return all(a is b or _same_memory(a, b) for a, b in pairs)


def _same_memory(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.data_ptr() == other.data_ptr()


Operator: TypeAlias = float | Tensor | Sided | Modewise | Turned
Value: TypeAlias = Tensor | float
"""What operators act on: of the parameter's shape, or 0.0 for nothing at all."""


def apply(operator: Operator, gradient: Tensor) -> Tensor:
    """The operator on a gradient, or on anything of the parameter's shape.

    >>> apply(-0.5, torch.tensor([2.0, 4.0]))
    tensor([-1., -2.])
    """
    if isinstance(operator, Modewise | Turned):
        return operator(gradient)
    if not isinstance(operator, Sided):
        return operator * gradient
    return operator.matrix @ gradient if operator.left else gradient @ operator.matrix


def added(total: Value, operator: Operator, value: Value, sign: float = 1.0) -> Value:
    """`total ± operator(value)`, in place where there is a total; nothing stays a number.

    >>> added(torch.ones(2), torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), sign=-1.0)
    tensor([-2., -7.])
    >>> added(0.0, 2.0, torch.ones(2)), added(0.0, 2.0, 0.0)
    (tensor([2., 2.]), 0.0)
    """
    if isinstance(value, float) or _is_zero(operator):
        return total
    if isinstance(total, float):
        found = apply(operator, value)
        return found if sign == 1 else found.mul_(sign)
    if isinstance(operator, Tensor):
        return total.addcmul_(operator, value, value=sign)
    if isinstance(operator, float):
        return total.add_(value, alpha=sign * operator)
    return total.add_(apply(operator, value), alpha=sign)


def times(first: Operator, second: Operator) -> Operator:
    """The composition, `second` first; zero stays a number and costs nothing.

    >>> times(2.0, torch.tensor([1.0, 2.0])), times(torch.ones(2), 0.0)
    (tensor([2., 4.]), 0.0)
    """
    if _is_zero(first) or _is_zero(second):
        return 0.0
    one: Any = first  # operators that meet are of one kind, or one of them is a number
    found: Operator = one * second
    return found


def plus(first: Operator, second: Operator) -> Operator:
    """The sum; zero is left out.

    >>> plus(Sided(torch.eye(1)), 1.0).matrix, plus(0.0, 2.0)
    (tensor([[2.]]), 2.0)
    """
    if _is_zero(second):
        return first
    if _is_zero(first):
        return second
    one: Any = first
    found: Operator = one + second
    return found


def _is_zero(operator: Operator) -> bool:
    return isinstance(operator, float) and operator == 0
