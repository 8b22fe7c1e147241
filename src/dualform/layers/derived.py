"""Weights that are computed from other parameters before every call: `W = f(P, Q, …)`.

Spectral norm divides a weight by `σ = uᵀ P v`, so a row `e ⊗ x` of the layer adds `e ⊗ x/σ` to P,
and `−(e · W x)/σ` times `u ⊗ v`: two rows of the usual form.

Weight norm is `W = s v` with `s = g / ‖v‖`: a norm for each entry of a dimension. Let `V = v/‖v‖`.
A row adds `c = Σ (e ⊗ x) ∘ V` to g, summed over the other dimensions. To v it adds `s (e ⊗ x)` and
`−c s V`. The last is no rank-one block. But the matrix `−s V` is the same for all rows of a use: it
is kept once, and a row is c.

For any other function (orthogonal weights, pruning) the rows are the samples' own gradients of the
parameters, in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dualform.layers.computed import mark_given
from dualform.layers.use import (
    Finder,
    Found,
    Function,
    LayerKind,
    Rows,
    Seen,
    Site,
    Split,
    book_terms,
    named,
)
from dualform.ledger import Term
from dualform.memory.blocks import as_matrix
from dualform.private import weight_norm

LARGEST = 1 << 18
"""The most numbers of a parameter of which every sample's gradient is kept in full."""
AT_ONCE = 1 << 26
"""The most numbers that the gradients of all samples of a call may have together."""

T = torch.Tensor


class Spectral(NamedTuple):
    """A weight divided by `σ = uᵀ P v`, with P seen as a matrix by `view`."""

    original: Found
    view: str
    u: Tensor
    v: Tensor
    sigma: Tensor


class DerivedWeight(NamedTuple):
    """A weight made of some parameters, and how its gradients become theirs.

    `pull` takes gradients of the weight, (samples, *shape), and gives those of each parameter.
    """

    originals: Sequence[Found]
    pull: Callable[[Tensor], Sequence[Tensor]]


class Normed(NamedTuple):
    """A weight `g v / ‖v‖`, with a norm for each entry of dimension `dim`, or one norm for −1."""

    v: Found | None
    """The parameter, where it is trained."""
    g: Found | None
    direction: Tensor
    length: Tensor
    dim: int

    def parts(self) -> tuple[Tensor, Tensor]:
        """`s = g / ‖v‖`, which is 1 in size along the other dimensions, and `V = v / ‖v‖`.

        >>> v, g = torch.tensor([[3.0, 4.0]]), torch.tensor([[10.0]])
        >>> Normed(None, None, v, g, 0).parts()
        (tensor([[2.]]), tensor([[0.6000, 0.8000]]))
        """
        v, g = self.direction.detach(), self.length.detach()
        others = [at for at in range(v.ndim) if at != self.dim]
        norm = torch.linalg.vector_norm(v, dim=others, keepdim=True)
        return g.reshape(norm.shape) / norm, v / norm


class WeightNorm(LayerKind):
    """`W = g v / ‖v‖`, as both of torch's weight norms compute it; its rows are the layer's.

    >>> len(WeightNorm.functions)
    1
    """

    functions = (weight_norm,)

    def use(self, find: Finder, func: Function, args: Sequence[Any], kwargs: Any, out: Any) -> None:
        """Remembers what the weight is made of."""
        given = named(args, kwargs, "v g dim", dim=0)
        v, g = find.original(given["v"]), find.original(given["g"])
        parts = {"v": v, "g": g}
        whole = all(found is None or found.parameter is given[n] for n, found in parts.items())
        if whole and (v or g):
            find.remember(out, Normed(v, g, given["v"], given["g"], given["dim"]))


