"""The unit that duals and their price C are given in: 1/ḡ, ḡ the geometric mean of G_jj.

A dual of 1/G_jj lets a key move its own prediction by 1. So a price C in these units means the same
for keys of any number, length and scale, and exponentials of keys never have to be formed: with
scores s and l = log h(k), G_ij/ḡ = exp(s_ij − l_i − l_j − log ḡ).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualform.errors import AttentionError

COMPARABLE = 27.6
"""log of 1e12: how far keys' own G_jj may lie apart for a solver in float64."""


def log_mean(log_own: Tensor, log_h: Tensor) -> Tensor:
    """log ḡ = mean_j log Φ(k_j)·Φ(k_j)/h(k_j)², over keys (last dimension) that have features.

    >>> log_mean(torch.tensor([2.0, -torch.inf]), torch.tensor([0.5, 1.0]))
    tensor([1.])
    """
    log_G = log_own - 2 * log_h
    there = log_G.isfinite()
    total = log_G.masked_fill(~there, 0).sum(-1, keepdim=True)
    return total / there.sum(-1, keepdim=True).clamp(min=1)


def require_comparable(log_own: Tensor, log_h: Tensor) -> None:
    """Raise where keys' own G_jj are so different that no solver weighs them against each other.

    >>> require_comparable(torch.tensor([1300.0, 2.0]), torch.tensor([1300.0, 2.0]))
    Traceback (most recent call last):
    dualform.errors.AttentionError: keys of very different lengths make no regression: ...
    """
    log_G = (log_own - 2 * log_h).flatten()
    log_G = log_G[log_G > -torch.inf]
    if log_G.numel() and not float(log_G.max() - log_G.min()) <= COMPARABLE:
        low, high = (float(x) / 2.302585 for x in (log_G.min(), log_G.max()))
        raise AttentionError(
            f"keys of very different lengths make no regression: their features Φ(k)/h(k) have "
            f"squared lengths from 1e{low:+.0f} to 1e{high:+.0f}, and float64 cannot weigh them "
            "against each other. Bring keys to one length (keys=(RmsNorm(),) or (UnitLength(),)), "
            "or take a smaller scale (kernel=Exponential(scale=…))."
        )
