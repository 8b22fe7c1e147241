"""Products of parameters of which a part runs always, and the rest in the long suite."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def in_turn(*lists: Iterable[Any], every: int = 2) -> list[Any]:
    """All combinations, as parameters of a test; one of `every` so many is not among the long ones.

    Each value of each list is among them, with the values of the others in turn.

    >>> [given.values for given in in_turn("ab", (1, 2, 3)) if not given.marks]
    [('a', 1), ('a', 3), ('b', 2)]
    """
    found = []
    for places in product(*(list(enumerate(values)) for values in lists)):
        is_long = sum(at for at, _ in places) % every
        marks = [pytest.mark.long] if is_long else []
        found.append(pytest.param(*(value for _, value in places), marks=marks))
    return found
