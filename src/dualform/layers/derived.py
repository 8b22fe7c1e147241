"""Weights that are computed from other parameters before every call: `W = f(P, Q, …)`.

Spectral norm divides a weight by `σ = uᵀ P v`, so a row `e ⊗ x` of the layer adds `e ⊗ x/σ` to P,
and `−(e · W x)/σ` times `u ⊗ v`: two rows of the usual form. For any other function (weight norm,
orthogonal weights, pruning) what a row adds is no rank-one block. There the rows are the samples'
own gradients of the parameters, in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    place,
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


class Derived(NamedTuple):
    """A weight made of some parameters, and how its gradients become theirs.

    `pull` takes gradients of the weight, (samples, *shape), and gives those of each parameter.
    """

    originals: Sequence[Found]
    pull: Callable[[Tensor], Sequence[Tensor]]


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
        originals = [found for found in (v, g) if found is not None]
        if not originals:
            return

        def pull(gradients: Tensor) -> Sequence[Tensor]:
            of_v, of_g = _through_norm(gradients, given["v"], given["g"], given["dim"])
            return [part for part, found in ((of_v, v), (of_g, g)) if found is not None]

        find.remember(out, Derived(originals, pull))


def _through_norm(G: Tensor, v: Tensor, g: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """(samples, …): gradients of v and of g, from those of `g v / ‖v‖`; dim −1 is one norm for all.

    >>> v = torch.tensor([[3.0, 4.0]])
    >>> _through_norm(torch.tensor([[[5.0, 0.0]]]), v, torch.tensor([[1.0]]), 0)
    (tensor([[[ 0.6400, -0.4800]]]), tensor([[[3.]]]))
    """
    summed = [at for at in range(v.ndim) if at != dim]
    norm = torch.linalg.vector_norm(v, dim=summed, keepdim=True)
    unit = v / norm
    along = (G * unit).sum([at + 1 for at in summed], keepdim=True)
    return g / norm * (G - along * unit), along.reshape(len(G), *g.shape)


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
) -> Spectral | Derived | None:
    """What a weight was computed from, where those are parameters that are there for it.

    The layer sees the weight as a matrix by `view`; a spectral norm must have seen it so too.
    """
    known = find.recall(weight)
    if isinstance(known, Derived):
        return known
    if isinstance(known, Spectral) and known.view == view and (view == "rows" or groups == 1):
        return known
    originals = find.originals(weight)
    return Derived(originals, partial(_differentiated, weight, originals)) if originals else None


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
    derived: Derived,
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

    return Split(out, rows)


def _site(find: Finder, found: Found) -> Site | None:
    terms = book_terms(found, form="sum")
    return find.site(("derived", place(found)), lambda: Site(found.label, terms, aside=True))


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
    site = find.site(("sigma", place(P), groups), lambda: Site(P.label, terms, aside=True))
    assert site is not None
    mark_given(out)

    def rows(error: Tensor | None) -> Iterator[Rows]:
        values = None if error is None else shares(error) / -made.sigma * made.u
        yield Rows(site, made.v.repeat(groups).expand(*lead, -1), values)

    return Split(out, rows)
