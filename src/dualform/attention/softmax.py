"""y_i = Σ_j softmax_j(scale q_i·k_j) v_j: the dual of a regression on exponential features."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from dualform.attention.shapes import causal_mask, heads, require_mask, require_shapes, with_causal


def softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    offset: int = 0,
    dropout_p: float = 0.0,
) -> Tensor:
    """y_i = Σ_j softmax_j(scale q_i·k_j) v_j, scale 1/√D unless given.

    >>> q, k, v = torch.zeros(1, 1, 2), torch.eye(2)[None], torch.tensor([[[1.0], [3.0]]])
    >>> softmax(q, k, v)
    tensor([[[2.]]])

    A query that sees no key reads 0. A mask together with `is_causal` makes one mask of both.
    """
    require_shapes(q, k, v)
    if attn_mask is not None:
        require_mask(attn_mask, q, k)
        attn_mask = attn_mask if attn_mask.ndim >= 2 else attn_mask[None]
    L, S = q.shape[-2], k.shape[-2]
    if is_causal and (attn_mask is not None or offset):
        if offset < S - 1:  # else the first query already sees every key
            attn_mask = with_causal(attn_mask, causal_mask(L, S, offset, q.device))
        is_causal = False
    with _backend():
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=heads(q) != heads(k),
        )


def _backend() -> AbstractContextManager[None]:
    """Function transforms have rules for the plain formula only; the fused kernels have none."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return nullcontext()
    return sdpa_kernel(SDPBackend.MATH)