class SpectralNorm(LayerKind):
    """`σ = uᵀ P v` and `P / σ`, as both of torch's spectral norms compute it.

    >>> torch.vdot in SpectralNorm.functions
    True
    """

    functions = (torch.dot, torch.vdot, T.dot, T.vdot, torch.div, T.div, T.__truediv__)

    def use(self, find: Finder, func: Function, args: Sequence[Any], kwargs: Any, out: Any) -> None:
        """Remembers σ, and the weight that was divided by it."""
        made = find.recall(args[1]) if find.computes and len(args) == 2 else None
        if isinstance(made, Projected) and "dot" in func.__name__:
            find.remember(out, made._replace(u=args[0]))
        elif isinstance(made, Projected) and made.u is not None:
            original = find.original(args[0])
            if original is not None and original.book == made.original.book:
                weight = Spectral(original, made.view, made.u, made.v, args[1].detach())
                find.remember(out, weight)


class Projected(NamedTuple):
    """`P v`, or `uᵀ P v`, of a parameter seen as a matrix by `view`."""

    original: Found
    view: str
    v: Tensor
    u: Tensor | None = None


def project(find: Finder, matrix: Tensor, v: Tensor, out: Tensor) -> bool:
    """Remembers a projection of a parameter that weights are computed from; False for any other."""
    if not find.computes:
        return False
    viewed = find.original(matrix)
    found = [viewed] if viewed is not None else find.originals(matrix)
    if len(found) != 1:
        return False
    view = _view_of(found[0], matrix, viewed is not None)
    if view is not None:
        find.remember(out, Projected(found[0], view, v))
    return True


def _view_of(found: Found, matrix: Tensor, shared: bool) -> str | None:
    """In which view a parameter is this matrix, which shares its memory or is a copy."""
    if shared:
        block = found._replace(given=matrix).matrix()
        return block[0] if block is not None and block[1] == (0, 0) else None
    for view in ("rows", "swapped"):
        seen = as_matrix(found.parameter.detach(), view)
        if seen.shape == matrix.shape and torch.equal(seen, matrix.detach()):
            return view
    return None


def made_of(
    find: Finder, weight: Any, view: str = "rows", groups: int = 1
) -> Spectral | Normed | DerivedWeight | None:
    """What a weight was computed from, where those are parameters that are there for it.

    The layer sees the weight as a matrix by `view`; a spectral norm must have seen it so too.
    """
    known = find.recall(weight)
    if isinstance(known, Normed):
        return known
    if isinstance(known, Spectral) and known.view == view and (view == "rows" or groups == 1):
        return known
    originals = find.originals(weight)
    return (
        DerivedWeight(originals, partial(_differentiated, weight, originals)) if originals else None
    )


def _differentiated(weight: Tensor, originals: Sequence[Found], G: Tensor) -> Sequence[Tensor]:
    """(samples, …) for each parameter: gradients found by differentiating again, one by one."""
    parameters = [found.parameter for found in originals]
    with torch.enable_grad():
        found = [
            torch.autograd.grad(weight, parameters, g, retain_graph=True, materialize_grads=True)
            for g in G
        ]
    return [torch.stack(parts) for parts in zip(*found, strict=True)]


def derived_use(
    find: Finder,
    derived: DerivedWeight,
    out: Tensor,
    samples: int,
    gradients: Callable[[Tensor], Tensor],
) -> Seen | None:
    """The use of a weight's originals: (samples, …) of their gradients, from those of the weight.

    `gradients` makes (samples, *shape) of the error. None where that would be too much to keep, and
    in 16 bits, where kernels round the weight's gradient before it goes on to the originals.
    """
    mark_given(out)
    sizes = [found.parameter.numel() for found in derived.originals]
    if max(sizes) > LARGEST or sum(sizes) * samples > AT_ONCE or out.element_size() < 4:
        return None
    sites = [_site(find, found) for found in derived.originals]
    dtype, device = out.dtype, out.device

    def rows(error: Tensor | None) -> Iterator[Rows]:
        parts = None if error is None else derived.pull(gradients(error))
        for at, site in enumerate(sites):
            if site is not None:
                values = None if parts is None else parts[at].reshape(samples, -1)
                yield Rows(site, torch.empty(samples, 0, dtype=dtype, device=device), values)

    return Split((out,), rows)


