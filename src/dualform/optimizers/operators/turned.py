"""One number for each element in another basis: the coefficients of SOAP.

In the basis of some steps `H_t = c Q (D_t ∘ Qᵀ ·) + rest_t · tail`, and the tail, what later bases
make of a gradient, is the same for all of them. So a question is turned into a basis once, and put
through a tail once; a step costs one multiplication for each element, as under Adam.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from dualform.memory.blocks import BilinearFunctional, Sides
from dualform.memory.shared import AnySides
from dualform.memory.views import View
from dualform.optimizers.operators.modewise import along
from dualform.optimizers.operators.operator import Coefficient, Memo, Operator, Question

Basis: TypeAlias = tuple[Tensor | None, ...]
"""An orthogonal matrix for each dimension of a parameter; None leaves it as it is."""
FADED = 2.0**-80
"""Parts of a sum that a momentum has let fade below this are left out: nothing can see them."""
KEPT = 1 << 26
"""How many numbers questions may have together, one for each element of the parameter, to be kept
in a basis; beyond that they are turned anew for each step, some at a time."""


@dataclass(frozen=True)
class TurnedPart:
    """`G ↦ c Q (D ∘ Qᵀ G)`."""

    Q: Basis
    D: Tensor
    c: float = 1.0

    def __call__(self, dense: Tensor) -> Tensor:
        there = turned(self.Q, dense)
        return along(self.Q, there.mul_(self.D.to(there)).mul_(self.c))


@dataclass(frozen=True, eq=False)
class Turned(Operator):
    """`G ↦ c Q (D ∘ Qᵀ G) + rest · tail(G)`: elementwise in one basis after the other.

    Its own adjoint. Steps that share a basis share what later bases make of a gradient, their tail,
    up to a number: whoever asks them all applies it once.

    >>> swap = torch.eye(2).flip(0)
    >>> scaled = Turned.of((swap,), torch.tensor([1.0, 10.0]))
    >>> (scaled + 2 * scaled).apply(torch.ones(2)), len((scaled + scaled).parts)
    (tensor([30.,  3.]), 1)
    """

    part: TurnedPart
    tail: Turned | None = None
    rest: float = 0.0
    multiple: tuple[float, Turned] | None = None
    """What it is a multiple of: that is what becomes a tail, so that steps share theirs."""

    @classmethod
    def of(cls, Q: Basis, D: Tensor) -> Turned:
        """A single one."""
        return cls(TurnedPart(Q, D))

    @property
    def parts(self) -> list[TurnedPart]:
        """One for each basis, up to those that have faded."""
        found, at, share = [self.part], self.tail, self.rest
        while at is not None and abs(share * at.part.c) > FADED:
            found.append(replace(at.part, c=at.part.c * share))
            share, at = share * at.rest, at.tail
        return found

    def apply(self, dense: Tensor) -> Tensor:
        """The sum over all parts."""
        first, *others = self.parts
        found = first(dense)
        for part in others:
            found += part(dense)
        return found

    @property
    def adjoint(self) -> Turned:
        """Itself."""
        return self

    def scaled(self, number: float) -> Turned:
        """The same times a number; it remembers what it is a multiple of."""
        part, (scale, of) = replace(self.part, c=self.part.c * number), self._as_multiple
        return Turned(part, self.tail, self.rest * number, (scale * number, of))

    def summed(self, other: Coefficient) -> Operator:
        """The sum with a single one: where their bases differ, the other is its tail."""
        if not isinstance(other, Turned) or not (self.tail is None or other.tail is None):
            return super().summed(other)
        one, sum_ = (self, other) if self.tail is None else (other, self)
        if not same_basis(one.part.Q, sum_.part.Q):
            rest, tail = sum_._as_multiple
            return Turned(one.part, tail, rest)
        D = one.part.c * one.part.D + sum_.part.c * sum_.part.D
        return Turned(TurnedPart(one.part.Q, D), sum_.tail, sum_.rest)

    def answers(self, question: Question, rows: AnySides, view: View, memo: Memo) -> Tensor:
        """From the question in this operator's basis, which the memo has for the next step."""
        if not isinstance(rows, Sides) or not can_turn(question, rows, view):
            return super().answers(question, rows, view, memo)
        if Turned not in memo:
            memo[Turned] = Turning(question, view.shape, rows.a.device)
        turning: Turning = memo[Turned]
        return turning.answers(self, rows)

    @property
    def own(self) -> Turned:
        """The part in its own basis."""
        return self if self.tail is None else Turned(self.part)

    @property
    def shared(self) -> tuple[float, Turned] | None:
        """Its tail, what later bases make of a gradient, and its share of that."""
        return None if self.tail is None else (self.rest, self.tail)

    @property
    def _as_multiple(self) -> tuple[float, Turned]:
        return (1.0, self) if self.multiple is None else self.multiple


