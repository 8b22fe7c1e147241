"""The layers in transformers' registry: `attn_implementation="dualform_batch_norm"` and so on."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dualform.attention.kinds import KINDS
from dualform.attention.kinds import kind as kind_of
from dualform.errors import AttentionError

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask
except ImportError as error:
    raise ImportError(
        "dualform.attention.transformers needs transformers; install it with: "
        "pip install 'dualform[hf]'"
    ) from error

__all__ = ["register"]


def register(kind: str | None = None, name: str | None = None, **options: Any) -> list[str]:
    """Makes every kind known to transformers as `dualform_<kind>`, or one with options by a name.

    Models that cap their scores, or have sinks or windows of their own, are refused when they run.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> register()[:4]
    ['dualform_softmax', 'dualform_linear', 'dualform_local', 'dualform_batch_norm']
    >>> register("scaled_heads", name="halved", factors=(1, 2))
    ['halved']
    >>> config = GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    >>> model = GPT2LMHeadModel._from_config(config, attn_implementation="halved")
    >>> model(torch.zeros(1, 5, dtype=torch.long)).logits.shape
    torch.Size([1, 5, 8])
    """
    if kind is None and (name is not None or options):
        raise AttentionError(
            f"{name=} and options {options} belong to one kind; name it too: "
            "register('local', name='narrow', window=8)."
        )
    chosen = KINDS if kind is None else [kind]
    layers = {name or f"dualform_{each}": kind_of(each, **options) for each in chosen}
    for known, layer in layers.items():
        AttentionInterface.register(known, partial(_forward, layer=layer))
        # the mask that says which keys are padding; what is causal the layers know themselves
        AttentionMaskInterface.register(known, flash_attention_mask)
    return list(layers)


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    *,
    layer: Any,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    _require_plain(softcap, s_aux, sliding_window, key.shape[-2])
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if attention_mask is not None and attention_mask.ndim == 2:
        key, value = (x[..., : attention_mask.shape[-1], :] for x in (key, value))
        attention_mask = attention_mask.to(torch.bool)[:, None, None]
    if layer.func is not KINDS["linear"]:  # whose features are not scaled as logits are
        layer = partial(layer, scale=scaling)
    offset = key.shape[-2] - query.shape[-2] if causal else 0
    y = layer(query, key, value, attention_mask, is_causal=causal, offset=offset, dropout_p=dropout)
    return y.transpose(1, 2).contiguous(), None


def _require_plain(
    softcap: float | None, sinks: Tensor | None, window: int | None, keys: int
) -> None:
    """What a model asks of its attention besides masks, and the kinds do not have."""
    if softcap is not None or sinks is not None:
        raise AttentionError(
            f"this model caps its scores ({softcap=}) or adds sinks to them, which no kind does; "
            "choose a model without, or another attn_implementation."
        )
    if window is not None and window < keys:
        raise AttentionError(
            f"this model's queries see sliding_window={window} keys, and there are {keys}; choose "
            "sliding_window=None in its config, and register('local', window=…) for windows."
        )