def _site(find: Finder, found: Found, axis: int | None = None) -> Site | None:
    terms = book_terms(found, form="sum")
    key = ("derived", found, axis)
    return find.site(key, lambda: Site(found.label, terms, axis=axis, aside=True))


def spectral_use(
    find: Finder,
    made: Spectral,
    out: Tensor,
    lead: Sequence[int],
    groups: int,
    shares: Callable[[Tensor], Tensor],
) -> Seen:
    """The rows that come of σ; `shares` makes (*lead, 1) of an error: its part along the output."""
    P = made.original
    terms = {P.book: Term("outer", made.view, groups)}
    site = find.site(("sigma", P, groups), lambda: Site(P.label, terms, aside=True))
    assert site is not None
    mark_given(out)

    def rows(error: Tensor | None) -> Iterator[Rows]:
        values = None if error is None else shares(error) / -made.sigma * made.u
        yield Rows(site, made.v.repeat(groups).expand(*lead, -1), values)

    return Split((out,), rows)


def normed_use(
    find: Finder,
    made: Normed,
    out: Tensor,
    lead: Sequence[int],
    term: Term | None,
    product: Callable[[Tensor | None, Tensor | None], Rows] | None,
    shares: Callable[[Tensor, Tensor], Tensor],
    outputs: int = 0,
) -> Seen | None:
    """The rows of a weight norm's parameters. None in 16 bits, as for other computed weights.

    Args:
        term: how v is a matrix in the layer's product; None where it is not trained.
        product: makes the rows `s (e ⊗ x)` of an error and s.
        shares: makes c, (*lead, norms), of an error and V.
        outputs: which dimension of the weight counts outputs.
    """
    mark_given(out)
    if out.element_size() < 4:
        return None
    tall = made.dim in (outputs, -1)
    of_v = of_g = None
    if made.v is not None and term is not None:
        terms, label = {made.v.book: replace(term, form="sum" if tall else "outer")}, made.v.label
        key = ("norm", made.v, made.dim, term)
        of_v = find.site(key, lambda: Site(label, terms, axis=find.axis, aside=True))
    if made.g is not None:
        of_g = _site(find, made.g, find.axis)
    empty = torch.empty(*lead, 0, dtype=out.dtype, device=out.device)

    def rows(error: Tensor | None) -> Iterator[Rows]:
        s, V = (None, None) if error is None else made.parts()
        c = None if error is None or V is None else shares(error, V)
        if product is not None:
            yield product(error, s)
        if of_v is not None and term is not None:
            M = None if s is None or V is None else as_matrix(-s * V, term.view, term.groups)
            if tall:
                yield Rows(of_v, empty, None if c is None or M is None else _repeated(c, len(M)), M)
            else:
                at = norm_places(made, term, outputs).flatten()
                b = empty.new_zeros(*lead, len(at)) if c is None else c[..., at]
                yield Rows(of_v, b, None if M is None else empty.new_ones(*lead, len(M)), M)
        if of_g is not None:
            yield Rows(of_g, empty, c)

    return Split((out,), rows)


def _repeated(c: Tensor, height: int) -> Tensor:
    """As many entries as a matrix is high, where groups of its lines share norms."""
    return c.repeat(*[1] * (c.ndim - 1), height // c.shape[-1])


def norm_places(made: Normed, term: Term, outputs: int) -> Tensor:
    """(groups, width): which norm is that of each column of v's matrix, for a group of lines."""
    shape = [1 if at == outputs else size for at, size in enumerate(made.direction.shape)]
    own = [size if at == made.dim else 1 for at, size in enumerate(shape)]
    numbers = torch.arange(shape[made.dim], device=made.direction.device)
    places = as_matrix(numbers.reshape(own).expand(shape), term.view, term.groups)
    return places.expand(term.groups, -1)
