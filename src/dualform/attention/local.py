"""Sparse attention: each query's regression is fitted to the keys of its window only.

Queries go in blocks, and the keys and values that a block can see are a strided view of the whole:
one fused call, and no more than (block + 2 window) logits a query.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dualform.attention.shapes import for_each_query_head, require_mask, require_shapes
from dualform.attention.softmax import softmax
from dualform.errors import AttentionError

BLOCK = 64


def local(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    window: int = 64,
    offset: int = 0,
    dropout_p: float = 0.0,
) -> Tensor:
    """y_i = Σ_{|i−j| ≤ window} softmax_j(scale q_i·k_j) v_j; causal: i − window ≤ j ≤ i.

    >>> q, k, v = torch.randn(3, 2, 5, 8).unbind()
    >>> torch.equal(local(q, k, v, window=0), v)
    True
    """
    require_shapes(q, k, v)
    if window < 0:
        raise AttentionError(f"{window=} is negative; give the number of keys seen on each side.")
    L, S = q.shape[-2], k.shape[-2]
    ahead = 0 if is_causal else window
    block = max(BLOCK, window)
    count = max(1, -(-L // block))
    size = block + window + ahead
    k, v = for_each_query_head(k, q), for_each_query_head(v, q)
    keys, values = (_windows(x, offset - window, count, block, size) for x in (k, v))
    where = _windows(
        torch.arange(S, device=q.device)[:, None] + 1, offset - window, count, block, size
    )
    j = where.mT - 1  # (count, 1, size) positions of the keys, -1 where there is none
    i = torch.arange(count * block, device=q.device).view(count, block, 1) + offset
    mask = (j >= 0) & (j >= i - window) & (j <= i + ahead)
    if attn_mask is not None:
        require_mask(attn_mask, q, k)
        mask = _within(attn_mask, mask, j.clamp(min=0), (i - offset).clamp(max=L - 1))
    rows = pad(q, (0, 0, 0, count * block - L)).view(*q.shape[:-2], count, block, q.shape[-1])
    y = softmax(rows, keys, values, mask, scale=scale, dropout_p=dropout_p)
    return y.flatten(-3, -2)[..., :L, :]


def _windows(x: Tensor, first: int, count: int, block: int, size: int) -> Tensor:
    """(…, count, size, d): for each block the rows from first + block·number on, or 0."""
    end, left = first + (count - 1) * block + size, max(-first, 0)
    inside = x[..., max(first, 0) : end, :]
    padded = pad(inside, (0, 0, left, end - first - left - inside.shape[-2]))
    return padded.unfold(-2, size, block).mT


def _within(attn_mask: Tensor, mask: Tensor, j: Tensor, i: Tensor) -> Tensor:
    """The caller's mask at the pairs of the blocks, joined with the window's."""
    full = attn_mask if attn_mask.ndim >= 2 else attn_mask[None]
    i = i if full.shape[-2] > 1 else torch.zeros_like(i)
    j = j if full.shape[-1] > 1 else torch.zeros_like(j)
    own = full[..., i, j]
    return own & mask if own.dtype == torch.bool else own.masked_fill(~mask, -torch.inf)
