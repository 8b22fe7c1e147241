"""What every operator does: a step's coefficient that acts on gradients, and on questions to them.

An operator `H` is a linear map of gradients to gradients. Reading needs four things of it. It
applies itself to a gradient. It acts on a question, so that the rows stay as they are. It restricts
itself to a part of the parameter's matrix. It is multiplied and added as coefficients of a
recursion. The base class does all four for any linear map, given `apply`, `adjoint` and `scaled`;
a type overrides what it does in less time or memory.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from dualform.memory.blocks import BilinearFunctional, Functional
from dualform.memory.shared import AnySides
from dualform.memory.views import Region, View

Question: TypeAlias = Functional | BilinearFunctional
Memo: TypeAlias = dict[type, Any]
"""What operators of one type remember of a question from one step to the next, by their type."""
DENSE = 1 << 24
"""How many numbers questions may have together once they are no longer of rank one."""


@dataclass(frozen=True)
class Restricted:
    """An operator whose result is needed in a part of the matrix only."""

    needs: Region
    """The part of a gradient that it takes to know that part of the result."""
    apply: Callable[[Tensor], Tensor]
    """(count, *needed) to (count, *part); what is handed in may be changed in place."""


class Operator(ABC):
    """A linear map of gradients: a coefficient that is more than a number.

    A new type writes `apply`, `adjoint` and `scaled`. Its tensors may be on another device or
    of another dtype than what they meet: it moves them with `.to(dense)`. The contract in
    `dualform.testing.OperatorContract` checks all the rest against a dense matrix.

    >>> class Reversed(Operator):
    ...     def __init__(self, number=1.0): self.number = number
    ...     def apply(self, dense): return self.number * dense.flip(-1)
    ...     @property
    ...     def adjoint(self): return self
    ...     def scaled(self, number): return Reversed(self.number * number)
    >>> (2 * Reversed() * Reversed() + 1.0).apply(torch.tensor([1.0, 10.0]))
    tensor([ 3., 30.])
    """

    __slots__ = ()
    is_dense: ClassVar[bool] = True
    """Whether a question through it is as large as the parameter: few are then asked at a time."""

    @abstractmethod
    def apply(self, dense: Tensor) -> Tensor:
        """`H G`, a new tensor, for anything whose last dimensions are the parameter's."""

    @property
    @abstractmethod
    def adjoint(self) -> Operator:
        """`Hᵀ`, for which `⟨D, H G⟩ = ⟨Hᵀ D, G⟩`."""

    @abstractmethod
    def scaled(self, number: float) -> Operator:
        """The operator times a number."""

    def composed(self, first: Coefficient) -> Operator:
        """The composition, `first` first; only asked for what is not a number."""
        return Composed(self, first)

    def summed(self, other: Coefficient) -> Operator:
        """The sum."""
        return Summed(self, other)

    def asked(self, question: Question, view: View) -> Question:
        """The question as it is put to a gradient, when this operator made the change of it."""
        dense = question.dense(view.size[0])
        return BilinearFunctional(view.through(self.adjoint.apply, dense.matrices))

    def answers(self, question: Question, rows: AnySides, view: View, memo: Memo) -> Tensor:
        """(rows, questions): what rows answer to a question that is asked through the operator.

        The same `memo` comes with every step that is asked the same question.
        """
        size = math.prod(view.shape)
        if not self.is_dense or len(question) * size <= DENSE:
            return rows.answers(self.asked(question, view))
        count = max(1, DENSE // size)
        pieces = [question[at : at + count] for at in range(0, len(question), count)]
        return torch.cat([rows.answers(self.asked(piece, view)) for piece in pieces], 1)

    def restricted(self, region: Region, view: View) -> Restricted:
        """The operator as far as a part of its result is concerned."""
        return Restricted(view.whole, lambda dense: region.of(view.through(self.apply, dense)))

    def diagonal(self, shape: tuple[int, ...]) -> Tensor | None:
        """One number for each element, if each goes its own way; None if elements are mixed."""
        return None

    @property
    def diagonals(self) -> Mapping[Any, float] | None:
        """Diagonals that steps share, with a number each, if it is made of them; None means 1."""
        return None

    def narrow(self) -> Operator:
        """The same in float32, where it is as large as the parameter."""
        return self

    @property
    def own(self) -> Operator:
        """The operator without what it shares with other steps."""
        return self

    @property
    def shared(self) -> tuple[float, Operator] | None:
        """What it shares with other steps, and how much of it; `H = own + number · shared`."""
        return None

    def __mul__(self, other: Coefficient) -> Operator:
        return self.scaled(other) if isinstance(other, float | int) else self.composed(other)

    def __rmul__(self, other: Coefficient) -> Operator:
        return self.scaled(other) if isinstance(other, float | int) else Composed(other, self)

    def __add__(self, other: Coefficient) -> Operator:
        return self.summed(other)

    __radd__ = __add__


Coefficient: TypeAlias = float | Tensor | Operator
"""What an optimizer multiplies by: a number, one number for each element, or an operator.

Numbers and tensors stay as they are while coefficients are multiplied and added: torch's own
arithmetic serves both. `as_operator` makes operators of them for whoever asks more of them."""


def apply(coefficient: Coefficient, gradient: Tensor) -> Tensor:
    """The coefficient on a gradient, or on anything of the parameter's shape.

    >>> apply(-0.5, torch.tensor([2.0, 4.0]))
    tensor([-1., -2.])
    """
    if isinstance(coefficient, Operator):
        return coefficient.apply(gradient)
    return coefficient * gradient


def _adjoint(coefficient: Coefficient) -> Coefficient:
    return coefficient.adjoint if isinstance(coefficient, Operator) else coefficient


@dataclass(frozen=True, eq=False)
class Composed(Operator):
    """`G ↦ A (B G)`, for types that are not closed under composition.

    >>> from dualform.optimizers.operators import Sided
    >>> both = Composed(torch.tensor([[1.0], [0.0]]), Sided(torch.ones(2, 2)))
    >>> both.apply(torch.ones(2, 1)).tolist(), both.adjoint.apply(torch.ones(2, 1)).tolist()
    ([[2.0], [0.0]], [[1.0], [1.0]])
    """

    last: Coefficient
    first: Coefficient

    def apply(self, dense: Tensor) -> Tensor:
        """One after the other."""
        return apply(self.last, apply(self.first, dense))

    @property
    def adjoint(self) -> Composed:
        """`Bᵀ Aᵀ`."""
        return Composed(_adjoint(self.first), _adjoint(self.last))

    def scaled(self, number: float) -> Composed:
        """With the last of them scaled."""
        return Composed(self.last * number, self.first)


@dataclass(frozen=True, eq=False)
class Summed(Operator):
    """`G ↦ A G + B G`, for types that are not closed under addition.

    A sum over many steps costs as many applications. A type that optimizers with momentum use
    should have a sum of its own.

    >>> from dualform.optimizers.operators import Modewise
    >>> (Modewise((torch.ones(2, 2),)) + 10.0).apply(torch.tensor([1.0, 2.0]))
    tensor([13., 23.])
    """

    one: Coefficient
    other: Coefficient

    def apply(self, dense: Tensor) -> Tensor:
        """Both, added."""
        return apply(self.one, dense) + apply(self.other, dense)

    @property
    def adjoint(self) -> Summed:
        """`Aᵀ + Bᵀ`."""
        return Summed(_adjoint(self.one), _adjoint(self.other))

    def scaled(self, number: float) -> Summed:
        """With both scaled."""
        return Summed(self.one * number, self.other * number)
