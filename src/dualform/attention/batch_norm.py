"""Attention-BN: queries and keys normalized by the statistics of the keys that are seen.

The primal normalizes its inputs as a batch normalization does, f(x) = W Φ((x − βμ)/s)/h + b, with
μ and s² = σ² + ε the mean and biased variance of the keys. Its dual has the logits

    ((q_i − βμ)/s)·((k_j − βμ)/s) scale = q'_i·k_j scale + (terms that do not depend on j),
    q'_i = (q_i − βμ)/(σ² + ε).

Those terms cancel in the softmax. So the layer is ordinary attention with other queries, and any
fused kernel serves. A causal or masked query takes the statistics of the keys it sees. Keys may
be measured from any origin o, since q'_i·o does not depend on j either: one near the keys spares
the products what would cancel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dualform.attention.fused import can_fuse
from dualform.attention.shapes import (
    causal_mask,
    for_each_query_head,
    require_mask,
    require_shapes,
    visible,
    wide,
)
from dualform.attention.softmax import softmax


class Statistics(NamedTuple):
    """Mean, biased variance and number of the keys a query sees: (…, heads, 1 or L, D or 1)."""

    mean: Tensor
    variance: Tensor
    number: Tensor

    def rewrite(self, q: Tensor, beta: float | Tensor, eps: float, variance: bool = True) -> Tensor:
        """q' = (q − βμ)/(σ² + ε); 0 for a query of one key, whose weight is 1 whatever q' is."""
        factor = (self.variance + eps).reciprocal() if variance else torch.ones_like(self.variance)
        factor = for_each_query_head(factor.masked_fill(self.number <= 1, 0), q)
        return (q - beta * for_each_query_head(self.mean, q)) * factor


def batch_norm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    beta: float | Tensor = 1.0,
    eps: float = 1e-5,
    variance: bool = True,
    offset: int = 0,
    dropout_p: float = 0.0,
) -> Tensor:
    """y_i = Σ_j softmax_j(scale (q_i − βμ)/s · (k_j − βμ)/s) v_j, s² = σ² + ε, over the keys i
    sees.

    >>> q, k, v = torch.randn(3, 2, 5, 8).unbind()
    >>> batch_norm(q, k, v).shape
    torch.Size([2, 5, 8])
    >>> torch.allclose(batch_norm(q + 1, k + 1, v), batch_norm(q, k, v), atol=1e-4)
    True

    `beta` may be a tensor, such as a parameter (heads, 1, 1). `variance=False` only centers: s = 1.

    In float16 take eps ≥ 1e-3: a key coordinate that never varies makes q' as large as 1/eps. A
    causal layer in 16 bits wants eps ≈ 0.1: its first queries see few keys, and what small
    variances magnify is mostly rounding (with 1e-5, dk is as wrong as it is large).
    """
    require_shapes(q, k, v)
    plain = attn_mask is None and not offset and variance and can_fuse(q, k)
    if plain and not isinstance(beta, Tensor) and (not is_causal or q.shape == k.shape):
        if is_causal:
            from dualform.attention.kernels_prefixes import rewrite_causal as rewrite
        else:
            from dualform.attention.kernels_statistics import rewrite
        q, k = rewrite(q, k, beta, eps)
        return softmax(q, k, v, is_causal=is_causal, scale=scale, dropout_p=dropout_p)
    with torch.autocast(q.device.type, enabled=False):
        origin, found = _measured(q, k, attn_mask, is_causal, offset)
        moved = wide(q) - beta * for_each_query_head(origin, q)
        q = found.rewrite(moved, beta, eps, variance).to(q.dtype)
        k = measured_from(origin, k)
    return softmax(q, k, v, attn_mask, is_causal, scale, offset=offset, dropout_p=dropout_p)


def statistics(
    q: Tensor, k: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, offset: int = 0
) -> Statistics:
    """Mean and biased variance, in each coordinate, of the keys that each query sees.

    >>> k = torch.tensor([[1.0], [3.0], [5.0], [7.0]])
    >>> [x.flatten().tolist() for x in statistics(k, k)]
    [[4.0], [5.0], [4]]
    >>> [x.flatten()[[0, 1, 3]].tolist() for x in statistics(k, k, is_causal=True)]
    [[1.0, 2.0, 4.0], [0.0, 1.0, 5.0], [1.0, 2.0, 4.0]]
    """
    with torch.autocast(q.device.type, enabled=False):
        origin, found = _measured(q, k, attn_mask, is_causal, offset)
        return found._replace(mean=for_each_query_head(origin, found.mean) + found.mean)


def origin_of(k: Tensor, keep: Tensor | None = None) -> Tensor:
    """(…, 1, D): in each coordinate the nearer to 0 of the first two keys that are seen.

    An origin for causal passes. It shows no query its future: one that sees fewer than two keys
    reads the same from any origin. Of two keys, one may be an outlier, as first tokens often are.

    >>> origin_of(torch.tensor([[100.0, -3.0], [7.0, -4.0], [0.0, 0.0]]))
    tensor([[ 7., -3.]])
    """
    k = wide(k.detach())
    if keep is None:
        first, second = k[..., :1, :], k[..., :2, :][..., -1:, :]
    else:
        nth = keep.cumsum(-2)
        first, second = (k.where(keep & (nth == n), 0) for n in (1, 2))
    first, second = (x.sum(-2, keepdim=True) for x in (first, second))
    return torch.where(second.abs() < first.abs(), second, first)


def measured_from(origin: Tensor, k: Tensor) -> Tensor:
    """k − o, so that products with q' do not cancel; 16-bit keys as they are.

    Those were rounded where they lie, and k − o would be rounded once more. Kernels add up their
    products in 32 bits, and what rounding q' adds to a product with o is the same for every key.

    >>> measured_from(torch.ones(1, 1), torch.tensor([[3.0]]))
    tensor([[2.]])
    """
    return k - origin if wide(k) is k else k


def _measured(
    q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, offset: int
) -> tuple[Tensor, Statistics]:
    """An origin (…, heads of keys, 1, D), and the statistics of the keys measured from it."""
    if mask is None and is_causal:
        origin = origin_of(k)
        return origin, _of_prefixes(q, wide(k) - origin, None, offset)
    mask = k.new_ones(k.shape[-2], dtype=torch.bool) if mask is None else mask
    require_mask(mask, q, k)
    keep = visible(mask if mask.ndim >= 2 else mask[None])
    keep = keep.expand(*keep.shape[:-1], k.shape[-2])
    by_head = keep.ndim >= 3 and keep.shape[-3] not in (1, k.shape[-3])
    each = for_each_query_head(k, q) if by_head else k  # heads that share keys see different ones
    if keep.shape[-2] == 1:
        kept = _of_any_head(keep).mT
        origin = origin_of(k, kept) if is_causal else _mean_of(k.detach(), kept)
        apart = wide(each) - for_each_query_head(origin, each)
        if is_causal:
            return origin, _of_prefixes(q, apart, keep.mT, offset)
        return origin, _of_kept(apart, keep.mT)
    if is_causal:
        keep = keep & causal_mask(q.shape[-2], k.shape[-2], offset, q.device)
    origin = origin_of(k, _first_of_two(_of_any_head(keep)).mT)
    return origin, _of_pairs(wide(each) - for_each_query_head(origin, each), keep)


def _of_any_head(keep: Tensor) -> Tensor:
    return keep.any(-3, keepdim=True) if keep.ndim >= 3 else keep


def _first_of_two(keep: Tensor) -> Tensor:
    """(…, 1, S): what the first query that sees two keys sees, which is no later one's future."""
    first = (keep.sum(-1, keepdim=True) > 1).int().argmax(-2, keepdim=True)
    return keep.gather(-2, first.expand(*keep.shape[:-2], 1, keep.shape[-1]))


