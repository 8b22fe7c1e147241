"""Attention-SH: each head fits its regression to fewer, pooled keys; BN+SH normalizes those too.

Head h sees blocks of factor_h keys, each averaged to one key and one value; queries stay as they
are. A causal query at position p sees the blocks that are complete by then, and the rest of the
keys up to p as they are: nothing of the future enters, and at every position the past is all there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from dualform.attention.batch_norm import batch_norm
from dualform.attention.fused import can_fuse
from dualform.attention.masks import same_for_all
from dualform.attention.shapes import heads, require_shapes
from dualform.attention.shorten import Pool, Shortened, require_factors, shorten
from dualform.attention.softmax import softmax
from dualform.errors import AttentionError

CHUNK = 256
"""Queries of a causal pass that are read at a time; its masks are CHUNK × keys."""
POOLED = "where keys are pooled, since the keys of a block have one weight"
"""Why a mask is refused."""


def scaled_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    factors: tuple[int, ...] = (1, 2, 4, 8),
    pool: Pool = "mean",
    lead: int = 0,
    offset: int = 0,
    dropout_p: float = 0.0,
) -> Tensor:
    """y_i = Σ_b softmax_b(scale q_i·k̄_b) v̄_b over blocks of a head's factor, averaged to k̄ and
    v̄.

    Heads are shared out among the factors, as many consecutive ones to each. The first `lead` keys
    (a class token) are kept out of the blocks. The mask must be the same for all queries.

    >>> q, k, v = torch.randn(3, 4, 16, 8).unbind()
    >>> y = scaled_heads(q, k, v, factors=(1, 2))
    >>> torch.allclose(y[:2], softmax(q[:2], k[:2], v[:2]), atol=1e-6)   # factor 1: heads 0 and 1
    True
    """
    require_shapes(q, k, v)
    inner = partial(softmax, scale=scale, dropout_p=dropout_p)
    plan = _Plan(factors, pool, lead, is_causal, offset, inner)
    keep = plan.check(q, k, attn_mask)
    plain = attn_mask is None and not (is_causal or dropout_p or lead)
    if plain and pool == "mean" and k.shape == v.shape and can_fuse(q, k):
        from dualform.attention.kernels_pool import scaled_heads_attention

        return scaled_heads_attention(q, k, v, factors, scale)
    return plan.read(q, k, v, keep)


def batch_norm_scaled_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    factors: tuple[int, ...] = (1, 2, 4, 8),
    pool: Pool = "mean",
    lead: int = 0,
    beta: float | Tensor = 1.0,
    eps: float = 1e-5,
    variance: bool = True,
    offset: int = 0,
    dropout_p: float = 0.0,
) -> Tensor:
    """Scaled heads whose queries and keys are normalized by the statistics of the shortened keys.

    >>> q, k, v = torch.randn(3, 4, 16, 8).unbind()
    >>> y = batch_norm_scaled_heads(q, k, v, factors=(2,))
    >>> torch.allclose(y, batch_norm(q, *shorten(k, v, 2)[:2]), atol=1e-6)
    True
    """
    require_shapes(q, k, v)
    inner = partial(batch_norm, scale=scale, eps=eps, variance=variance, dropout_p=dropout_p)
    by_head = isinstance(beta, Tensor) and beta.ndim >= 3 and beta.shape[-3] > 1
    plan = _Plan(factors, pool, lead, is_causal, offset, partial(inner, beta=beta))
    keep = plan.check(q, k, attn_mask)
    if not (by_head and isinstance(beta, Tensor)):
        return plan.read(q, k, v, keep)
    plans = (replace(plan, inner=partial(inner, beta=own)) for own in beta.chunk(len(factors), -3))
    groups = zip(plans, plan.groups(q, k, v, keep), strict=True)
    return torch.cat([own.read_factor(*group) for own, group in groups], -3)


@dataclass(frozen=True)
class _Plan:
    """How heads are shortened, and what reads the shortened keys."""

    factors: tuple[int, ...]
    pool: Pool
    lead: int
    is_causal: bool
    offset: int
    inner: Callable[..., Tensor]

    def check(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor | None:
        """The keys that are seen, if not all; raises where heads or mask cannot be shared out."""
        require_factors(self.factors, self.pool, heads(k))
        return None if mask is None else same_for_all(mask, q, k, POOLED)

    def read(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        """All heads, those of a factor at a time."""
        if len(set(self.factors)) == 1:
            return self.read_factor(q, k, v, keep, self.factors[0])
        return torch.cat([self.read_factor(*x) for x in self.groups(q, k, v, keep)], -3)

    def read_factor(
        self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, factor: int
    ) -> Tensor:
        """Heads of one factor."""
        return (_causal if self.is_causal else _whole)(q, k, v, keep, factor, self)

    def groups(
        self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None, int]]:
        """q, k, v and mask of the heads of each factor, and the factor."""
        count = len(self.factors)
        split = [x.chunk(count, -3) for x in (q, k, v)]
        return zip(*split, _split(keep, heads(k), count), self.factors, strict=True)


def _whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    factor: int,
    plan: _Plan,
) -> Tensor:
    lead = plan.lead
    rest = None if keep is None else keep[..., lead:]
    short = shorten(k[..., lead:, :], v[..., lead:, :], factor, plan.pool, rest)
    k, v = (torch.cat([x[..., :lead, :], y], -2) for x, y in ((k, short.k), (v, short.v)))
    mask = None if keep is None else torch.cat([keep[..., :lead], _known(short.keep)], -1)
    return plan.inner(q, k, v, mask)


def _causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    factor: int,
    plan: _Plan,
) -> Tensor:
    if factor == 1:
        return plan.inner(q, k, v, keep, is_causal=True, offset=plan.offset)
    lead = plan.lead
    blocks = (k.shape[-2] - lead) // factor * factor
    whole = slice(lead, lead + max(blocks, 0))
    rest = None if keep is None else keep[..., whole]
    short = shorten(k[..., whole, :], v[..., whole, :], factor, plan.pool, rest)
    read = partial(_read_chunk, short=short, k=k, v=v, keep=keep, factor=factor, plan=plan)
    starts = range(0, q.shape[-2], CHUNK)
    parts = [read(q[..., a : a + CHUNK, :], first=plan.offset + a) for a in starts]
    return torch.cat(parts, -2)


def _read_chunk(
    q: Tensor,
    *,
    first: int,
    short: Shortened,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    factor: int,
    plan: _Plan,
) -> Tensor:
    """Queries from position `first` on: leading keys, complete blocks, keys of the open block."""
    last, lead = first + q.shape[-2] - 1, plan.lead
    done, open_ = (min(p + 1, k.shape[-2]) - lead for p in (last, first))
    blocks, start = max(done // factor, 0), lead + max(open_ // factor, 0) * factor
    head, tail = slice(0, lead), slice(start, max(lead + done, start))
    parts = [
        [x[..., head, :], s[..., :blocks, :], x[..., tail, :]]
        for x, s in ((k, short.k), (v, short.v))
    ]
    p = torch.arange(first, last + 1, device=q.device)[:, None]
    mask = torch.cat(_sees(p, k.shape[-2], blocks, tail, factor, lead), -1)
    if keep is not None:
        mask = mask & torch.cat(
            [keep[..., head], _known(short.keep)[..., :blocks], keep[..., tail]], -1
        )
    return plan.inner(q, *(torch.cat(part, -2) for part in parts), mask)


def _sees(p: Tensor, S: int, blocks: int, tail: slice, factor: int, lead: int) -> list[Tensor]:
    """Which leading keys, blocks and open keys the queries at positions p see."""
    until = (p + 1).clamp(max=S)
    complete = (until - lead).clamp(min=0) // factor
    head = torch.arange(lead, device=p.device)
    block = torch.arange(blocks, device=p.device)
    raw = torch.arange(tail.start, tail.stop, device=p.device)
    return [head < until, block < complete, (raw >= lead + complete * factor) & (raw < until)]


def _split(keep: Tensor | None, heads: int, count: int) -> list[Tensor | None]:
    if keep is None or keep.ndim < 3 or keep.shape[-3] == 1:
        return [keep] * count
    if keep.shape[-3] != heads:
        raise AttentionError(
            f"attn_mask has {keep.shape[-3]} heads, but there are {heads} heads of keys; give a "
            "mask for those, or one for all."
        )
    return list(keep.chunk(count, -3))


def _known(keep: Tensor | None) -> Tensor:
    assert keep is not None
    return keep
