"""Functions made of others: the calls inside them are what leaves rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import FunctionType
from typing import Any

from torch.nn import functional as F

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
        twin = find.guard(_undelegated, func)
        if twin is None:  # recording has ended
            return func(*args, **kwargs), None
        return inside(twin, args, kwargs, axis=1), None


@cache
def _undelegated(func: Any) -> Function:
    """The same function without its first lines, which hand the whole call to whoever watches."""
    scope = {**func.__globals__, "has_torch_function": lambda _: False}
    twin = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    twin.__kwdefaults__ = func.__kwdefaults__
    return twin
