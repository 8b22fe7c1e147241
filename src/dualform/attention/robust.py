"""RPC-Attention: keys lose what is sparse and corrupted in them before queries read by them.

Softmax attention projects queries on principal axes of the keys (see `diagnose.kernel_pca`). Robust
principal axes are those of the low-rank part of the keys. So the layer runs a few rounds of
principal component pursuit on the keys K, with attention as the low-rank step:

    S ← soft(K − L + U, λ/μ),   K' ← K − S + U,   L ← softmax(scale K' K'ᵀ) V,   U ← U + K − L − S

and ends with y = softmax(scale Q K'ᵀ) V (Teo and Nguyen, *Unveiling the Hidden Structure of
Self-Attention via Kernel Principal Component Analysis*, NeurIPS 2024). μ is nD/(4‖K‖_1) of the n
keys of a head. In a causal layer a key has the μ of the keys up to it, and reads no later ones.

Their code differs in three places: it moves entries by λμ in place of λ/μ, reads by K − S − U, and
takes the width of all heads for D. `variant="published"` does that. They have no queries of their
own: `symmetric=True` takes the rows of K' for them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dualform.attention.masks import same_for_all
from dualform.attention.pursuit import require_options, sparse_step
from dualform.attention.shapes import (
    for_each_query_head,
    heads,
    require_shapes,
    wide,
    with_unit_values,
)
from dualform.attention.softmax import softmax
from dualform.errors import AttentionError

TOGETHER = "by kind='robust', which takes the keys as one matrix"
PUBLISHED_SPARSITY = 4.0
"""λ of the published runs."""
SMALLEST = 1e-12
"""Below this the mean size of keys' entries is not divided by."""


class CleanKeys(NamedTuple):
    """Keys that queries read by, and what was taken for corruption in them.

    >>> clean_keys(torch.ones(3, 4), torch.ones(3, 4), sparsity=1.0, rounds=1).sparse.any()
    tensor(False)
    """

    keys: Tensor
    """K', as large as the keys."""
    sparse: Tensor
    """S, 0 where an entry is as the others are."""


def robust(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    rounds: int = 2,
    sparsity: float | None = None,
    variant: str = "correct",
    symmetric: bool = False,
    offset: int = 0,
    dropout_p: float = 0.0,
) -> Tensor:
    """y_i = Σ_j softmax_j(scale q_i·k'_j) v_j, k' the keys after `rounds` rounds of pursuit.

    `sparsity` is λ, 1/√max(keys, D) unless given (4 in the published variant): the larger, the
    fewer entries are taken for corrupted. It is softmax attention without rounds, and with one
    round in which nothing is corrupted. Values must be as wide as keys, and a mask the same for all
    queries. A pass costs as many reads of the keys as there are rounds.

    >>> _ = torch.manual_seed(0)
    >>> q, k, v = torch.randn(3, 2, 5, 8).unbind()
    >>> robust(q, k, v, is_causal=True).shape
    torch.Size([2, 5, 8])
    >>> torch.equal(robust(q, k, v, rounds=0), softmax(q, k, v))
    True
    >>> other = k.clone()
    >>> other[0, 2, 3] = 100                                  # one entry of one key goes wrong
    >>> far, near = (((f(q, other, v) - f(q, k, v))[0]).norm() for f in (softmax, robust))
    >>> bool(near < far / 2)
    True
    """
    given = _prepared(
        q, k, v, attn_mask, is_causal, scale, rounds, sparsity, variant, symmetric, offset
    )
    return softmax(*given, is_causal, scale, offset=offset, dropout_p=dropout_p)


def robust_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    rounds: int = 2,
    sparsity: float | None = None,
    variant: str = "correct",
    symmetric: bool = False,
    offset: int = 0,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """What `robust` gives, and its weights (…, heads, L, S), which the values have a part in.

    >>> q, k, v = torch.randn(3, 2, 5, 8).unbind()
    >>> y, weights = robust_with_weights(q, k, v)
    >>> torch.allclose(weights @ v, y, atol=1e-6)
    True
    """
    q, k, v, keep = _prepared(
        q, k, v, attn_mask, is_causal, scale, rounds, sparsity, variant, symmetric, offset
    )
    both = softmax(
        q, k, with_unit_values(v), keep, is_causal, scale, offset=offset, dropout_p=dropout_p
    )
    return both[..., : v.shape[-1]], both[..., v.shape[-1] :]


