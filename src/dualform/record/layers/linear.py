"""`y = W x + b`: the keys are the inputs, the values the errors at the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dualform.record.layers.letters import matmul_letters
from dualform.record.layers.product import product_use
from dualform.record.layers.use import (
    Finder,
    Function,
    LayerKind,
    Seen,
    Site,
    Use,
    book_terms,
    place,
)


class Linear(LayerKind):
    """`F.linear(x, W, b)`, and with it `nn.Linear`, attention's projections and LoRA.

    >>> F.linear in Linear.functions
    True
    """

    functions = (F.linear,)

    def use(
        self, find: Finder, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> Use | None:
        """Keys are the inputs as they are."""
        return matrix_use(find, out, False, *args, **kwargs)


class MatrixProduct(LayerKind):
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
            return found and Use(found.site, out, weight.mT, lambda error: error.mT)
        if bias is not None or not (isinstance(x, Tensor) and isinstance(weight, Tensor)):
            return None
        return product_use(find, matmul_letters(x.ndim, weight.ndim), (x, weight), out)


def matrix_use(
    find: Finder, out: Any, swapped: bool, input: Any, weight: Any, bias: Any = None
) -> Use | None:
    """A matrix product with a weight, whichever of weight and bias are trained."""
    W, b = find(weight), find(bias)
    first = W or b
    if first is None or not isinstance(input, Tensor):
        return None
    key = (swapped, place(W), place(b), find.axis)
    site = find.site(
        key, lambda: Site(first.label, book_terms(W, b, swapped=swapped), axis=find.axis)
    )
    if site is None:
        return None
    if W is None:
        return Use(site, out, lambda: input[..., :0])  # an offset needs no keys
    return Use(site, out, input)
