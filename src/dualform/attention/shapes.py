"""What q, k and v must have in common, and which keys a query sees.

Queries are (…, heads, L, D), keys (…, heads, S, D), values (…, heads, S, M). There may be fewer
heads of keys than of queries (grouped-query attention): each then serves as many consecutive heads
of queries. Masks are those of `torch.nn.functional.scaled_dot_product_attention`: boolean, True
where a query sees a key, or numbers that are added to the logits, −∞ or far below the others where
it does not. Under `is_causal` query i stands at position `offset + i` and sees the keys up to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualform.errors import AttentionError

HIDES = 1e4
"""How far below the largest number of its row a number hides a key."""


def require_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless every query can be compared with every key, and every key has a value.

    >>> require_shapes(torch.ones(2, 5, 8), torch.ones(2, 7, 4), torch.ones(2, 7, 4))
    Traceback (most recent call last):
    dualform.errors.AttentionError: queries of shape (2, 5, 8) have width 8, but keys of shape ...
    """
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim >= 2:
        raise AttentionError(
            f"{shapes} differ in their number of dimensions; give q as (…, heads, L, D), k as "
            "(…, heads, S, D) and v as (…, heads, S, M)."
        )
    if q.shape[-1] != k.shape[-1]:
        raise AttentionError(
            f"queries of shape {tuple(q.shape)} have width {q.shape[-1]}, but keys of shape "
            f"{tuple(k.shape)} have width {k.shape[-1]}; the last dimensions must be equal."
        )
    if k.shape[:-1] != v.shape[:-1]:
        raise AttentionError(
            f"keys of shape {tuple(k.shape)} and values of shape {tuple(v.shape)} do not pair up; "
            f"give values of shape {(*k.shape[:-1], v.shape[-1])}."
        )
    if q.shape[:-3] != k.shape[:-3]:
        raise AttentionError(
            f"{shapes}: the dimensions before the heads, {tuple(q.shape[:-3])} and "
            f"{tuple(k.shape[:-3])}, must be equal."
        )
    if heads(q) % heads(k):
        raise AttentionError(
            f"{shapes}: {heads(q)} heads of queries cannot share {heads(k)} heads of keys; the "
            "second number must divide the first."
        )


def heads(x: Tensor) -> int:
    """The number of heads, 1 where there is no such dimension.

    >>> heads(torch.ones(2, 4, 5, 8)), heads(torch.ones(5, 8))
    (4, 1)
    """
    return x.shape[-3] if x.ndim > 2 else 1


def for_each_query_head(x: Tensor, q: Tensor) -> Tensor:
    """What belongs to the heads of keys, repeated for the heads of queries that share them.

    >>> for_each_query_head(torch.ones(2, 3, 7, 8), torch.ones(2, 6, 5, 8)).shape
    torch.Size([2, 6, 7, 8])
    """
    share = heads(q) // heads(x)
    return x if share == 1 else x.repeat_interleave(share, dim=-3)


def require_mask(mask: Tensor, q: Tensor, k: Tensor) -> None:
    """Raise unless the mask is of booleans or numbers that broadcast to (…, heads, L, S).

    >>> require_mask(torch.ones(4, 4), torch.ones(2, 5, 8), torch.ones(2, 7, 8))
    Traceback (most recent call last):
    dualform.errors.AttentionError: attn_mask of shape (4, 4) does not fit 5 queries and 7 keys; ...
    """
    require_mask_type(mask, "attn_mask")
    full = (*q.shape[:-1], k.shape[-2])
    pairs = zip(reversed(mask.shape), reversed(full), strict=False)
    if mask.ndim > len(full) or any(a not in (1, b) for a, b in pairs):
        raise AttentionError(
            f"attn_mask of shape {tuple(mask.shape)} does not fit {q.shape[-2]} queries and "
            f"{k.shape[-2]} keys; it must broadcast to {full}."
        )


def require_mask_type(mask: Tensor, name: str) -> None:
    """Raise unless the mask, which its user knows by a name, is of booleans or of real numbers.

    >>> require_mask_type(torch.ones(2, 2).long(), "mask")
    Traceback (most recent call last):
    dualform.errors.AttentionError: mask is torch.int64; give booleans, True where a query sees ...
    """
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise AttentionError(
            f"{name} is {mask.dtype}; give booleans, True where a query sees a key "
            f"({name}.bool()), or numbers to add to the logits."
        )


def visible(mask: Tensor) -> Tensor:
    """True where a mask lets a query see a key, or hides it by a number far below the others.

    A number hides its key if it is −∞, or at least 10,000 below the largest of its row: −1e9 and
    the least number of a type are the usual ones. In any softmax such a key has no weight.

    >>> visible(torch.tensor([0.5, -3.0, -1e9, -torch.inf]))
    tensor([ True,  True, False, False])
    """
    if mask.dtype == torch.bool or not mask.shape[-1]:
        return mask.bool()
    numbers = wide(mask)
    return numbers > numbers.amax(-1, keepdim=True) - HIDES


def causal_mask(L: int, S: int, offset: int, device: torch.device) -> Tensor:
    """(L, S): True where key j ≤ offset + i.

    >>> causal_mask(2, 3, 1, torch.device("cpu"))
    tensor([[ True,  True, False],
            [ True,  True,  True]])
    """
    return torch.ones(L, S, dtype=torch.bool, device=device).tril(offset)


def with_causal(mask: Tensor | None, causal: Tensor) -> Tensor:
    """A mask of either type, and what causality leaves of it.

    >>> with_causal(torch.tensor([[0.5, 0.5]]), torch.tensor([[True, False]]))
    tensor([[0.5000,   -inf]])
    """
    if mask is None:
        return causal
    return mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, -torch.inf)


def wide(x: Tensor) -> Tensor:
    """At least float32, in which statistics are taken.

    >>> wide(torch.ones(1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def with_unit_values(v: Tensor) -> Tensor:
    """(…, S, M + S): the values, and beside them the unit vectors, which a layer makes weights of.

    >>> with_unit_values(torch.tensor([[5.0], [7.0]]))
    tensor([[5., 1., 0.],
            [7., 0., 1.]])
    """
    unit = torch.eye(v.shape[-2], dtype=v.dtype, device=v.device)
    return torch.cat([v, unit.expand(*v.shape[:-1], -1)], -1)
