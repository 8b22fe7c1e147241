"""Experts in one tensor, `W[e]` for every expert e; rows are sorted by expert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor

from dualform.layers.letters import matmul_letters
from dualform.layers.product import product_use
from dualform.layers.use import (
    Finder,
    Found,
    Function,
    LayerKind,
    Rows,
    Seen,
    Split,
    named,
    outer_site,
)
from dualform.private import grouped_product


class GroupedProduct(LayerKind):
    """`F.grouped_mm(x, W, offs=…)`: the rows up to each offset meet the next matrix of W.

    >>> len(GroupedProduct.functions)
    1
    """

    functions = (grouped_product,)

    def use(
        self, find: Finder, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> Seen | None:
        """Only with a parameter as the second factor, and with nothing added."""
        given = named(args, kwargs, "mat_a mat_b offs bias out_dtype")
        x, weight, offsets = given["mat_a"], given["mat_b"], given["offs"]
        if given["bias"] is not None or weight.ndim != 3:
            return None
        if offsets is None:
            return product_use(find, matmul_letters(x.ndim, 3), (x, weight), out)
        found = find(weight)
        if found is None or x.ndim != 2:
            return None
        return Split((out,), partial(_sorted_rows, find, found, x, offsets))


def _sorted_rows(
    find: Finder, found: Found, x: Tensor, offsets: Tensor, error: Tensor | None
) -> Iterator[Rows]:
    """The rows of every expert that has any; those behind the last offset met none."""
    for expert, (start, end) in enumerate(pairwise([0, *offsets.tolist()])):
        one = found._replace(given=found.given[expert])
        site = outer_site(find, one, outputs=[1], inputs=[0]) if end > start else None
        if site is not None:
            yield Rows(site, x[start:end], None if error is None else error[start:end])
