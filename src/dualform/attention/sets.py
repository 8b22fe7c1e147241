"""Attention by its definition: queries that see the same keys are read together, by those only."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Read = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""y of q, k, v and numbers to add to the logits, where every query sees every key."""


def read_by_sets(
    read: Read, q: Tensor, k: Tensor, v: Tensor, sees: Tensor, numbers: Tensor | None = None
) -> Tensor:
    """y of queries that see different keys, each set of keys read by itself; 0 for the empty set.

    Exact for any layer, whatever it makes of its keys, at one call for each set: a causal pass has
    as many as queries. There are as many heads of keys as of queries, and `sees` broadcasts to
    (…, L, S).

    >>> mean = lambda q, k, v, numbers: v.mean(-2, keepdim=True).expand_as(q)
    >>> x = torch.tensor([[2.0], [4.0], [9.0]])
    >>> read_by_sets(mean, x, x, x, torch.ones(3, 3, dtype=torch.bool).tril()).flatten()
    tensor([2., 3., 5.])
    """
    given = [q, k, v, sees[(None,) * (q.ndim - sees.ndim)]]
    if numbers is not None:
        given.append(numbers[(None,) * (q.ndim - numbers.ndim)])
    for dim in range(q.ndim - 2):
        if given[3].shape[dim] > 1:
            slices = zip(*(_along(x, dim, q.shape[dim]) for x in given), strict=True)
            return torch.cat([read_by_sets(read, *part) for part in slices], dim)
    L, S = q.shape[-2], k.shape[-2]
    rows = given[3].flatten(0, -3)[0] if q.ndim > 2 else given[3]
    sets, which = torch.unique(rows.expand(L, S), dim=0, return_inverse=True)
    places = [(which == number).nonzero().flatten() for number in range(len(sets))]
    if numbers is not None:
        numbers = given[4].expand(*given[4].shape[:-2], L, S)
    parts = [
        _read_set(
            read, q[..., own, :], k, v, one, numbers if numbers is None else numbers[..., own, :]
        )
        for one, own in zip(sets, places, strict=True)
    ]
    if not parts:
        return v.new_zeros(*q.shape[:-1], v.shape[-1])
    return torch.cat(parts, -2).index_select(-2, torch.cat(places).argsort())


def _along(x: Tensor, dim: int, size: int) -> list[Tensor]:
    """One slice for each index of a dimension, the same one where it is broadcast."""
    return [x] * size if x.shape[dim] == 1 < size else list(torch.split(x, 1, dim))


def _read_set(
    read: Read, q: Tensor, k: Tensor, v: Tensor, one: Tensor, numbers: Tensor | None
) -> Tensor:
    keys = one.nonzero().flatten()
    if not len(keys):
        return v.new_zeros(*q.shape[:-1], v.shape[-1])
    numbers = None if numbers is None else numbers.index_select(-1, keys)
    return read(q, k.index_select(-2, keys), v.index_select(-2, keys), numbers)
