"""Free parameters: offsets, scales, class tokens, positions; broadcast against a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dualform.layers.use import (
    Finder,
    Found,
    Function,
    LayerKind,
    Site,
    Use,
    book_terms,
)

T = torch.Tensor


class Offset(LayerKind):
    """`x + p` and `x - p`: the values are the errors.

    >>> torch.add in Offset.functions
    True
    """

    functions = (
        torch.add, T.add, T.add_, T.__add__, T.__radd__, T.__iadd__,
        torch.sub, T.sub, T.sub_, T.__sub__, T.__rsub__, T.__isub__, torch.rsub,
    )  # fmt: skip

    def use(
        self, find: Finder, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> Use | None:
        """The parameter may be either operand; a table read that is broadcast is seen here too."""
        if len(args) < 2:
            return None
        sign = [1.0, kwargs.get("alpha", 1) * (-1.0 if "sub" in func.__name__ else 1.0)]
        if func in (T.__rsub__, torch.rsub):
            sign = [sign[1], sign[0]]
        for operand, factor in zip(args[:2], sign, strict=True):
            if (found := find(operand)) is not None:
                return offset_use(find, found, out, factor)
            added, read = find.recent.get(id(operand), (None, None))
            if added is not None and read is not None and added.shape != out.shape:
                return _broadcast_read(read, out, factor)
        return None


class Scale(LayerKind):
    """`x * p`: the keys are what is scaled.

    >>> torch.mul in Scale.functions
    True
    """

    functions = (torch.mul, T.mul, T.__mul__, T.__rmul__, F.prelu, torch.prelu)

    def use(
        self, find: Finder, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> Use | None:
        """The parameter may be either operand; PReLU scales what is negative, by channel."""
        if len(args) < 2:
            return None
        if func in (F.prelu, torch.prelu):
            found, x = find(args[1]), args[0]
            if found is None:
                return None
            shape = [1, -1, *[1] * (x.ndim - 2)] if x.ndim > 1 and len(args[1]) > 1 else [-1]
            return _scale(find, found, out, lambda: x.detach().clamp_max(0), shape)
        for operand, x in (args[:2], args[1::-1]):
            if find.computes and find.original(operand) is not None:
                return None  # a weight is computed: the layer that it goes into leaves rows
            if (found := find(operand)) is not None and isinstance(x, Tensor):
                return _scale(find, found, out, x.detach, list(operand.shape))
        return None


class Expansion(LayerKind):
    """`p.expand(…)`, `p.repeat(…)`: a class token handed to every sample.

    >>> torch.Tensor.expand in Expansion.functions
    True
    """

    functions = (T.expand, T.expand_as, torch.broadcast_to, T.broadcast_to)

    def use(
        self, find: Finder, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> Use | None:
        """What comes back from the copies is the error."""
        found = find(args[0])
        return None if found is None else offset_use(find, found, out)


class Repetition(LayerKind):
    """`p.repeat(…)` along dimensions in which the parameter has a single entry.

    >>> torch.Tensor.repeat in Repetition.functions
    True
    """

    functions = (T.repeat,)

    def use(
        self, find: Finder, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> Use | None:
        """As for an expansion."""
        found = find(args[0])
        if found is None:
            return None
        lined = [1] * (out.ndim - args[0].ndim) + list(args[0].shape)
        fits = all(p in (1, o) for p, o in zip(lined, out.shape, strict=True))
        return offset_use(find, found, out) if fits else None


def offset_use(find: Finder, found: Found, out: Tensor, factor: float = 1.0) -> Use | None:
    """A parameter that is added, broadcast to the shape of the output."""
    shape = list(found.given.shape)
    to_rows = rows_in_shape(shape, out.ndim)
    site = _site(find, found, "sum")

    def value(error: Tensor) -> Tensor:
        return to_rows(error if factor == 1 else error * factor)

    empty = out.new_empty(()).expand(out.shape)  # for keys of width 0; it does not hold the output
    return None if site is None else Use(site, (out,), lambda: to_rows(empty)[..., :0], value)


def _scale(
    find: Finder, found: Found, out: Tensor, x: Callable[[], Tensor], shape: list[int]
) -> Use | None:
    to_rows, shape_of_out = rows_in_shape(shape, out.ndim), out.shape
    if found.given.numel() > 1:
        site = _site(find, found, "scale")
        return (
            None
            if site is None
            else Use(site, (out,), lambda: to_rows(x().expand(shape_of_out)), to_rows)
        )
    site = _site(find, found, "sum")

    count = shape_of_out[0] if shape_of_out else 1

    def value(error: Tensor) -> Tensor:  # a single number: one row a sample says it all
        shares = error * x()
        return shares.flatten(1).sum(1, keepdim=True) if shares.ndim > 1 else shares.view(count, 1)

    return None if site is None else Use(site, (out,), lambda: x().new_empty(count, 0), value)


def _site(find: Finder, found: Found, form: str) -> Site | None:
    key = (form, found, find.axis)
    return find.site(key, lambda: Site(found.label, book_terms(found, form=form), axis=find.axis))


def rows_in_shape(shape: list[int], ndim: int) -> Callable[[Tensor], Tensor]:
    """Moves the dimensions a parameter of this shape covers to the end, and flattens them.

    >>> rows_in_shape([3, 1, 1], 4)(torch.zeros(8, 3, 5, 5)).shape
    torch.Size([8, 5, 5, 3])
    """
    lined = [1] * (ndim - len(shape)) + shape
    covered = [at for at, size in enumerate(lined) if size != 1]
    order = [at for at in range(ndim) if at not in covered] + covered
    start = ndim - len(covered)

    def to_rows(tensor: Tensor) -> Tensor:
        moved = tensor.permute(order)
        return moved.flatten(start) if covered else moved[..., None]

    return to_rows


def _broadcast_read(read: Use, out: Tensor, factor: float) -> Use:
    """A table read without samples of its own, seen where it is added to every sample."""
    read.superseded = True
    places = read.key
    assert isinstance(places, Tensor)

    def value(error: Tensor) -> Tensor:
        return error if factor == 1 else error * factor

    return Use(read.site, (out,), places.expand(out.shape[:-1]), value)
