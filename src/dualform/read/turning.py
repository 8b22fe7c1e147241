"""Questions to gradients that an optimizer turns into other bases, such as SOAP's.

In the basis of some steps `H_t = c Q (D_t ∘ Qᵀ ·) + rest_t · tail`, and the tail, what later bases
make of a gradient, is the same for all of them. So a question is turned into a basis once, and put
through a tail once; a step costs one multiplication for each element, as under Adam.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from dualform.ledger import Term
from dualform.memory.blocks import Bilinear, Functional, Sides, matrix_shape
from dualform.optimizers import Operator, Turned, along
from dualform.optimizers.operators import Basis, same_basis

KEPT = 1 << 26
"""How many numbers questions may have together, one for each element of the parameter, to be kept
in a basis; beyond that they are turned anew for each step, some at a time."""


def can_turn(question: Functional | Bilinear, shape: tuple[int, ...], term: Term) -> bool:
    """Whether rows can be turned as the question is: their sides are the parameter's dimensions."""
    size = len(question) * torch.Size(shape).numel()
    sides = term.view == "rows" or (term.view == "flat" and len(shape) == 1)
    return sides and term.groups == 1 and size <= KEPT and (len(shape) <= 2 or term.at == (0, 0))


class Turning:
    """Some questions to one parameter, in the basis of the steps that are asked now.

    >>> swap, rows = torch.eye(2).flip(0).double(), Sides(torch.eye(2), None)
    >>> operator = Turned.of((swap,), torch.tensor([1.0, 10.0]).double())
    >>> question = Bilinear(torch.tensor([[[2.0], [3.0]]]).double())
    >>> Turning(question, (2,)).answers(operator, rows.double())[:, 0].tolist()
    [20.0, 3.0]
    """

    def __init__(
        self,
        question: Functional | Bilinear,
        shape: tuple[int, ...],
        device: torch.device | str = "cpu",
    ) -> None:
        height = matrix_shape(shape, "rows")[0]
        dense = question if isinstance(question, Bilinear) else question.dense(height)
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
            self._turned = _turn(operator.part.Q, self._asked)
        if operator.tail is not None and (fresh or operator.tail is not self._tail):
            self._later = _unturned(operator.part.Q, self._put_through(operator.tail))
        matrices = self._turned * (operator.part.D * operator.part.c)
        if operator.tail is not None:
            matrices.add_(self._later, alpha=operator.rest)
        seen = Bilinear(matrices.reshape(len(matrices), len(matrices[0]), -1))
        return seen.of(turned_rows(operator.part.Q, rows, operator.shape))

    def _put_through(self, tail: Turned) -> Tensor:
        """What a tail makes of the questions, from what its own tail made of them."""
        if tail is self._tail and self._through is not None:
            return self._through
        found = tail.part(self._asked)
        if tail.tail is not None:
            known = tail.tail is self._tail and self._through is not None
            before = self._through if known else tail.tail(self._asked)
            assert before is not None
            found.add_(before, alpha=tail.rest)
        self._tail, self._through = tail, found
        return found


Chain: TypeAlias = list[tuple[Turned, dict[int, float]]]
"""Bases in the order of time: what each makes of gradients, with the shares of the steps before."""


class Later:
    """What steps leave to later bases: each a share of a tail.

    Together they are sums over all that came before a basis, and each basis is applied once.

    >>> first, second = (Turned.of((torch.eye(2),), torch.ones(2)) for _ in range(2))
    >>> later = Later()
    >>> later.own(1, first + second * 0.5).parts == [first.part]
    True
    >>> [(tail is second, numbers) for chain in later.chains() for tail, numbers in chain]
    [(True, {1: 0.5})]
    """

    def __init__(self) -> None:
        self._shares: dict[int, tuple[float, Turned]] = {}

    def own(self, step: int, operator: Operator) -> Operator:
        """The part of a step's operator in its own basis; the rest is kept for later."""
        if not isinstance(operator, Turned) or operator.tail is None:
            return operator
        self._shares[step] = (operator.rest, operator.tail)
        return Turned(operator.part)

    def chains(self) -> Iterator[Chain]:
        """Bases that follow each other; a new chain begins where a momentum was lost."""
        known: set[int] = set()
        for _, first in (self._shares[step] for step in sorted(self._shares)):
            if id(first) not in known:
                yield [(tail, self._of(tail, known)) for tail in _following(first)]

    def _of(self, tail: Turned, known: set[int]) -> dict[int, float]:
        """The shares of a tail that no chain has had yet."""
        if id(tail) in known:
            return {}
        known.add(id(tail))
        return {step: share for step, (share, of) in self._shares.items() if of is tail}


def _following(tail: Turned | None) -> Iterator[Turned]:
    while tail is not None:
        yield tail
        tail = tail.tail


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
    if rows.b is None:
        return Sides(a, None)
    if len(inner) == 1:
        return Sides(a, _side(others[0], rows.b, left, inner[0]))
    return Sides(a, _turn(tuple(others), rows.b.reshape(-1, *inner)).flatten(1))


def _side(Q: Tensor | None, part: Tensor, start: int, size: int) -> Tensor:
    """`Qᵀ` on vectors of which a part is given, the rest being zero."""
    if Q is None:
        return F.pad(part, (start, size - start - part.shape[1]))
    return part @ Q[start : start + part.shape[1]].to(part)


def _turn(Q: Basis, dense: Tensor) -> Tensor:
    """`Qᵀ` along the last dimensions."""
    return along([None if one is None else one.T for one in Q], dense)


def _unturned(Q: Basis, dense: Tensor) -> Tensor:
    """`Q⁻¹`, to be asked of turned rows: bases are orthogonal only as far as they were rounded."""
    return along([None if one is None else torch.linalg.inv(one) for one in Q], dense)
