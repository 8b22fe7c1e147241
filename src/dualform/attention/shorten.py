"""Fewer keys: the training data of a regression, averaged or thinned in blocks."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from dualform.errors import AttentionError

Pool = Literal["mean", "stride", "random"]
POOLS: tuple[str, ...] = get_args(Pool)


class Shortened(NamedTuple):
    """Keys and values of blocks, and which of the blocks hold anything that is seen."""

    k: Tensor
    v: Tensor
    keep: Tensor | None


def require_factors(factors: tuple[int, ...], pool: str, heads: int) -> None:
    """Raise unless every factor is a whole number from 1, and they share out the heads.

    >>> require_factors((1, 2, 4), "mean", 8)
    Traceback (most recent call last):
    dualform.errors.AttentionError: 3 factors (1, 2, 4) cannot share 8 heads of keys; ...
    """
    if pool not in POOLS:
        raise AttentionError(f"pool='{pool}' is unknown; choose one of {', '.join(POOLS)}.")
    if not factors or any(not isinstance(s, int) or s < 1 for s in factors):
        raise AttentionError(f"factors={factors} must be whole numbers from 1, at least one.")
    if heads % len(factors):
        raise AttentionError(
            f"{len(factors)} factors {factors} cannot share {heads} heads of keys; their number "
            "must divide the heads, each factor serving as many consecutive ones."
        )


def shorten(
    k: Tensor, v: Tensor, factor: int, pool: Pool = "mean", keep: Tensor | None = None
) -> Shortened:
    """One key and one value for each block of `factor`: its mean, its first, or a random one.

    The last block may be shorter. `keep` (…, 1, S) says which keys are seen; others do not count.

    >>> k = torch.tensor([[1.0], [3.0], [5.0]])
    >>> shorten(k, k, 2).k
    tensor([[2.],
            [5.]])
    """
    if factor == 1:
        return Shortened(k, v, keep)
    if pool == "mean":
        kept = None if keep is None else _blocks(keep.mT, factor).any(-2).mT
        return Shortened(_mean(k, factor, keep), _mean(v, factor, keep), kept)
    rows = _chosen(k.shape[-2], factor, pool, k.device)
    kept = None if keep is None else keep[..., rows]
    return Shortened(k.index_select(-2, rows), v.index_select(-2, rows), kept)


def _mean(x: Tensor, factor: int, keep: Tensor | None) -> Tensor:
    if keep is None and x.shape[-2] % factor == 0:
        return _blocks(x, factor).mean(-2)
    kept = torch.ones_like(x[..., :1]) if keep is None else keep.mT.to(x.dtype)
    count = _blocks(kept, factor).sum(-2).clamp(min=1)
    return _blocks(x * kept, factor).sum(-2) / count


def _blocks(x: Tensor, factor: int) -> Tensor:
    """(…, blocks, factor, d), zeros after the end."""
    missing = -x.shape[-2] % factor
    filled = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x
    return filled.reshape(*x.shape[:-2], -1, factor, x.shape[-1])


def _chosen(S: int, factor: int, pool: Pool, device: torch.device) -> Tensor:
    first = torch.arange(0, S, factor, device=device)
    if pool == "stride":
        return first
    return (first + torch.randint(factor, first.shape, device=device)).clamp(max=S - 1)