def same_basis(one: Basis, other: Basis) -> bool:
    """Whether both are the very same, not only equal.

    >>> same_basis((None, torch.eye(2)), (None, torch.eye(2)))
    False
    """
    pairs = zip(one, other, strict=True)
    return all(a is b or _same_memory(a, b) for a, b in pairs)


def _same_memory(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.data_ptr() == other.data_ptr()


def can_turn(question: Question, rows: Sides, view: View) -> bool:
    """Whether rows can be turned as the question is: their sides are the parameter's dimensions."""
    size = len(question) * math.prod(view.shape)
    placed = len(view.shape) <= 2 or rows.at == (0, 0)
    return view.has_own_sides and placed and size <= KEPT


class Turning:
    """Some questions to one parameter, in the basis of the steps that are asked now.

    >>> swap, rows = torch.eye(2).flip(0).double(), Sides(torch.eye(2), None)
    >>> operator = Turned.of((swap,), torch.tensor([1.0, 10.0]).double())
    >>> question = BilinearFunctional(torch.tensor([[[2.0], [3.0]]]).double())
    >>> Turning(question, (2,)).answers(operator, rows.double())[:, 0].tolist()
    [20.0, 3.0]
    """

    def __init__(
        self,
        question: Question,
        shape: tuple[int, ...],
        device: torch.device | str = "cpu",
    ) -> None:
        dense = question.dense(shape[0] if shape else 1)
        self._asked = dense.matrices.to(device, torch.float64).reshape(-1, *shape)
        self._basis: Basis | None = None
        self._turned = self._later = self._asked
        """The questions in the basis, and there what the tail makes of them."""
        self._tail: Turned | None = None
        self._through: Tensor | None = None
        """The tail that questions were last put through, and what it made of them."""

    def answers(self, operator: Turned, rows: Sides) -> Tensor:
        """(rows, questions): what rows answer through the operator."""
        fresh = self._basis is None or not same_basis(operator.part.Q, self._basis)
        if fresh:
            self._basis = operator.part.Q
            self._turned = turned(operator.part.Q, self._asked)
        if operator.tail is not None and (fresh or operator.tail is not self._tail):
            self._later = _unturned(operator.part.Q, self._put_through(operator.tail))
        matrices = self._turned * (operator.part.D * operator.part.c)
        if operator.tail is not None:
            matrices.add_(self._later, alpha=operator.rest)
        seen = BilinearFunctional(matrices.reshape(len(matrices), len(matrices[0]), -1))
        return seen.of(turned_rows(operator.part.Q, rows, tuple(operator.part.D.shape)))

    def _put_through(self, tail: Turned) -> Tensor:
        """What a tail makes of the questions, from what its own tail made of them."""
        if tail is self._tail and self._through is not None:
            return self._through
        found = tail.part(self._asked)
        if tail.tail is not None:
            known = tail.tail is self._tail and self._through is not None
            before = self._through if known else tail.tail.apply(self._asked)
            assert before is not None
            found.add_(before, alpha=tail.rest)
        self._tail, self._through = tail, found
        return found


def turned_rows(Q: Basis, rows: Sides, shape: tuple[int, ...]) -> Sides:
    """Rows `a ⊗ b` as `Q₁ᵀ a ⊗ Q₂ᵀ b …`: whole, where they were a part of the parameter.

    >>> swap = torch.eye(2).flip(0)
    >>> turned_rows((swap, None), Sides(torch.tensor([0]), torch.ones(1, 3)), (2, 3)).a
    tensor([[0., 1.]])
    """
    (top, left), (first, *others), (height, *inner) = rows.at, Q, shape
    if rows.a.ndim > 1:
        a = _side(first, rows.a, top, height)
    else:
        a = rows.a + top if first is None else first[rows.a + top]
    if rows.b is None or not inner:
        return Sides(a, rows.b)
    if len(inner) == 1:
        return Sides(a, _side(others[0], rows.b, left, inner[0]))
    return Sides(a, turned(tuple(others), rows.b.reshape(-1, *inner)).flatten(1))


def _side(Q: Tensor | None, part: Tensor, start: int, size: int) -> Tensor:
    """`Qᵀ` on vectors of which a part is given, the rest being zero."""
    if Q is None:
        return F.pad(part, (start, size - start - part.shape[1]))
    return part @ Q[start : start + part.shape[1]].to(part)


def turned(Q: Basis, dense: Tensor) -> Tensor:
    """`Qᵀ` along the last dimensions."""
    return along([None if one is None else one.T for one in Q], dense)


def _unturned(Q: Basis, dense: Tensor) -> Tensor:
    """`Q⁻¹`, to be asked of turned rows: bases are orthogonal only as far as they were rounded."""
    return along([None if one is None else torch.linalg.inv(one) for one in Q], dense)
