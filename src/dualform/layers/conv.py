"""Convolutions: a record is a sample's whole input, and its rows are the patches in it.

What is stored is what the layer saw; the patches, several times as large, are unfolded when they
are needed. A transposed convolution is an ordinary one over an input with zeros put in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dualform.layers.derived import (
    Normed,
    Spectral,
    derived_use,
    made_of,
    norm_places,
    normed_use,
    spectral_use,
)
from dualform.layers.patches import at_positions, patches
from dualform.layers.use import (
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
)
from dualform.ledger import Stream, Term
from dualform.memory.blocks import as_matrix, from_matrix
from dualform.memory.products import by_group


class Conv(LayerKind):
    """`F.conv1d/2d/3d` with every stride, padding, dilation and number of groups.

    >>> F.conv2d in Conv.functions
    True
    """

    functions = (F.conv1d, F.conv2d, F.conv3d)
    names = "input weight bias stride padding dilation groups"

    def use(
        self, find: Finder, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> Seen | None:
        """Keys are the inputs, unpadded."""
        given = named(args, kwargs, self.names, stride=1, padding=0, dilation=1, groups=1)
        kernel = list(given["weight"].shape[2:])
        dilation = _each(given["dilation"], len(kernel))
        geometry = {
            "kernel": kernel,
            "stride": _each(given["stride"], len(kernel)),
            "dilation": dilation,
            "groups": int(given["groups"]),
            "padding": _padding(given["padding"], kernel, dilation),
        }
        return _conv_use(find, func, given, geometry, out, swapped=False)


class ConvTranspose(LayerKind):
    """`F.conv_transpose1d/2d/3d`.

    >>> F.conv_transpose2d in ConvTranspose.functions
    True
    """

    functions = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
    names = "input weight bias stride padding output_padding groups dilation"

    def use(
        self, find: Finder, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> Seen | None:
        """Keys are the inputs; zeros are put in between when patches are unfolded."""
        defaults = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
        given = named(args, kwargs, self.names, **defaults)
        kernel = list(given["weight"].shape[2:])
        names = ("dilation", "padding", "output_padding", "stride")
        dilation, padding, extra, stride = (_each(given[name], len(kernel)) for name in names)
        reach = [d * (k - 1) - p for d, k, p in zip(dilation, kernel, padding, strict=True)]
        geometry = {
            "kernel": kernel,
            "stride": [1] * len(kernel),
            "dilation": dilation,
            "groups": int(given["groups"]),
            "padding": [[r, r + e] for r, e in zip(reach, extra, strict=True)],
            "stuffing": stride,
        }
        return _conv_use(find, func, given, geometry, out, swapped=True)


def _conv_use(
    find: Finder,
    func: Function,
    given: dict[str, Any],
    geometry: dict[str, Any],
    out: Tensor,
    swapped: bool,
) -> Seen | None:
    """Whichever of weight and bias are trained; a weight may be computed from parameters."""
    W, b = find.each(given["weight"], given["bias"])
    x, dims, groups = given["input"], len(geometry["kernel"]) + 1, geometry["groups"]
    given["input"] = x = x if x.ndim > dims else x[None]
    if W is not None or not find.computes:
        return _patches_use(find, W, b, x, geometry, out, swapped)
    made = made_of(find, given["weight"], "swapped" if swapped else "rows", groups)
    if isinstance(made, Spectral):

        def shares(error: Tensor) -> Tensor:
            again: Tensor = func(**{**given, "bias": None})
            return (error.reshape(again.shape) * again).flatten(1).sum(1, keepdim=True)

        use = _patches_use(find, made.original, b, x, geometry, out, swapped, made.sigma)
        return Together.of(use, spectral_use(find, made, out, x.shape[:1], groups, shares))
    use = _patches_use(find, None, b, x, geometry, out, swapped)
    if made is None:
        return use
    if isinstance(made, Normed):
        return Together.of(use, _normed_use(find, made, func, given, geometry, out, swapped))

    def gradients(error: Tensor) -> Tensor:
        error = error if error.ndim > dims else error[None]
        return _by_sample(x.detach(), error, geometry, given["weight"].shape, swapped)

    return Together.of(use, derived_use(find, made, out, len(x), gradients))


def _patches_use(
    find: Finder,
    W: Found | None,
    b: Found | None,
    x: Tensor,
    geometry: dict[str, Any],
    out: Tensor,
    swapped: bool,
    divisor: Tensor | None = None,
) -> Use | None:
    first = W or b
    if first is None:
        return None
    dims = len(geometry["kernel"]) + 1
    key = (W, b, repr(geometry), x.shape[1:])

    def build() -> Site:
        terms = book_terms(W, b, swapped=swapped, groups=geometry["groups"])
        return Site(first.label, terms, dims, dims, {"kind": "patches", **geometry}, axis=0)

    site = find.site(key, build)
    if site is None:
        return None
    seen = x if W is not None else x[:, :0]  # an offset needs no keys
    keys = seen if divisor is None else lambda: x.detach() / divisor
    return Use(site, (out,), keys, None if out.ndim > dims else lambda error: error[None])


def _normed_use(
    find: Finder,
    made: Normed,
    func: Function,
    given: dict[str, Any],
    geometry: dict[str, Any],
    out: Tensor,
    swapped: bool,
) -> Seen | None:
    """A convolution with `s v`, and one row a sample of what comes of the norm."""
    x, dims, outputs = given["input"].detach(), len(geometry["kernel"]) + 1, int(swapped)
    groups = geometry["groups"]
    terms = book_terms(made.v, swapped=swapped, groups=groups)
    term = next(iter(terms.values()), None)
    layout = {"kind": "patches", **geometry}
    site = find.site(
        ("normed", made.v, repr(geometry), x.shape[1:]),
        lambda: Site(
            "" if made.v is None else made.v.label, terms, dims, dims, layout, axis=0, aside=True
        ),
    )

    def batched(error: Tensor) -> Tensor:
        return error if error.ndim > dims else error[None]

    def product(error: Tensor | None, s: Tensor | None) -> Rows:
        assert site is not None
        if error is None or s is None:
            return Rows(site, x, None)
        e = batched(error)
        if made.dim in (outputs, -1):
            return Rows(site, x, e * _by_channel(s, e))
        if made.dim < 2:
            return Rows(site, x * _by_channel(s, x), e)
        assert term is not None  # what is scaled is no channel: neither inputs nor errors alone
        return Rows(site, x, e, s.flatten()[norm_places(made, term, outputs)[:1]])

    def shares(error: Tensor, V: Tensor) -> Tensor:
        e, norms = batched(error), 1 if made.dim < 0 else V.shape[made.dim]
        if made.dim in (outputs, -1):
            again: Tensor = func(**{**given, "input": x, "weight": V, "bias": None})
            return (e * again).flatten(2).sum(2).reshape(len(x), -1, norms).sum(1)
        seen = term or Term("outer", "swapped" if swapped else "rows", groups)
        shared = _by_column(x, e, as_matrix(V, seen.view, groups), layout)
        places = norm_places(made, seen, outputs).flatten()
        return torch.index_add(x.new_zeros(len(x), norms), 1, places, shared)

    return normed_use(
        find, made, out, x.shape[:1], term, None if site is None else product, shares, outputs
    )


def _by_channel(s: Tensor, x: Tensor) -> Tensor:
    """Numbers for the channels of some samples; groups of channels share them."""
    numbers = s.flatten()
    return numbers.repeat(x.shape[1] // len(numbers)).reshape(-1, *[1] * (x.ndim - 2))


def _by_column(x: Tensor, error: Tensor, V: Tensor, layout: dict[str, Any]) -> Tensor:
    """(samples, groups × width): `Σ (e ⊗ x) ∘ V` over a sample's rows, and over lines of V."""
    stream, groups = (
        Stream("", tuple(x.shape[1:]), tuple(error.shape[1:]), layout),
        layout["groups"],
    )
    found = []
    for one, own in zip(torch.split(x, 1), torch.split(error, 1), strict=True):
        seen, errors = patches(stream, one)[0], at_positions(stream, own)[0]
        back = torch.einsum("pgo,gow->pgw", by_group(errors, groups), by_group(V[None], groups)[0])
        found.append((back.flatten(1) * seen).sum(0))
    return torch.stack(found)


