"""Attention as a hypernetwork: the scores of a pair of tokens make a network for its value.

`o_hq = Σ_k a_hqk φ(Σ_g a_gqk v_gk)`: the scores of a pair, one a head, first mix the heads' values,
and after φ weigh the heads' outputs. With the projections around it, a pair of tokens is read by a
value network of two layers, whose weights the scores make (Schug, Kobayashi, Akram, Sacramento and
Pascanu, *Attention as a Hypernetwork*, 2024). The scores `a_·qk` are the pair's *latent code*.

The values of all pairs are (L, S, M) numbers. They are formed for some keys at a time, and again
for the backward pass; the scores of all pairs are held, (heads, L, S).
"""

from __future__ import annotations

import math
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
    wide,
    with_causal,
)
from dualform.errors import AttentionError

PAIRS = {"cpu": 1 << 24, "cuda": 1 << 26}
"""About so many numbers of pairs' values are formed at a time: more where each call is dear."""
EPS = 1e-6
"""What is added to the mean square of the heads' scores."""
BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "linear": lambda x: x}
SCORES = ("rms", "dot", "softmax")


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

    `activation` is φ, "relu" or "linear". `scores="dot"` takes a = scale q·k as it is, and
    `scores="softmax"` a softmax over keys, as ordinary attention does; a mask may then add numbers
    to what it is taken of. It is not linear in the values.

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
    mask = _mask(q, k, attn_mask, is_causal, offset, scores)
    a = _codes(_with_heads(q), _with_heads(for_each_query_head(k, q)), mask, scale, scores)
    a = dropout(a, dropout_p, training=dropout_p > 0)
    of_a_key = math.prod(a.shape[:-3]) * a.shape[-2] * v.shape[-1]
    some = max(1, PAIRS.get(q.device.type, PAIRS["cuda"]) // max(1, of_a_key))
    if some >= a.shape[-1]:
        y = _read(a, v, activation)
    else:
        read = partial(checkpoint, _read, activation=activation, use_reentrant=False)
        first, *others = zip(torch.split(a, some, -1), torch.split(v, some, -2), strict=True)
        y = read(*first)
        for part in others:  # one sum, for a stack of parts would hold each part's output
            y = y + read(*part)
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
    mask = _mask(q, k, attn_mask, is_causal, offset, scores)
    keys = _with_heads(for_each_query_head(k, q))
    found = _codes(_with_heads(q), keys, mask, scale, scores)
    return found if q.ndim > 2 else found[0]


def _mask(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool, offset: int, scores: str
) -> Tensor | None:
    """True where a query sees a key, or what is added to the logits; None where all see all."""
    if scores not in SCORES:
        known = ", ".join(map(repr, SCORES))
        raise AttentionError(f"scores='{scores}' is unknown; choose one of {known}.")
    if attn_mask is not None:
        require_mask(attn_mask, q, k)
        seen = visible(attn_mask)
        adds = attn_mask.dtype != torch.bool and bool((attn_mask.masked_fill(~seen, 0) != 0).any())
        if adds and scores != "softmax":
            raise AttentionError(
                "attn_mask adds finite numbers to scores, as the position bias of T5 does, and "
                f"kind='hyper' with {scores=} only hides keys; give booleans, or 0 and -inf, or "
                "take scores='softmax'."
            )
        attn_mask = attn_mask.masked_fill(~seen, -torch.inf) if adds else seen
    if not is_causal:
        return attn_mask
    return with_causal(attn_mask, causal_mask(q.shape[-2], k.shape[-2], offset, q.device))


def _codes(q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None, scores: str) -> Tensor:
    """a, from scores that are squared, and added to, in at least float32."""
    a = wide((q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT)
    seen = None if mask is None else visible(mask)
    if mask is not None and seen is not None and mask.dtype != torch.bool:
        a = a + mask.masked_fill(~seen, 0)
    if scores == "softmax":
        a = torch.softmax(a if seen is None else a.masked_fill(~seen, -torch.inf), -1)
        a = a if seen is None else torch.where(seen, a, 0.0)
        return a.to(q.dtype)
    a = a if seen is None else a.masked_fill(~seen, 0.0)
    if scores == "rms":
        a = a * torch.rsqrt(a.square().mean(-3, keepdim=True) + EPS)
    return a.to(q.dtype)


def _read(a: Tensor, v: Tensor, activation: str) -> Tensor:
    """(…, heads, L, M) of a (…, heads, L, S) and v (…, heads, S, M)."""
    mixed = torch.einsum("...hqk,...hkm->...qkm", a, v)
    return torch.einsum("...hqk,...qkm->...hqm", a, BETWEEN[activation](mixed))


def _with_heads(x: Tensor) -> Tensor:
    return x if x.ndim > 2 else x[None]
