"""Attention-BN: queries and keys normalized by the statistics of the keys that are seen.

The primal normalizes its inputs as a batch normalization does, f(x) = W Φ((x − βμ)/s)/h + b, with
μ and s² = σ² + ε the mean and biased variance of the keys. Its dual has the logits

    ((q_i − βμ)/s)·((k_j − βμ)/s) scale = q'_i·k_j scale + (terms that do not depend on j),
    q'_i = (q_i − βμ)/(σ² + ε).

Those terms cancel in the softmax. So the layer is ordinary attention with other queries and the
same keys, and any fused kernel serves. A causal or masked query takes the statistics of the keys
it sees.
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
    wide,
)
from dualform.attention.softmax import softmax
from dualform.memory.fused import seen


class Statistics(NamedTuple):
    """Mean, biased variance and number of the keys a query sees: (…, heads, 1 or L, D or 1)."""

    mean: Tensor
    variance: Tensor
    number: Tensor

    def rewrite(self, q: Tensor, beta: float, eps: float) -> Tensor:
        """q' = (q − βμ)/(σ² + ε); 0 for a query of one key, whose weight is 1 whatever q' is."""
        scale = (self.variance + eps).reciprocal().masked_fill(self.number <= 1, 0)
        mean = for_each_query_head(self.mean, q)
        return ((wide(q) - beta * mean) * for_each_query_head(scale, q)).to(q.dtype)


def batch_norm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    beta: float = 1.0,
    eps: float = 1e-5,
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

    In float16 take eps ≥ 1e-3: a key coordinate that never varies makes q' as large as 1/eps. A
    causal layer in 16 bits wants eps ≈ 0.1: its first queries see few keys, and what small
    variances magnify is mostly rounding (with 1e-5, dk is as wrong as it is large).
    """
    require_shapes(q, k, v)
    if attn_mask is None and not offset and can_fuse(q, k):
        if not is_causal:
            from dualform.attention.kernels_statistics import rewrite

            q, k = rewrite(q, k, beta, eps)
            return softmax(q, k, v, scale=scale, dropout_p=dropout_p)
        if q.shape == k.shape:
            from dualform.attention.kernels_prefixes import rewrite_causal

            q, k = rewrite_causal(q, k, beta, eps)
            return softmax(q, k, v, is_causal=True, scale=scale, dropout_p=dropout_p)
    q = statistics(q, k, attn_mask, is_causal, offset).rewrite(q, beta, eps)
    return softmax(q, k, v, attn_mask, is_causal, scale, offset=offset, dropout_p=dropout_p)


def statistics(
    q: Tensor, k: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, offset: int = 0
) -> Statistics:
    """Mean and biased variance, in each coordinate, of the keys that each query sees.

    >>> k = torch.tensor([[1.0], [3.0], [5.0], [7.0]])
    >>> [x.flatten().tolist() for x in statistics(k, k)]
    [[4.0], [5.0], [4.0]]
    >>> [x.flatten()[[0, 1, 3]].tolist() for x in statistics(k, k, is_causal=True)]
    [[1.0, 2.0, 4.0], [0.0, 1.0, 5.0], [1.0, 2.0, 4.0]]
    """
    with torch.autocast(q.device.type, enabled=False):
        if attn_mask is None:
            return _of_prefixes(q, k, None, offset) if is_causal else _of_all(k)
        require_mask(attn_mask, q, k)
        keep = seen(attn_mask)
        if keep.ndim >= 3 and keep.shape[-3] not in (1, k.shape[-3]):
            k = for_each_query_head(k, q)  # heads that share keys see different ones of them
        if keep.ndim >= 2 and keep.shape[-2] > 1:
            return _of_pairs(q, k, keep, is_causal, offset)
        keep = keep[..., 0, :, None] if keep.ndim >= 2 else keep[:, None]
        return _of_prefixes(q, k, keep, offset) if is_causal else _of_kept(k, keep)


def _of_all(k: Tensor) -> Statistics:
    if not k.shape[-2]:
        return _of_kept(k, k.new_zeros(0, 1, dtype=torch.bool))
    variance, mean = torch.var_mean(wide(k), -2, correction=0, keepdim=True)
    return Statistics(mean, variance, mean.new_full((1, 1), k.shape[-2]))


def _of_kept(k: Tensor, keep: Tensor) -> Statistics:
    count = keep.sum(-2, keepdim=True)
    some = count.clamp(min=1)
    mean = _zeroed(wide(k), keep).sum(-2, keepdim=True) / some
    variance = _zeroed((wide(k) - mean).square(), keep).sum(-2, keepdim=True) / some
    return Statistics(mean, variance, count)


def _of_prefixes(q: Tensor, k: Tensor, keep: Tensor | None, offset: int) -> Statistics:
    # Measured from the first key, which changes no variance and spares most of its cancellation.
    origin = wide(k[..., :1, :]).detach()
    apart = _zeroed(wide(k) - origin, keep)
    ones = (
        torch.ones_like(apart[..., :1])
        if keep is None
        else keep.to(apart).expand_as(apart[..., :1])
    )
    count, total, squares = (x.cumsum(-2) for x in (ones, apart, apart.square()))
    last = torch.arange(offset, offset + q.shape[-2], device=k.device).clamp(max=k.shape[-2] - 1)
    return from_sums(origin, *(x.index_select(-2, last) for x in (count, total, squares)))


def from_sums(origin: Tensor, count: Tensor, total: Tensor, squares: Tensor) -> Statistics:
    """Statistics from the number, the sum and the sum of squares of keys measured from an origin.

    >>> mean, variance, _ = from_sums(*map(torch.tensor, (10.0, 2.0, 4.0, 10.0)))  # 11 and 13
    >>> mean.item(), variance.item()
    (12.0, 1.0)
    """
    mean = total / count.clamp(min=1)
    variance = (squares / count.clamp(min=1) - mean.square()).clamp(min=0)
    return Statistics(origin + mean, variance, count)


def _of_pairs(q: Tensor, k: Tensor, keep: Tensor, is_causal: bool, offset: int) -> Statistics:
    if is_causal:
        keep = keep & causal_mask(q.shape[-2], k.shape[-2], offset, q.device)
    k = wide(for_each_query_head(k, q))
    # Measured from the mean of what all queries see, which is no one's future.
    origin = _of_kept(k, keep.all(-2)[..., None]).mean.detach()
    weights, apart = keep.to(k), k - origin
    count = keep.sum(-1, keepdim=True)
    return from_sums(origin, count, weights @ apart, weights @ apart.square())


def _zeroed(x: Tensor, keep: Tensor | None) -> Tensor:
    return x if keep is None else x.masked_fill(~keep, 0)
