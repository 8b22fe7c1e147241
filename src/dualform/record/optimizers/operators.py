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

    def is_in(self, other: Part) -> bool:
        """Whether both have the very same basis."""
        pairs = zip(self.Q, other.Q, strict=True)
        return all(a is b or _same_memory(a, b) for a, b in pairs)


@dataclass(frozen=True)
class Turned:
    """`G ↦ Σ c Q (D ∘ Qᵀ G)`: elementwise in other bases, so its own adjoint.

    >>> swap = torch.eye(2).flip(0)
    >>> scaled = Turned.of((swap,), torch.tensor([1.0, 10.0]))
    >>> apply(scaled + 2 * scaled, torch.ones(2)), len((scaled + scaled).parts)
    (tensor([30.,  3.]), 1)
    """

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, Q: Basis, D: Tensor) -> Turned:
        """A single one."""
        return cls((Part(Q, D),))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameters it is for."""
        return tuple(self.parts[0].D.shape)

    def __call__(self, dense: Tensor) -> Tensor:
        """On anything whose last dimensions are the parameter's."""
        found = self.parts[0](dense)
        for part in self.parts[1:]:
            found += part(dense)
        return found

    def __mul__(self, number: float) -> Turned:
        return Turned(tuple(replace(part, c=part.c * number) for part in self.parts))

    __rmul__ = __mul__

    def __add__(self, other: Turned) -> Turned:
        """The sum; parts that share a basis become one."""
        parts = list(self.parts)
        for new in other.parts:
            at = next((i for i, part in enumerate(parts) if part.is_in(new)), None)
            if at is None:
                parts.append(new)
            else:
                old = parts[at]
                parts[at] = Part(new.Q, old.c * old.D + new.c * new.D)
        return Turned(tuple(part for part in parts if abs(part.c) > FADED) or other.parts)


def along(matrices: Sequence[Tensor | None], dense: Tensor) -> Tensor:
    """`G ×₁ A₁ ×₂ A₂ …` along the last dimensions; None leaves one as it is.

    >>> along([None, torch.ones(1, 3)], torch.eye(2, 3)).tolist()
    [[1.0], [1.0]]
    """
    found = dense.clone()
    for at, matrix in enumerate(matrices, start=dense.ndim - len(matrices)):
        if matrix is not None:
            found = torch.tensordot(found, matrix.to(found), ([at], [1])).movedim(-1, at)
    return found


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