def clean_keys(
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    rounds: int = 2,
    sparsity: float | None = None,
    variant: str = "correct",
) -> CleanKeys:
    """The keys that `robust` reads by, and the entries S that it takes for corrupted.

    >>> _ = torch.manual_seed(0)
    >>> k, v = torch.randn(2, 1, 5, 8).unbind()
    >>> k[0, 2, 3] = 100
    >>> found = clean_keys(k, v, sparsity=1.0, rounds=1)
    >>> found.sparse.nonzero().tolist()
    [[0, 2, 3]]
    """
    require_shapes(k, k, v)
    require_options(rounds, sparsity, variant)
    if k.shape[-1] != v.shape[-1]:
        raise AttentionError(
            f"values of shape {tuple(v.shape)} are not as wide as keys of shape {tuple(k.shape)}; "
            "robust attention takes what keys read of the values for the keys' low-rank part, so "
            f"give values of width {k.shape[-1]}."
        )
    keep = None if attn_mask is None else same_for_all(attn_mask, k, k, TOGETHER)
    K = wide(k)
    S = L = U = torch.zeros_like(K)
    clean, threshold = K, _threshold(K, keep, is_causal, sparsity, variant)
    for made in range(rounds):
        if made:
            near = clean.to(k.dtype)
            L = softmax(near, near, v, keep, is_causal, scale).to(K.dtype)
            U = U + K - L - S
        S, clean = sparse_step(K, L, U, threshold, variant)
    return CleanKeys(clean.to(k.dtype), S.to(k.dtype))


def _prepared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    rounds: int,
    sparsity: float | None,
    variant: str,
    symmetric: bool,
    offset: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, clean keys and values, and which keys are seen."""
    require_shapes(q, k, v)
    keep = None if mask is None else same_for_all(mask, q, k, TOGETHER)
    if keep is not None and keep.ndim > 2 and keep.shape[-3] not in (1, heads(k)):
        k, v = for_each_query_head(k, q), for_each_query_head(v, q)
    k, _ = clean_keys(
        k, v, keep, is_causal, scale, rounds=rounds, sparsity=sparsity, variant=variant
    )
    if symmetric:
        first = offset if is_causal else 0
        rows = for_each_query_head(k, q)[..., first : first + q.shape[-2], :]
        if rows.shape != q.shape or (not is_causal and q.shape[-2] != k.shape[-2]):
            raise AttentionError(
                f"symmetric=True takes keys for queries, but there are {q.shape[-2]} queries"
                f"{f' from {offset} on' if first else ''} and {k.shape[-2]} keys; let tokens "
                "attend to themselves, or leave it out."
            )
        q = rows
    return q, k, v, keep


def _threshold(
    K: Tensor, keep: Tensor | None, is_causal: bool, sparsity: float | None, variant: str
) -> Tensor:
    """λ/μ, with μ⁻¹ four times the mean |entry| of the keys that a key reads: (…, 1 or S, 1)."""
    size = K.abs().mean(-1, keepdim=True)
    number = torch.ones_like(size) if keep is None else keep.mT.to(K.dtype).expand_as(size)
    size = size * number
    if is_causal:
        size, number = size.cumsum(-2), number.cumsum(-2)
    else:
        size, number = size.sum(-2, keepdim=True), number.sum(-2, keepdim=True)
    size, number = 4 * size / number.clamp_min(1), number.clamp_min(K.shape[-1])
    if variant == "published":
        weight = PUBLISHED_SPARSITY if sparsity is None else sparsity
        return weight * heads(K) / size.clamp_min(SMALLEST)
    return size * (number.rsqrt() if sparsity is None else sparsity)
