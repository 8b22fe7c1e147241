"""Tables that are read: the key is the place, the value the error at what was read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from dualform.layers.product import Chosen
from dualform.layers.use import (
    Finder,
    Found,
    Function,
    LayerKind,
    Site,
    Use,
    book_terms,
    named,
)


class Embedding(LayerKind):
    """`F.embedding`, with padding and scaling by frequency; sparse gradients are the same rows.

    With `max_norm` the table is changed by being read, which no gradient explains: by step.

    >>> F.embedding in Embedding.functions
    True
    """

    functions = (F.embedding,)
    names = "input weight padding_idx max_norm norm_type scale_grad_by_freq"

    def use(
        self, find: Finder, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> Use | None:
        """Keys are the indices."""
        given = named(args, kwargs, self.names)
        table = find(given["weight"])
        if table is None or given["max_norm"] is not None:
            return None
        site, places = _site(find, table), given["input"]
        padding, by_frequency = given["padding_idx"], given["scale_grad_by_freq"]
        if padding is not None:
            padding %= len(table.given)
        value = (
            None if padding is None and not by_frequency else _weigh(places, padding, by_frequency)
        )
        return None if site is None else _remembered(find, Use(site, (out,), places, value))


class Indexing(LayerKind):
    """`table[places]`, `table.index_select(0, places)`.

    >>> torch.index_select in Indexing.functions
    True
    """

    functions = (torch.Tensor.__getitem__, torch.index_select, torch.Tensor.index_select)

    def use(
        self, find: Finder, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> Use | None:
        """Keys are the indices; anything but whole rows of a matrix is left to others.

        Where a stack of matrices is indexed, the product that they go into is what leaves rows.
        """
        given = named(args, kwargs, "input dim index")
        table, places = find(args[0]), given["index"]
        if func is torch.Tensor.__getitem__:
            places = args[1]
        elif given["dim"] != 0:
            return None
        if table is None or table.given.ndim < 2 or not _counts(places):
            return None
        if table.given.ndim > 2:  # matrices, for a product with each
            find.remember(out, Chosen(table, places % len(table.given)))
            return None
        site = _site(find, table)
        return (
            None
            if site is None
            else _remembered(find, Use(site, (out,), places % len(table.given)))
        )


class EmbeddingBag(LayerKind):
    """`F.embedding_bag` with sums and means; each place of a bag gets the bag's error.

    Maxima choose their place by value: by step.

    >>> F.embedding_bag in EmbeddingBag.functions
    True
    """

    functions = (F.embedding_bag,)
    names = (
        "input weight offsets max_norm norm_type scale_grad_by_freq mode sparse "
        "per_sample_weights include_last_offset padding_idx"
    )

    def use(
        self, find: Finder, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> Use | None:
        """Keys are the indices, bag by bag, filled up to the longest bag."""
        given = named(args, kwargs, self.names, mode="mean")
        table, mode = find(given["weight"]), given["mode"]
        if table is None or given["max_norm"] is not None or mode == "max":
            return None
        if given["scale_grad_by_freq"]:
            return None
        site = _site(find, table)
        places, share = _bags(given)
        if mode == "mean":
            share = share / share.sum(1, keepdim=True).clamp_min(1)

        def value(error: Tensor) -> Tensor:
            return error[:, None, :] * share[:, :, None].to(error)

        return None if site is None else Use(site, (out,), places, value)


def _bags(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(bags, longest) places, and how much each counts."""
    places, weights = given["input"], given["per_sample_weights"]
    counts = torch.ones(places.shape, dtype=given["weight"].dtype, device=places.device)
    if given["padding_idx"] is not None:
        counts = counts * (places != given["padding_idx"] % len(given["weight"]))
    if weights is not None:
        counts = counts * weights.detach()
    if places.ndim == 2:
        return places, counts
    ends = [*given["offsets"].tolist(), *([] if given["include_last_offset"] else [len(places)])]
    sizes = [end - start for start, end in pairwise(ends)]
    filled = [
        pad_sequence(list(torch.split(part[: ends[-1]], sizes)), batch_first=True)
        for part in (places, counts)
    ]
    return filled[0], filled[1]


def _site(find: Finder, table: Found) -> Site | None:
    return find.site(
        ("lookup", table),
        lambda: Site(table.label, book_terms(table, form="lookup"), key_dims=0),
    )


def _weigh(places: Tensor, padding: int | None, by_frequency: bool) -> Callable[[Tensor], Tensor]:
    def value(error: Tensor) -> Tensor:
        if by_frequency:
            _, at, counts = torch.unique(places, return_inverse=True, return_counts=True)
            error = error / counts[at][..., None]
        if padding is not None:
            error = error.masked_fill((places == padding)[..., None], 0)
        return error

    return value


def _remembered(find: Finder, use: Use) -> Use:
    """Positions are read once for all samples; the sum they go into tells the samples apart."""
    (out,) = use.outputs
    find.recent[id(out)] = (out, use)
    return use


def _counts(places: Any) -> bool:
    """Whether they are places of rows; a single one gives a view of the table, and no rows."""
    if not isinstance(places, Tensor) or places.ndim == 0:
        return False
    return not places.is_floating_point() and places.dtype != torch.bool
