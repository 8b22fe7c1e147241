"""Softmax attention by torch's fused kernels, the same on every device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def seen(mask: Tensor) -> Tensor:
    """True where a mask of either type lets a query see a key.

    >>> seen(torch.tensor([0.5, -torch.inf]))
    tensor([ True, False])
    """
    return mask if mask.dtype == torch.bool else mask > -torch.inf


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Σ_j softmax_j(scale q·k_j) v_j; a query that sees no key reads 0.

    What kernels make of such a query differs: zeros, NaN, or the mean of the values. So it is shown
    every key, and what it reads is taken away.

    >>> q, k, v = torch.zeros(1, 2), torch.eye(2), torch.tensor([[1.0], [3.0]])
    >>> fused_attention(q, k, v), fused_attention(q, k, v, torch.tensor([[False, False]]))
    (tensor([[2.]]), tensor([[0.]]))
    """
    if mask is None:
        return scaled_dot_product_attention(q, k, v, **options)
    mask = mask if mask.ndim >= 2 else mask[None]
    blind = ~seen(mask).any(-1, keepdim=True)
    opened = mask.masked_fill(blind, True if mask.dtype == torch.bool else 0.0)
    return scaled_dot_product_attention(q, k, v, opened, **options).masked_fill(blind, 0.0)