def _by_sample(
    x: Tensor, error: Tensor, geometry: dict[str, Any], shape: Sequence[int], swapped: bool
) -> Tensor:
    """(samples, *shape): the gradient of the weight, sample by sample."""
    stream = Stream("", tuple(x.shape[1:]), tuple(error.shape[1:]), {"kind": "patches", **geometry})
    groups, view = geometry["groups"], "swapped" if swapped else "rows"
    seen, errors = patches(stream, x), at_positions(stream, error)
    split = [t.reshape(*t.shape[:2], groups, -1) for t in (errors, seen)]
    matrices = torch.einsum("npgo,npgi->ngoi", *split).flatten(1, 2)
    return torch.stack([from_matrix(m, tuple(shape), view, groups) for m in matrices])


def _each(value: Any, dims: int) -> list[int]:
    """One number for each dimension."""
    listed = [int(v) for v in value] if isinstance(value, Sequence) else [int(value)]
    return listed * dims if len(listed) == 1 else listed


def _padding(padding: Any, kernel: list[int], dilation: list[int]) -> list[list[int]]:
    """What is added before and after, for each dimension; "same" adds an odd one after."""
    if padding == "valid":
        return [[0, 0] for _ in kernel]
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return [[total // 2, total - total // 2] for total in totals]
    return [[p, p] for p in _each(padding, len(kernel))]
