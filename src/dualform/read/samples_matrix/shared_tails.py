"""What operators of different steps share is applied once to all of them, not once a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from dualform.optimizers import Operator

Chain: TypeAlias = list[tuple[Operator, dict[int, float]]]
"""What steps share, in the order of time, each with how much of it the steps before it have."""


class Later:
    """What steps share with later ones, such as bases that come after their own.

    Together they are sums over all that came before a basis, and each basis is applied once.

    >>> import torch
    >>> from dualform.optimizers import Turned
    >>> first, second = (Turned.of((torch.eye(2),), torch.ones(2)) for _ in range(2))
    >>> later = Later()
    >>> later.own(1, first + second * 0.5).parts == [first.part]
    True
    >>> [(tail is second, numbers) for chain in later.chains() for tail, numbers in chain]
    [(True, {1: 0.5})]
    """

    def __init__(self) -> None:
        self._shares: dict[int, tuple[float, Operator]] = {}

    def own(self, step: int, operator: Operator) -> Operator:
        """The part of a step's operator in its own basis; the rest is kept for later."""
        if operator.shared is not None:
            self._shares[step] = operator.shared
        return operator.own

    def chains(self) -> Iterator[Chain]:
        """Bases that follow each other; a new chain begins where a momentum was lost."""
        known: set[int] = set()
        for _, first in (self._shares[step] for step in sorted(self._shares)):
            if id(first) not in known:
                yield [(tail, self._of(tail, known)) for tail in _following(first)]

    def _of(self, tail: Operator, known: set[int]) -> dict[int, float]:
        """The shares of a tail that no chain has had yet."""
        if id(tail) in known:
            return {}
        known.add(id(tail))
        return {step: share for step, (share, of) in self._shares.items() if of is tail}


def _following(tail: Operator) -> Iterator[Operator]:
    yield tail
    while tail.shared is not None:
        tail = tail.shared[1]
        yield tail


def share_of(tail: Operator) -> float:
    """How much of the next link of a chain a link has.

    >>> from dualform.optimizers import Number
    >>> share_of(Number(2.0))
    0.0
    """
    return 0.0 if tail.shared is None else tail.shared[0]
