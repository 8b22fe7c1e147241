"""`y = W x + b`: the keys are the inputs, the values the errors at the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dualform.layers.derived import (
    DerivedWeight,
    Normed,
    Spectral,
    derived_use,
    made_of,
    normed_use,
    spectral_use,
)
from dualform.layers.letters import matmul_letters
from dualform.layers.product import product_use
from dualform.layers.use import (
    Finder,
    Found,
    Function,
    Inside,
    LayerKind,
    Rows,
    Seen,
    Site,
    Together,
    Use,
    book_terms,
    named,
)


class CastInputs(LayerKind):
    """Functions that autocast computes in 16 bits, and whose inputs it casts."""

    def see(
        self, find: Finder, inside: Inside, func: Function, args: Sequence[Any], kwargs: Any
    ) -> tuple[Any, Seen | None]:
        """Makes the call with the input as autocast casts it."""
        return super().see(find, inside, func, find.guard(as_cast, find, args) or args, kwargs)


class Linear(CastInputs):
    """`F.linear(x, W, b)`, and with it `nn.Linear`, attention's projections and LoRA.

    >>> F.linear in Linear.functions
    True
    """

    functions = (F.linear,)

    def use(
        self, find: Finder, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> Seen | None:
        """Keys are the inputs as they are; a weight may be computed from parameters."""
        if not find.computes:
            return matrix_use(find, out, False, *args, **kwargs)
        given = named(args, kwargs, "input weight bias")
        made = None if find(given["weight"]) else made_of(find, given["weight"])
        if made is None:
            return matrix_use(find, out, False, **given)
        if isinstance(made, Spectral):
            return _spectral_use(find, made, out, **given)
        if isinstance(made, Normed):
            return _normed_use(find, made, out, **given)
        return _derived_use(find, made, out, **given)


class MatrixProduct(CastInputs):
    """`x @ W` and `b + x @ W`: weights whose second dimension counts the outputs.

    >>> torch.addmm in MatrixProduct.functions
    True
    """

    functions = (
        torch.matmul,
        torch.mm,
        torch.addmm,
        torch.Tensor.matmul,
        torch.Tensor.mm,
        torch.Tensor.addmm,
        torch.Tensor.__matmul__,
        torch.Tensor.__rmatmul__,
    )

    def use(
        self, find: Finder, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> Seen | None:
        """The parameter may stand on either side; from the left it acts on columns."""
        bias = None
        if "addmm" in func.__name__:
            if kwargs.get("alpha", 1) != 1 or kwargs.get("beta", 1) != 1:
                return None
            bias, *args = args
        if len(args) != 2:
            return None
        x, weight = args if func is not torch.Tensor.__rmatmul__ else reversed(args)
        if find(weight) is not None and weight.ndim == 2:
            return matrix_use(find, out, True, x, weight, bias)
        if find(x) is not None and x.ndim == 2 and weight.ndim > 1 and bias is None:
            found = matrix_use(find, out, False, weight.mT, x)
            return found and Use(found.site, (out,), weight.mT, lambda error: error.mT)
        if bias is not None or not (isinstance(x, Tensor) and isinstance(weight, Tensor)):
            return None
        return product_use(find, matmul_letters(x.ndim, weight.ndim), (x, weight), out)


def as_cast(find: Finder, args: Sequence[Any]) -> Sequence[Any]:
    """A call's arguments, with inputs in the type that autocast would give them anyway.

    The kernel keeps its input in that type for the backward pass. What is seen is then the same
    tensor, and not a second one of 32 bits, which would be gone otherwise. Parameters stay as they
    are: autocast casts them once for all their uses.
    """
    if not any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
        return args
    return [arg if find(arg) is not None else _cast(arg) for arg in args]


def _cast(arg: Any) -> Any:
    if not isinstance(arg, Tensor) or isinstance(arg, torch.nn.Parameter):
        return arg
    device = arg.device.type
    if arg.dtype != torch.float32 or not torch.is_autocast_enabled(device):
        return arg
    return arg.to(torch.get_autocast_dtype(device))


def matrix_use(
    find: Finder, out: Any, swapped: bool, input: Any, weight: Any, bias: Any = None
) -> Use | None:
    """A matrix product with a weight, whichever of weight and bias are trained."""
    W, b = find.each(weight, bias)
    return _use(find, out, swapped, input, W, b)


def _use(
    find: Finder,
    out: Any,
    swapped: bool,
    input: Any,
    W: Found | None,
    b: Found | None,
    divisor: Tensor | None = None,
) -> Use | None:
    first = W or b
    if first is None or not isinstance(input, Tensor):
        return None
    key = (swapped, W, b, find.axis)
    site = find.site(
        key, lambda: Site(first.label, book_terms(W, b, swapped=swapped), axis=find.axis)
    )
    if site is None:
        return None
    if W is None:
        return Use(site, (out,), lambda: input[..., :0])  # an offset needs no keys
    return Use(site, (out,), input if divisor is None else lambda: input.detach() / divisor)


def _spectral_use(
    find: Finder, made: Spectral, out: Tensor, input: Tensor, weight: Tensor, bias: Any
) -> Seen | None:
    """A matrix product with `P / σ`, and the rows that come of σ."""

    def shares(error: Tensor) -> Tensor:
        return (error * F.linear(input, weight)).sum(-1, keepdim=True)

    use = _use(find, out, False, input, made.original, find(bias), made.sigma)
    return Together.of(use, spectral_use(find, made, out, out.shape[:-1], 1, shares))


def _normed_use(
    find: Finder, made: Normed, out: Tensor, input: Tensor, weight: Tensor, bias: Any
) -> Seen | None:
    """A matrix product with `s v`, and the rows that come of the norm."""
    terms = book_terms(made.v)
    site = find.site(
        ("normed", made.v, find.axis),
        lambda: Site("" if made.v is None else made.v.label, terms, axis=find.axis, aside=True),
    )

    def product(error: Tensor | None, s: Tensor | None) -> Rows:
        assert site is not None
        x = input.detach()
        if error is None or s is None:
            return Rows(site, x, None)
        return Rows(site, x * s[0], error) if made.dim == 1 else Rows(site, x, error * s.flatten())

    def shares(error: Tensor, V: Tensor) -> Tensor:
        if made.dim == 1:
            return input.detach() * (error @ V)
        c = error * F.linear(input.detach(), V)
        return c if made.dim == 0 else c.sum(-1, keepdim=True)

    term = next(iter(terms.values()), None)
    of_weight = normed_use(
        find, made, out, out.shape[:-1], term, None if site is None else product, shares
    )
    return Together.of(matrix_use(find, out, False, input, None, bias), of_weight)


def _derived_use(
    find: Finder, made: DerivedWeight, out: Tensor, input: Tensor, weight: Tensor, bias: Any
) -> Seen | None:
    """A matrix product with a computed weight: samples are told apart by the first dimension."""
    axis = find.axis or 0
    samples = input.shape[axis] if input.ndim > 1 else 1

    def gradients(error: Tensor) -> Tensor:
        e, x = (t.movedim(axis, 0) if t.ndim > 1 else t[None] for t in (error, input.detach()))
        e, x = (t.reshape(samples, -1, t.shape[-1]) for t in (e, x))
        return e.mT @ x

    of_weight = derived_use(find, made, out, samples, gradients)
    return Together.of(matrix_use(find, out, False, input, None, bias), of_weight)
