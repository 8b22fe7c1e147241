"""Entmax attention: weights that are exactly 0 for keys far below the best.

y_i = Σ_j entmax_α(scale q_i·k_j) v_j: the mean under the distribution that maximizes θ·p − Ω_α(p),
Ω_α Tsallis's negative entropy. α = 1 is softmax, 2 sparsemax. α may be learned: with ε = α − 1,
l = log p and s = p^{2−α},

    dp/dα = t − s Σt/Σs,   t = −p l² g(ε l),   g(x) = (e^{−x} − 1 + x)/x²

(Correia, Niculae and Martins, *Adaptively Sparse Transformers*, EMNLP 2019; written so that it
holds at α = 1 too, where g is ½).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import dropout

from dualform.attention.shapes import (
    causal_mask,
    for_each_query_head,
    require_mask,
    require_shapes,
    with_causal,
)
from dualform.errors import AttentionError
from dualform.families import entmax as weights_of


def entmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    alpha: float | Tensor = 1.5,
    offset: int = 0,
    dropout_p: float = 0.0,
) -> Tensor:
    """y_i = Σ_j entmax_j(scale q_i·k_j) v_j, with α = 1 softmax attention, above it sparse.

    The weights are an L × S matrix a head. `alpha` may be a tensor, of one element or
    (heads, 1, 1), and then has a gradient; it must stay at least 1.

    >>> q, k, v = torch.eye(3)[None] * 4, torch.eye(3)[None], torch.randn(1, 3, 2)
    >>> torch.equal(entmax(q, k, v, alpha=2.0), v)            # every query sees its own key only
    True
    """
    require_shapes(q, k, v)
    L, S = q.shape[-2], k.shape[-2]
    if attn_mask is not None:
        require_mask(attn_mask, q, k)
    if is_causal:
        attn_mask = with_causal(attn_mask, causal_mask(L, S, offset, q.device))
    k, v = for_each_query_head(k, q), for_each_query_head(v, q)
    logits = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT
    if attn_mask is not None:
        hidden = attn_mask.dtype == torch.bool
        logits = logits.masked_fill(~attn_mask, -torch.inf) if hidden else logits + attn_mask
    weights = _weights(logits, alpha) if S else torch.zeros_like(logits)
    return dropout(weights, dropout_p, training=dropout_p > 0).to(v.dtype) @ v


def _weights(logits: Tensor, alpha: float | Tensor) -> Tensor:
    if not isinstance(alpha, Tensor):
        return weights_of(logits, alpha)
    if alpha.numel() == 1:
        learned: Tensor = _Learned.apply(logits, alpha)  # type: ignore[no-untyped-call]
        return learned
    if logits.ndim < 3 or alpha.shape != (logits.shape[-3], 1, 1):
        raise AttentionError(
            f"alpha of shape {tuple(alpha.shape)} does not fit logits of shape "
            f"{tuple(logits.shape)}; give one element, or one for each head: (heads, 1, 1)."
        )
    heads = zip(logits.unbind(-3), alpha.unbind(0), strict=True)
    return torch.stack([_weights(one, own) for one, own in heads], -3)


class _Learned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, alpha: Tensor) -> Tensor:
        ctx.alpha, ctx.shape = float(alpha.detach()), alpha.shape
        p = weights_of(logits, ctx.alpha)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor, Tensor]:
        p: Tensor = ctx.saved_tensors[0].double()
        e, epsilon = e.double(), ctx.alpha - 1
        log = torch.where(p > 0, p, 1).log()
        s = torch.where(p > 0, (log * (1 - epsilon)).exp(), 0)
        total = s.sum(-1, keepdim=True)
        share = s / total.masked_fill(total == 0, 1)
        t = -p * log.square() * _g(epsilon * log)
        by_alpha = (e * (t - share * t.sum(-1, keepdim=True))).sum()
        by_logits = s * e - share * (s * e).sum(-1, keepdim=True)
        kept = ctx.saved_tensors[0].dtype
        return by_logits.to(kept), by_alpha.to(kept).reshape(ctx.shape)


def _g(x: Tensor) -> Tensor:
    """(e^{−x} − 1 + x)/x²; by its series where x is small."""
    near = x.abs() < 1e-3
    far = torch.where(near, 1, x)
    exact = (torch.expm1(-far) + far) / far.square()
    return torch.where(near, 0.5 - x / 6 + x.square() / 24, exact)
