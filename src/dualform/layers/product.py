"""`y = Σ W x` over some dimensions: whatever `einsum` can say in one equation.

A dimension of the parameter may be an output (it is in the result), an input (it is in the other
factors), or both. One that is both counts matrices, as that of experts does: each of them has a
stream of its own, since its rows are others. Dimensions of the result that the parameter does not
have count rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dualform.layers.derived import project
from dualform.layers.elementwise import offset_use
from dualform.layers.letters import (
    Letters,
    einsum_letters,
    lettered,
    matmul_letters,
    tensordot_letters,
)
from dualform.layers.use import (
    Finder,
    Found,
    Function,
    LayerKind,
    Rows,
    Seen,
    Site,
    Split,
    Together,
    Use,
    book_terms,
    named,
    outer_site,
)

T = torch.Tensor


class Einsum(LayerKind):
    """`torch.einsum` and `torch.tensordot` with parameters among their factors.

    >>> torch.einsum in Einsum.functions
    True
    """

    functions = (torch.einsum, torch.tensordot)

    def use(
        self, find: Finder, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> Seen | None:
        """One use for each factor that is a parameter."""
        if func is torch.tensordot:
            given = named(args, kwargs, "a b dims", dims=2)
            pair = (given["a"], given["b"])
            return product_use(find, tensordot_letters(*pair, given["dims"]), pair, out)
        equation, *factors = args if isinstance(args[0], str) else lettered(args)
        if len(factors) == 1 and not isinstance(factors[0], Tensor):
            factors = list(factors[0])
        return product_use(find, einsum_letters(equation, factors), factors, out)


class BatchedProduct(LayerKind):
    """`torch.bmm(x, W)`, `torch.baddbmm(b, x, W)` and `torch.mv(W, x)`.

    >>> torch.bmm in BatchedProduct.functions
    True
    """

    functions = (torch.bmm, T.bmm, torch.baddbmm, T.baddbmm, torch.mv, T.mv)

    def use(
        self, find: Finder, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> Seen | None:
        """The parameter may be either factor, or what is added."""
        added = None
        if "baddbmm" in func.__name__:
            if kwargs.get("alpha", 1) != 1 or kwargs.get("beta", 1) != 1:
                return None
            added, *args = args
        if len(args) != 2:
            return None
        if args[1].ndim == 1 and project(find, args[0], args[1], out):
            return None
        use = product_use(find, matmul_letters(args[0].ndim, args[1].ndim), args, out)
        bias = find(added)
        return use if bias is None else Together.of(use, offset_use(find, bias, out))


class Bilinear(LayerKind):
    """`F.bilinear(x1, x2, W, b)`: the keys are the products of both inputs.

    >>> F.bilinear in Bilinear.functions
    True
    """

    functions = (F.bilinear,)

    def use(
        self, find: Finder, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> Use | None:
        """`y = W (x1 ⊗ x2) + b`, with W as a matrix of outputs × pairs of inputs."""
        given = named(args, kwargs, "input1 input2 weight bias")
        W, b = find.each(given["weight"], given["bias"])
        first = W or b
        if first is None:
            return None
        key = ("bilinear", W, b)
        site = find.site(key, lambda: Site(first.label, book_terms(W, b)))
        x1, x2 = given["input1"], given["input2"]
        if site is None:
            return None
        if W is None:
            return Use(site, (out,), lambda: x1[..., :0])  # an offset needs no keys
        return Use(site, (out,), lambda: (x1[..., :, None] * x2[..., None, :]).flatten(-2))


class Chosen(NamedTuple):
    """Matrices that were picked out of a stack of them, one for each place."""

    table: Found
    places: Tensor


@dataclass(frozen=True)
class ProductUse:
    """A product as one of its factors sees it, with the letters of all dimensions.

    >>> experts = ProductUse("eio", ("ebi",), "ebo", {"e": 4, "i": 6, "o": 5, "b": 7})
    >>> experts.stacked, experts.outputs, experts.inputs, experts.rows
    ('e', 'o', 'i', 'b')
    """

    own: str
    others: tuple[str, ...]
    out: str
    sizes: Mapping[str, int]

    @property
    def stacked(self) -> str:
        """Letters that count matrices: neither summed over nor the parameter's alone."""
        return "".join(c for c in self.own if self._elsewhere(c) and c in self.out)

    @property
    def outputs(self) -> str:
        """Letters that no other factor has."""
        return "".join(c for c in self.own if not self._elsewhere(c))

    @property
    def inputs(self) -> str:
        """Letters that are summed over."""
        return "".join(c for c in self.own if self._elsewhere(c) and c not in self.out)

    @property
    def rows(self) -> str:
        """Letters of the result that the parameter does not have."""
        return "".join(c for c in self.out if c not in self.own)

    def positions(self, letters: str) -> tuple[list[int], list[int]]:
        """Where outputs and inputs stand in these letters."""
        outputs, inputs = ([letters.index(c) for c in side] for side in (self.outputs, self.inputs))
        return outputs, inputs

    def sides(
        self, factors: Sequence[Tensor], error: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Keys and values of all rows, by stacked matrix first."""
        lead = self.stacked + self.rows
        keys = _flat(self.keys(factors, lead + self.inputs), len(lead))
        if error is None:
            return keys, None
        return keys, _flat(self.values(error, lead + self.outputs), len(lead))

    def keys(self, factors: Sequence[Tensor], order: str) -> Tensor:
        """The product of the other factors, its dimensions in this order."""
        present = "".join(c for c in order if self._elsewhere(c))
        product = torch.einsum(f"{','.join(self.others)}->{present}", list(factors))
        return self._spread(product, present, order)

    def values(self, error: Tensor, order: str) -> Tensor:
        """The error, its dimensions in this order."""
        present = "".join(c for c in order if c in self.out)
        summed = torch.einsum(f"{self.out}->{present}", error)
        return self._spread(summed, present, order)

    def _spread(self, tensor: Tensor, present: str, order: str) -> Tensor:
        """Dimensions that a tensor does not have, or has once, in their full size."""
        for at, letter in enumerate(order):
            if letter not in present:
                tensor = tensor.unsqueeze(at)
        return tensor.expand([self.sizes[letter] for letter in order])

    def _elsewhere(self, letter: str) -> bool:
        return any(letter in other for other in self.others)


def product_use(find: Finder, letters: Letters, factors: Sequence[Any], out: Tensor) -> Seen | None:
    """The uses of all parameters among the factors of a product."""
    uses: list[Seen] = []
    for at, factor in enumerate(factors if len(factors) > 1 else ()):
        found, chosen = find(factor), find.recall(factor)
        if found is None and not isinstance(chosen, Chosen):
            continue
        product = _seen_by(at, letters, factors, out)
        others = [other for o, other in enumerate(factors) if o != at]
        if product is None:
            continue
        if found is not None:
            uses.append(Split((out,), partial(_rows, find, found, product, others)))
        elif product.stacked == product.own[: chosen.places.ndim]:
            uses.append(Split((out,), partial(_chosen_rows, find, chosen, product, others)))
    return Together.of(*uses)


def _seen_by(
    at: int, letters: Letters, factors: Sequence[Tensor], out: Tensor
) -> ProductUse | None:
    """The product as one factor sees it; None where that factor is repeated along a dimension."""
    own, spelled = letters.factors[at], zip(letters.factors, factors, strict=True)
    sizes = dict(zip(own, factors[at].shape, strict=True))
    others = tuple(other for o, other in enumerate(letters.factors) if o != at)
    wide = {c: n for word, x in spelled for c, n in zip(word, x.shape, strict=True) if n > 1}
    if len(sizes) < len(own) or any(wide.get(c, 1) != n for c, n in sizes.items()):
        return None
    return ProductUse(
        own, others, letters.out, sizes | dict(zip(letters.out, out.shape, strict=True))
    )


def _rows(
    find: Finder, found: Found, p: ProductUse, others: Sequence[Tensor], error: Tensor | None
) -> Iterator[Rows]:
    """For every matrix that is stacked in a parameter, its keys and values."""
    if not p.inputs:
        yield from _scaled(find, found, p, others, error)
        return
    keys, values = p.sides(others, error)
    for index in itertools.product(*(range(p.sizes[letter]) for letter in p.stacked)):
        some = dict(zip(p.stacked, index, strict=True))
        part = tuple(some.get(letter, slice(None)) for letter in p.own)
        one = found._replace(given=found.given[part]) if some else found
        site = outer_site(find, one, *p.positions("".join(c for c in p.own if c not in some)))
        if site is not None:
            yield Rows(site, keys[index], None if values is None else values[index])


def _chosen_rows(
    find: Finder, chosen: Chosen, p: ProductUse, others: Sequence[Tensor], error: Tensor | None
) -> Iterator[Rows]:
    """For every matrix that was chosen, the keys and values of those that chose it."""
    keys, values = p.sides(others, error)
    table = chosen.table
    for matrix in torch.unique(chosen.places).tolist():
        one, here = table._replace(given=table.given[matrix]), chosen.places == matrix
        site = outer_site(find, one, *p.positions(p.own[chosen.places.ndim :]))
        if site is not None:
            yield Rows(site, keys[here], None if values is None else values[here])


def _scaled(
    find: Finder, found: Found, p: ProductUse, others: Sequence[Tensor], error: Tensor | None
) -> Iterator[Rows]:
    """Where nothing is summed over, elements are scaled."""
    key = ("scaled", found)
    site = find.site(key, lambda: Site(found.label, book_terms(found, form="scale")))
    if site is not None:
        order, lead = p.rows + p.own, len(p.rows)
        keys = _flat(p.keys(others, order), lead)
        yield Rows(site, keys, None if error is None else _flat(p.values(error, order), lead))


def _flat(tensor: Tensor, lead: int) -> Tensor:
    """All dimensions from the given one on as a single one."""
    return tensor.flatten(lead) if tensor.ndim > lead else tensor[..., None]
