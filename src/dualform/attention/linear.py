"""y_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j): finite features, so the primal form is cheap.

The context is the weights W = Σ_j φ(k_j) v_jᵀ and z = Σ_j φ(k_j): the recurrent state of a
decoder. A causal pass goes through the sequence in chunks: within a chunk by pairs, from chunk to
chunk by state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad

from dualform.attention.fused import can_fuse
from dualform.attention.shapes import (
    causal_mask,
    for_each_query_head,
    require_mask,
    require_shapes,
    wide,
    with_causal,
)
from dualform.memory import EluPlusOne, FeatureMap
from dualform.memory.kernels import nonzero

CHUNK = 64
ELU_PLUS_ONE = EluPlusOne()


class State(NamedTuple):
    """W = Σ_j φ(k_j) v_jᵀ (…, f, m) and z = Σ_j φ(k_j) (…, f, 1): the context as weights."""

    W: Tensor
    z: Tensor


def linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    features: FeatureMap = ELU_PLUS_ONE,
    normalized: bool = True,
    offset: int = 0,
    dropout_p: float = 0.0,
) -> Tensor:
    """y_i = Σ_j φ(scale q_i)·φ(k_j) v_j / Σ_j φ(scale q_i)·φ(k_j), in O(L + S) time and memory.

    `scale` is 1 unless given; `normalized=False` leaves the divisor out. A mask that treats queries
    differently takes an L × S matrix, as the mask itself does; numbers in it multiply by exp.
    Dropout takes one too: it drops weights, which are not formed without it.

    >>> q, k, v = torch.randn(3, 2, 5, 8).unbind()
    >>> from dualform.memory import Memory
    >>> memory = Memory(k, v, EluPlusOne(normalized=True))
    >>> torch.allclose(linear(q, k, v), memory.primal().read(q), atol=1e-5)
    True
    """
    require_shapes(q, k, v)
    plain = attn_mask is None and not (offset or dropout_p) and normalized and q.shape == k.shape
    narrow = max(q.shape[-1], v.shape[-1]) <= 128
    q = q if scale is None else q * scale
    if plain and narrow and type(features) is EluPlusOne and can_fuse(q, k):
        from dualform.attention.kernels_linear import linear_attention

        return linear_attention(q, k, v, is_causal)
    phi_q, phi_k = features.features(q), features.features(k)
    phi_k, v = for_each_query_head(phi_k, q), for_each_query_head(v, q)
    if attn_mask is not None:
        require_mask(attn_mask, q, k)
    if dropout_p or (attn_mask is not None and attn_mask.ndim >= 2 and attn_mask.shape[-2] > 1):
        return _by_pairs(phi_q, phi_k, v, attn_mask, is_causal, offset, normalized, dropout_p)
    if attn_mask is not None:
        phi_k = phi_k * _factors(attn_mask, phi_k).mT
    if not is_causal:
        return read(phi_q, state(phi_k, v), normalized)
    return _causal(phi_q, phi_k, v, offset, normalized)


def state(phi_k: Tensor, v: Tensor) -> State:
    """W = Σ_j φ(k_j) v_jᵀ and z = Σ_j φ(k_j).

    >>> state(torch.ones(5, 2), torch.ones(5, 3)).W
    tensor([[5., 5., 5.],
            [5., 5., 5.]])
    """
    return State(phi_k.mT @ v, wide(phi_k).sum(-2).to(phi_k.dtype).unsqueeze(-1))


def read(phi_q: Tensor, state: State, normalized: bool = True) -> Tensor:
    """φ(q) W / φ(q)·z; 0 where nothing answers.

    >>> read(torch.ones(1, 2), State(torch.ones(2, 1), torch.ones(2, 1)))
    tensor([[1.]])
    """
    y = phi_q @ state.W.to(phi_q.dtype)
    return y / nonzero(phi_q @ state.z.to(phi_q.dtype)) if normalized else y


def _factors(mask: Tensor, like: Tensor) -> Tensor:
    mask = mask if mask.ndim >= 2 else mask[None]
    return (mask if mask.dtype == torch.bool else mask.exp()).to(like.dtype)


def _by_pairs(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    offset: int,
    normalized: bool,
    dropout_p: float,
) -> Tensor:
    if is_causal:
        causal = causal_mask(phi_q.shape[-2], phi_k.shape[-2], offset, v.device)
        mask = with_causal(mask, causal)
    weights = phi_q @ phi_k.mT
    weights = weights if mask is None else weights * _factors(mask, phi_q)
    total = nonzero(weights.sum(-1, keepdim=True))
    y = dropout(weights, dropout_p, training=dropout_p > 0) @ v
    return y / total if normalized else y


def _causal(phi_q: Tensor, phi_k: Tensor, v: Tensor, offset: int, normalized: bool) -> Tensor:
    """Keys before the first query as one state, then chunk by chunk."""
    end = min(offset + phi_q.shape[-2], phi_k.shape[-2])
    start = min(offset, end)
    before = state(phi_k[..., :start, :], v[..., :start, :])
    inside = slice(start, end)
    y, after = scan(phi_q, phi_k[..., inside, :], v[..., inside, :], before, normalized)
    late = phi_q[..., end - start :, :]  # queries past the last key see them all
    return y if late.shape[-2] == 0 else torch.cat([y, read(late, after, normalized)], -2)


def scan(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, before: State, normalized: bool = True
) -> tuple[Tensor, State]:
    """Causal reads of the first queries, one a key, and the state after the last key.

    >>> ones, nothing = torch.ones(3, 1), State(torch.zeros(1, 1), torch.zeros(1, 1))
    >>> y, after = scan(ones, ones, torch.tensor([[1.0], [2.0], [6.0]]), nothing)
    >>> y.flatten(), after.W, after.z
    (tensor([1.0000, 1.5000, 3.0000]), tensor([[9.]]), tensor([[3.]]))
    """
    n = phi_k.shape[-2]
    valued = pad(v, (0, 1), value=1.0)  # the last column sums the weights themselves
    phi_q, phi_k, valued = (_chunked(x, n) for x in (phi_q[..., :n, :], phi_k, valued))
    steps = wide(phi_k.mT @ valued)
    first = wide(torch.cat(before, -1)).unsqueeze(-3)
    states = torch.cat([first.expand(*steps.shape[:-3], 1, *steps.shape[-2:]), steps], -3).cumsum(
        -3
    )
    mine = (phi_q @ phi_k.mT).tril()
    sums = mine @ valued + phi_q @ states[..., :-1, :, :].to(phi_q.dtype)
    sums = sums.flatten(-3, -2)[..., :n, :]
    y, total = sums[..., :-1], sums[..., -1:]
    last = states[..., -1, :, :]
    return (y / nonzero(total) if normalized else y), State(last[..., :-1], last[..., -1:])


def _chunked(x: Tensor, n: int) -> Tensor:
    size = min(CHUNK, max(n, 1))
    filled = pad(x, (0, 0, 0, -n % size))
    return filled.view(*x.shape[:-2], -1, size, x.shape[-1])
