"""Functions made of others: the calls inside them are what leaves rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import FunctionType
from typing import Any

from torch.nn import functional as F
from torch.overrides import has_torch_function

from dualform.layers.use import Finder, Function, Inside, LayerKind


class AttentionForward(LayerKind):
    """`F.multi_head_attention_forward`: its projections are linear maps of (position, sample, …).

    >>> F.multi_head_attention_forward in AttentionForward.functions
    True
    """

    functions = (F.multi_head_attention_forward,)

    def see(
        self, find: Finder, inside: Inside, func: Function, args: Sequence[Any], kwargs: Any
    ) -> tuple[Any, None]:
        """Only the calls inside leave rows."""
        twin = find.guard(undelegated, func)
        if twin is None:  # recording has ended, or torch has another function
            return func(*args, **kwargs), None
        return inside(twin, args, kwargs, axis=1), None


@cache
def undelegated(func: Any) -> Function | None:
    """The same function, which does not ask first whether somebody watches; None without one.

    Functions written in Python ask `has_torch_function`, and hand their whole call to whoever
    watches. The copy sees, by whatever name it has there, a function that says no.
    """
    if not isinstance(func, FunctionType):
        return None
    scope = {n: _nobody if x is has_torch_function else x for n, x in func.__globals__.items()}
    twin = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    twin.__kwdefaults__ = func.__kwdefaults__
    asks = any(scope.get(name) is _nobody for name in func.__code__.co_names)
    return twin if asks else None


def _nobody(_: Any) -> bool:
    return False
