"""The layers by name, and what they all can give: outputs, weights, and both at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from dualform.attention.batch_norm import batch_norm
from dualform.attention.linear import linear
from dualform.attention.local import local
from dualform.attention.ridge import ridge
from dualform.attention.scaled_heads import batch_norm_scaled_heads, scaled_heads
from dualform.attention.shapes import for_each_query_head
from dualform.attention.softmax import softmax
from dualform.errors import AttentionError

Layer = Callable[..., Tensor]

KINDS: dict[str, Layer] = {
    "softmax": softmax,
    "linear": linear,
    "local": local,
    "batch_norm": batch_norm,
    "scaled_heads": scaled_heads,
    "batch_norm_scaled_heads": batch_norm_scaled_heads,
    "ridge": ridge,
}
"""Every kind: a function of q, k, v, attn_mask, is_causal, scale and options of its own."""
OF_A_CALL = ("q", "k", "v", "attn_mask", "is_causal", "offset", "dropout_p")


def kind(name: str, **options: Any) -> Layer:
    """The layer of a name, with its own options filled in.

    >>> kind("local", window=3).keywords
    {'window': 3}
    >>> kind("sparse")
    Traceback (most recent call last):
    dualform.errors.AttentionError: kind='sparse' is unknown; choose one of softmax, linear, ...
    """
    options_of(name, options)
    return partial(KINDS[name], **options)


def options_of(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """Every option of a kind, as given or by default; raises where there is no such option.

    >>> options_of("local", {"scale": 0.5})
    {'scale': 0.5, 'window': 64}
    """
    if kind not in KINDS:
        raise AttentionError(f"kind='{kind}' is unknown; choose one of {', '.join(KINDS)}.")
    parameters = signature(KINDS[kind]).parameters.values()
    known = {p.name: p.default for p in parameters if p.name not in OF_A_CALL}
    for name in (name for name in given if name not in known):
        raise AttentionError(f"kind='{kind}' has no option '{name}'; it has {', '.join(known)}.")
    return {**known, **given}


def with_weights(
    layer: Layer, q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """y and the weights with y = weights @ v, (…, heads, L, S), whatever the layer.

    Layers are linear in their values, so the weights are what they make of unit values.

    >>> q, k, v = torch.randn(3, 2, 5, 8).unbind()
    >>> y, weights = with_weights(kind("scaled_heads", factors=(1, 2)), q, k, v)
    >>> torch.allclose(weights @ v, y, atol=1e-6), weights.shape
    (True, torch.Size([2, 5, 5]))
    """
    v = for_each_query_head(v, q)
    unit = torch.eye(k.shape[-2], dtype=v.dtype, device=v.device)
    both = torch.cat([v, unit.expand(*v.shape[:-1], -1)], -1)
    y = layer(q, for_each_query_head(k, q), both, **options)
    return y[..., : v.shape[-1]], y[..., v.shape[-1] :]
