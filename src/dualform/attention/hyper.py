"""Attention as a hypernetwork: the scores of a pair of tokens make a network for its value.

`o_hq = Σ_k a_hqk φ(Σ_g a_gqk v_gk)`: the scores of a pair, one a head, first mix the heads' values,
and after φ weigh the heads' outputs. With the projections around it, a pair of tokens is read by a
value network of two layers, whose weights the scores make (Schug, Kobayashi, Akram, Sacramento and
Pascanu, *Attention as a Hypernetwork*, 2024). The scores `a_·qk` are the pair's *latent code*.

The values of all pairs are (L, S, M) numbers. They are formed for some keys at a time, and again
for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from dualform.attention.shapes import (
    causal_mask,
    for_each_query_head,
    require_mask,
    require_shapes,
    visible,
    with_causal,
)
from dualform.errors import AttentionError

PAIRS = 1 << 24
"""About so many numbers of pairs' values are formed at a time."""
EPS = 1e-6
"""What is added to the mean square of the heads' scores."""
BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "linear": lambda x: x}
SCORES = ("rms", "softmax")


def hyper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    activation: str = "relu",
    scores: str = "rms",
    offset: int = 0,
    dropout_p: float = 0.0,
) -> Tensor:
    """o_hq = Σ_k a_hqk φ(Σ_g a_gqk v_gk), with a = scale q·k over its root mean square by heads.

    `activation` is φ, "relu" or "linear"; `scores="softmax"` takes a softmax over keys for a, as
    ordinary attention does. It is the one kind that is not linear in the values.

    >>> q, k, v = torch.randn(3, 2, 5, 8).unbind()           # 2 heads, 5 tokens
    >>> hyper(q, k, v, is_causal=True).shape
    torch.Size([2, 5, 8])
    >>> torch.allclose(hyper(q, k, 2 * v), 2 * hyper(q, k, v), atol=1e-5)
    True
    >>> torch.allclose(hyper(q, k, -v), -hyper(q, k, v))
    False
    """
    require_shapes(q, k, v)
    if activation not in BETWEEN:
        known = ", ".join(map(repr, BETWEEN))
        raise AttentionError(f"activation='{activation}' is unknown; choose one of {known}.")
    v = _with_heads(for_each_query_head(v, q))
    codes = partial(_codes, _with_heads(q), scale=scale, scores=scores)
    a = codes(_with_heads(for_each_query_head(k, q)), _mask(q, k, attn_mask, is_causal, offset))
    a = dropout(a, dropout_p, training=dropout_p > 0)
    numbers = max(1, a[..., 0, :, 0].numel() * v.shape[-1])
    some = max(1, PAIRS // numbers)
    if some >= a.shape[-1]:
        y = _read(a, v, activation)
    else:
        parts = zip(torch.split(a, some, -1), torch.split(v, some, -2), strict=True)
        read = partial(checkpoint, _read, activation=activation, use_reentrant=False)
        y = torch.stack([read(*part) for part in parts]).sum(0)
    return y if q.ndim > 2 else y[0]


def latent_codes(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    scores: str = "rms",
    offset: int = 0,
) -> Tensor:
    """(…, heads, L, S): a, of which `[..., :, i, j]` is the latent code of a pair of tokens.

    >>> codes = latent_codes(*torch.randn(2, 4, 5, 8))
    >>> bool((codes.square().mean(0) <= 1).all()), codes.shape
    (True, torch.Size([4, 5, 5]))
    """
    require_shapes(q, k, k)
    mask = _mask(q, k, attn_mask, is_causal, offset)
    keys = _with_heads(for_each_query_head(k, q))
    found = _codes(_with_heads(q), keys, mask, scale=scale, scores=scores)
    return found if q.ndim > 2 else found[0]


def _mask(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool, offset: int
) -> Tensor | None:
    """True where a query sees a key; None where all see all."""
    if attn_mask is not None:
        require_mask(attn_mask, q, k)
        seen = visible(attn_mask)
        if attn_mask.dtype != torch.bool and bool((attn_mask.masked_fill(~seen, 0) != 0).any()):
            raise AttentionError(
                "attn_mask adds finite numbers to scores, as the position bias of T5 does, and "
                "kind='hyper' only hides keys; give booleans, or 0 and -inf."
            )
        attn_mask = seen
    if not is_causal:
        return attn_mask
    return with_causal(attn_mask, causal_mask(q.shape[-2], k.shape[-2], offset, q.device))


def _codes(q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None, scores: str) -> Tensor:
    if scores not in SCORES:
        known = ", ".join(map(repr, SCORES))
        raise AttentionError(f"scores='{scores}' is unknown; choose one of {known}.")
    a = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if scores == "softmax":
        a = a if mask is None else a.masked_fill(~mask, -torch.inf)
        seen = torch.softmax(a, -1)
        return seen if mask is None else torch.where(mask, seen, 0.0)
    a = a if mask is None else a.masked_fill(~mask, 0.0)
    return a * torch.rsqrt(a.square().mean(-3, keepdim=True) + EPS)


def _read(a: Tensor, v: Tensor, activation: str) -> Tensor:
    """(…, heads, L, M) of a (…, heads, L, S) and v (…, heads, S, M)."""
    mixed = torch.einsum("...hqk,...hkm->...qkm", a, v)
    return torch.einsum("...hqk,...qkm->...hqm", a, BETWEEN[activation](mixed))


def _with_heads(x: Tensor) -> Tensor:
    return x if x.ndim > 2 else x[None]
