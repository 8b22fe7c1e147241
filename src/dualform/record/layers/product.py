"""`y = Σ W x` over some dimensions: whatever `einsum` can say in one equation.

A dimension of the parameter may be an output (it is in the result), an input (it is in the other
factors), or both. One that is both counts matrices, as that of experts does: each of them has a
stream of its own, since its rows are others. Dimensions of the result that the parameter does not
have count rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dualform.record.layers.elementwise import offset_use
from dualform.record.layers.letters import (
    Letters,
    einsum_letters,
    matmul_letters,
    tensordot_letters,
)
from dualform.record.layers.use import (
    Finder,
    Found,
    Function,
    LayerKind,
    Rows,
    Seen,
    Site,
    Together,
    Use,
    book_terms,
    named,
    outer_terms,
    place,
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
        equation, *factors = args
        if not isinstance(equation, str):
            return None  # dimensions are numbered, not lettered
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
        W, b = find(given["weight"]), find(given["bias"])
        first = W or b
        if first is None:
            return None
        key = ("bilinear", place(W), place(b))
        site = find.site(key, lambda: Site(first.label, book_terms(W, b)))
        x1, x2 = given["input1"], given["input2"]
        if site is None:
            return None
        if W is None:
            return Use(site, out, lambda: x1[..., :0])  # an offset needs no keys
        return Use(site, out, lambda: (x1[..., :, None] * x2[..., None, :]).flatten(-2))


@dataclass(frozen=True)
class Product:
    """A product as one of its factors sees it, with the letters of all dimensions.

    >>> experts = Product("eio", ("ebi",), "ebo", {"e": 4, "i": 6, "o": 5, "b": 7})
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
    uses = []
    for at, factor in enumerate(factors):
        found = find(factor)
        if found is not None and len(factors) > 1:
            product = _seen_by(at, letters, factors, out)
            others = [other for o, other in enumerate(factors) if o != at]
            if product is not None:
                uses.append(ProductUse(find, found, product, others, out))
    return Together.of(*uses)


def _seen_by(at: int, letters: Letters, factors: Sequence[Tensor], out: Tensor) -> Product | None:
    """The product as one factor sees it; None where it is repeated along a dimension."""
    own, shape = letters.factors[at], factors[at].shape
    sizes = dict(zip(own, shape, strict=True)) | dict(zip(letters.out, out.shape, strict=True))
    others = tuple(spelled for o, spelled in enumerate(letters.factors) if o != at)
    product = Product(own, others, letters.out, sizes)
    wide = {
        c: n
        for o, x in zip(letters.factors, factors, strict=True)
        for c, n in zip(o, x.shape, strict=True)
        if n > 1
    }
    repeated = len(set(own)) < len(own) or any(
        wide.get(c, 1) != n for c, n in zip(own, shape, strict=True)
    )
    return None if repeated else product


class ProductUse:
    """One product, as a use of one parameter in it."""

    def __init__(
        self, find: Finder, found: Found, product: Product, others: Sequence[Tensor], out: Tensor
    ) -> None:
        self._find, self._found, self._product, self._others = find, found, product, others
        self.outputs: tuple[Tensor, ...] = (out,)

    def let_go(self) -> None:
        """Forgets the output: a hook on its graph must not keep that graph alive."""
        self.outputs = ()

    def rows(self, errors: Sequence[Tensor | None] | None) -> Iterable[Rows]:
        """For every matrix that is stacked in the parameter, its keys and values."""
        if errors is not None and errors[0] is None:
            return
        p, error = self._product, None if errors is None else errors[0]
        if not p.inputs:
            yield from self._scaled(error)
            return
        lead = p.stacked + p.rows
        keys = _flat(p.keys(self._others, lead + p.inputs), len(lead))
        values = None if error is None else _flat(p.values(error, lead + p.outputs), len(lead))
        for index in itertools.product(*(range(p.sizes[letter]) for letter in p.stacked)):
            site = self._site(dict(zip(p.stacked, index, strict=True)))
            if site is not None:
                yield Rows(site, keys[index], None if values is None else values[index])

    def _site(self, index: Mapping[str, int]) -> Site | None:
        """Of one of the stacked matrices."""
        p, find = self._product, self._find
        left = "".join(letter for letter in p.own if letter not in index)
        found = self._found
        if index:
            some = tuple(index.get(letter, slice(None)) for letter in p.own)
            found = found._replace(given=found.given[some])
        outputs, inputs = ([left.index(c) for c in side] for side in (p.outputs, p.inputs))
        key = ("product", place(found), tuple(outputs), tuple(inputs))
        return find.site(key, lambda: Site(found.label, outer_terms(found, outputs, inputs)))

    def _scaled(self, error: Tensor | None) -> Iterator[Rows]:
        """Where nothing is summed over, elements are scaled."""
        p, found = self._product, self._found
        key = ("scaled", place(found))
        site = self._find.site(key, lambda: Site(found.label, book_terms(found, form="scale")))
        if site is not None:
            order, lead = p.rows + p.own, len(p.rows)
            keys = _flat(p.keys(self._others, order), lead)
            yield Rows(site, keys, None if error is None else _flat(p.values(error, order), lead))


def _flat(tensor: Tensor, lead: int) -> Tensor:
    """All dimensions from the given one on as a single one."""
    return tensor.flatten(lead) if tensor.ndim > lead else tensor[..., None]