def _mean_of(k: Tensor, keep: Tensor) -> Tensor:
    """(…, 1, D): the mean of the keys that are seen; an origin where all queries see the same."""
    return _zeroed(wide(k), keep).sum(-2, keepdim=True) / keep.sum(-2, keepdim=True).clamp(min=1)


def _of_kept(apart: Tensor, keep: Tensor) -> Statistics:
    mean = _mean_of(apart, keep)
    return Statistics(mean, _mean_of((apart - mean).square(), keep), keep.sum(-2, keepdim=True))


def _of_prefixes(q: Tensor, apart: Tensor, keep: Tensor | None, offset: int) -> Statistics:
    ones = torch.ones_like(apart[..., :1])
    apart, ones = _zeroed(apart, keep), _zeroed(ones, keep)
    sums = (x.cumsum(-2) for x in (ones, apart, apart.square()))
    last = torch.arange(offset, offset + q.shape[-2], device=q.device)
    last = last.clamp(max=apart.shape[-2] - 1)
    return from_sums(*(x.index_select(-2, last) for x in sums))


def from_sums(count: Tensor, total: Tensor, squares: Tensor) -> Statistics:
    """Statistics from the number, the sum and the sum of squares of keys.

    >>> mean, variance, _ = from_sums(*map(torch.tensor, (2.0, 4.0, 10.0)))  # 1 and 3
    >>> mean.item(), variance.item()
    (2.0, 1.0)
    """
    mean = total / count.clamp(min=1)
    variance = (squares / count.clamp(min=1) - mean.square()).clamp(min=0)
    return Statistics(mean, variance, count)


def _of_pairs(apart: Tensor, keep: Tensor) -> Statistics:
    count = keep.sum(-1, keepdim=True)
    return from_sums(count, _summed(keep, apart), _summed(keep, apart.square()))


def _summed(keep: Tensor, x: Tensor) -> Tensor:
    """Σ_j keep_ij x_j; where the heads share a mask, for all of them in one product."""
    if x.ndim < 3 or (keep.ndim >= 3 and keep.shape[-3] > 1):
        return keep.to(x) @ x
    keep = keep.squeeze(-3) if keep.ndim >= 3 else keep
    columns = x.movedim(-3, -2)
    sums = keep.to(x) @ columns.flatten(-2)
    return sums.reshape(*sums.shape[:-1], *columns.shape[-2:]).movedim(-2, -3)


def _zeroed(x: Tensor, keep: Tensor | None) -> Tensor:
    return x if keep is None else x.masked_fill(~keep, 0)
