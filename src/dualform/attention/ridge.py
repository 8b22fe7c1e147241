"""Ridge attention: another loss, and a layer that solves its regression instead of guessing duals.

With squared errors in place of the ε-insensitive loss, ½‖W‖² + Σ_j (C_j/2)(y_j − f(k_j))², the
dual has no box and its optimum is a linear system. For exponential features, h the sum over the
keys and C_j = h(k_j)/λ it reads (A + λI) v = y, with A_ij = softmax_j(scale k_i·k_j) the
self-attention of the keys: but for λ, v are the values whose attention at the keys is y.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualform.attention.shapes import (
    for_each_query_head,
    require_mask,
    require_shapes,
    visible,
    wide,
)
from dualform.attention.softmax import softmax
from dualform.errors import AttentionError


def ridge(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    penalty: float = 1.0,
    offset: int = 0,
    dropout_p: float = 0.0,
) -> Tensor:
    """y_i = Σ_j softmax_j(scale q_i·k_j) v'_j with (A + λI) v' = (1 + λ) v, A the keys' attention.

    The factor 1 + λ makes it softmax attention as λ → ∞, and the solved regression as λ → 0.
    Solving costs S³ and one S × S matrix a head. A mask must be the same for all queries; the keys
    have it too, when they read each other.

    >>> k, y = torch.randn(1, 6, 3, dtype=torch.float64), torch.randn(1, 6, 2, dtype=torch.float64)
    >>> torch.allclose(ridge(k, k, y, penalty=1e-9), y, atol=1e-4)  # reads back what it was told
    True
    """
    require_shapes(q, k, v)
    if is_causal or (attn_mask is not None and attn_mask.ndim >= 2 and attn_mask.shape[-2] > 1):
        raise AttentionError(
            "ridge attention solves one regression for all queries, so they must see the same "
            "keys; leave is_causal out and give an attn_mask (…, 1, S)."
        )
    if penalty <= 0:
        raise AttentionError(
            f"{penalty=} must be positive; as it grows, this is softmax attention."
        )
    if attn_mask is not None:
        require_mask(attn_mask, q, k)
        k, v = for_each_query_head(k, q), for_each_query_head(v, q)
    values = solved(k, v, attn_mask, scale, penalty)
    return softmax(q, k, values, attn_mask, scale=scale, dropout_p=dropout_p)


def solved(
    k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, penalty: float
) -> Tensor:
    """(A + λI)⁻¹ (1 + λ) v, A the keys' attention to each other under the queries' mask.

    >>> k, v = torch.zeros(2, 1), torch.tensor([[1.0], [3.0]])  # A is ½ throughout
    >>> solved(k, v, None, None, penalty=1.0)
    tensor([[0.],
            [4.]])
    """
    k_, v_ = wide(k), wide(v)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    logits = scale * k_ @ k_.mT
    if mask is not None:
        mask = mask if mask.ndim >= 2 else mask[None]
        hidden = ~visible(mask).expand(*mask.shape[:-1], k.shape[-2])
        bias = torch.zeros_like(logits[..., :1, :]) if mask.dtype == torch.bool else mask
        logits = (logits + bias).masked_fill(hidden, -torch.inf).masked_fill(hidden.mT, 0)
    eye = torch.eye(k.shape[-2], dtype=k_.dtype, device=k.device)
    values: Tensor = torch.linalg.solve(logits.softmax(-1) + penalty * eye, (1 + penalty) * v_)
    return values.to(v.dtype)
