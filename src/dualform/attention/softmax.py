"""y_i = Σ_j softmax_j(scale q_i·k_j) v_j: the dual of a regression on exponential features."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dualform.attention.shapes import (
    causal_mask,
    heads,
    require_mask,
    require_shapes,
    with_causal,
)
from dualform.memory.fused import fused_attention
from dualform.private import in_function_transform


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
    L, S = q.shape[-2], k.shape[-2]
    if is_causal and (attn_mask is not None or offset):
        if offset < S - 1:  # else the first query already sees every key
            attn_mask = with_causal(attn_mask, causal_mask(L, S, offset, q.device))
        is_causal = False
    with _backend():
        y = fused_attention(
            _four(q),
            _four(k),
            _four(v),
            _four_mask(attn_mask, q),
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=heads(q) != heads(k),
        )
    return y if q.ndim == 4 else y.reshape(*q.shape[:-1], v.shape[-1])


def _four(x: Tensor) -> Tensor:
    """(batch, heads, rows, width), the only shape that fused kernels are there for."""
    return x.reshape(-1, *x.shape[-3:]) if x.ndim > 4 else x[(None,) * (4 - x.ndim)]


def _four_mask(mask: Tensor | None, q: Tensor) -> Tensor | None:
    if mask is None or mask.ndim < 4 or q.ndim < 5:
        return mask
    return mask.expand(*q.shape[:-3], *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])


def _backend() -> AbstractContextManager[None]:
    """Function transforms have rules for the plain formula only; the fused kernels have none."""
    if torch.compiler.is_compiling() or not in_function_transform():
        return nullcontext()
    return sdpa_kernel(SDPBackend.MATH)
