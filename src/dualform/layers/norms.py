"""Normalizations: `y = γ ∘ x̂ + β`; the keys are the normalized inputs x̂."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional as F

from dualform.layers.use import (
    Finder,
    Function,
    LayerKind,
    Site,
    Use,
    book_terms,
    named,
)


class LayerNorm(LayerKind):
    """`F.layer_norm` and `F.rms_norm`: one scale for each element of the normalized shape.

    >>> F.rms_norm in LayerNorm.functions
    True
    """

    functions = (F.layer_norm, F.rms_norm)

    def use(
        self, find: Finder, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> Use | None:
        """Normalized again, without scale and offset."""
        if func is F.rms_norm:
            given = named(args, kwargs, "input normalized_shape weight eps")
        else:
            given = named(args, kwargs, "input normalized_shape weight bias eps", eps=1e-5)
        x, shape = given["input"], given["normalized_shape"]
        again = partial(func, x.detach(), shape, eps=given["eps"])
        return _use(find, given, out, again, len(shape))


class ChannelNorm(LayerKind):
    """`F.batch_norm`, `F.group_norm` and `F.instance_norm`: one scale for each channel.

    >>> F.batch_norm in ChannelNorm.functions
    True
    """

    functions = (F.batch_norm, F.group_norm, F.instance_norm)
    names: ClassVar = {
        F.batch_norm: "input running_mean running_var weight bias training momentum eps",
        F.group_norm: "input num_groups weight bias eps",
        F.instance_norm: "input running_mean running_var weight bias use_input_stats momentum eps",
    }

    def use(
        self, find: Finder, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> Use | None:
        """Normalized again, channels last."""
        given = named(args, kwargs, self.names[func], use_input_stats=True, eps=1e-5)
        if not any(find.each(given["weight"], given["bias"])):
            return None
        return _use(find, given, out, _again(func, given), channels=True)


def _again(func: Function, given: Mapping[str, Any]) -> Callable[[], Tensor]:
    """The normalization without scale and offset; running statistics as they are at the call."""
    x, eps = given["input"].detach(), given["eps"]
    if func is F.group_norm:
        return partial(func, x, given["num_groups"], eps=eps)
    if given["training" if func is F.batch_norm else "use_input_stats"]:
        own = {"training": True} if func is F.batch_norm else {}
        return partial(func, x, None, None, eps=eps, **own)
    mean, variance = given["running_mean"].clone(), given["running_var"].clone()
    return partial(F.batch_norm, x, mean, variance, training=False, eps=eps)


def _use(
    find: Finder,
    given: Mapping[str, Any],
    out: Tensor,
    keys: Callable[[], Tensor],
    dims: int = 1,
    channels: bool = False,
) -> Use | None:
    """A scale and an offset of normalized inputs; `channels` come second, and go last."""
    gamma, beta = find.each(given["weight"], given.get("bias"))
    first = gamma or beta
    if first is None:
        return None

    def build() -> Site:
        terms = book_terms(gamma, beta, "scale")
        return Site(first.label, terms, dims, dims, axis=0 if channels else find.axis)

    site = find.site(("norm", gamma, beta, dims, find.axis), build)
    if site is None:
        return None
    if channels:
        return Use(site, (out,), lambda: keys().movedim(1, -1), lambda error: error.movedim(1, -1))
    return Use(site, (out,), keys)
