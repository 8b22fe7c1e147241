"""What a complete mask says: which keys are hidden from all queries, and whether it is causal.

A model may hand over one boolean for each pair of a query and a key. Layers that pool keys need to
know where queries stand, and statistics of prefixes are cheaper than those of pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dualform.attention.shapes import require_mask, visible
from dualform.errors import AttentionError


class Sight(NamedTuple):
    """Query i sees key j where `mask` allows it and, if causal, j ≤ offset + i."""

    mask: Tensor | None
    is_causal: bool = False
    offset: int = 0
    keys: int | None = None
    """How many keys there are to be seen, the first ones; None for all."""

    @property
    def same_for_all(self) -> bool:
        """Whether nothing but causality tells queries apart."""
        return self.mask is None or (self.mask.dtype == torch.bool and self.mask.shape[-2] == 1)


def read_mask(mask: Tensor, causal: bool) -> Sight:
    """A complete mask (…, L, S), taken apart where it is causal or the same for all queries.

    `causal` says that queries stand among the keys, the first at most at S − L.

    >>> seen = read_mask(torch.tensor([[False, True, False], [False, True, True]]), causal=True)
    >>> seen.mask, seen.is_causal, seen.offset
    (tensor([[False,  True,  True]]), True, 1)
    >>> read_mask(torch.tensor([[True, False], [True, False]]), causal=False).mask
    tensor([[ True, False]])
    """
    if mask.dtype != torch.bool:
        keep = visible(mask)
        if bool((mask.masked_fill(~keep, 0) != 0).any()):
            return Sight(mask)  # numbers that do more than hide
        mask = keep
    return (_causal(mask) if causal else None) or _same(mask) or Sight(mask)


def same_for_all(mask: Tensor, q: Tensor, k: Tensor, where: str) -> Tensor:
    """(…, 1, S): which keys are seen, by a mask that tells no queries apart and only hides keys.

    `where` ends the sentence "cannot be used …" for other masks.

    >>> same_for_all(torch.tensor([True, False]), torch.ones(3, 4), torch.ones(2, 4), "here")
    tensor([[ True, False]])
    """
    require_mask(mask, q, k)
    mask = mask if mask.ndim >= 2 else mask[None]
    keep = visible(mask)
    if mask.shape[-2] > 1 or (mask.dtype != torch.bool and bool((mask[keep] != 0).any())):
        raise AttentionError(
            f"attn_mask of shape {tuple(mask.shape)} and {mask.dtype} cannot be used {where}; give "
            "a mask (…, 1, S) that only hides keys, the same for all queries, and is_causal=True "
            "for a causal one."
        )
    return keep.expand(*mask.shape[:-1], k.shape[-2])


def _causal(mask: Tensor) -> Sight | None:
    L, S = mask.shape[-2:]
    i, j = (torch.arange(n, device=mask.device) for n in (L, S))
    last = torch.where(mask, j, -1).amax(-1)
    ahead = torch.where(last < 0, -L, last - i)
    offset = 0 if L == S else int(ahead.max())
    keep = mask.any(-2, keepdim=True)
    if not 0 <= offset <= S - L or not torch.equal(mask, keep & (j <= offset + i[:, None])):
        return None
    keys = offset + L
    return Sight(_hiding(keep[..., :keys]), True, offset, keys)


def _same(mask: Tensor) -> Sight | None:
    keep = mask[..., :1, :]
    return Sight(_hiding(keep)) if torch.equal(mask, keep.expand_as(mask)) else None


def _hiding(keep: Tensor) -> Tensor | None:
    return None if bool(keep.all()) else keep
