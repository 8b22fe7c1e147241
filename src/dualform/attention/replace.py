"""Another attention for a model that is there: torch's modules, and transformers' models."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import count
from typing import Any

from torch import nn

from dualform.attention.kinds import Layer, described, learned_parts
from dualform.attention.kinds import kind as kind_of
from dualform.attention.multihead import MultiheadAttention
from dualform.attention.primal import Primal
from dualform.errors import AttentionError
from dualform.private import attention_of

_numbers = count(1)


def replace(
    model: nn.Module,
    kind: str | Primal | Layer,
    *,
    where: Callable[[str], bool] | None = None,
    **options: Any,
) -> nn.Module:
    """Swaps the attention of a model for another kind; its weights stay the same parameters.

    Every `nn.MultiheadAttention` becomes ours, and every model of transformers reads by this kind.
    What is learned among the options every layer gets a copy of. Nothing random is drawn.

    >>> import torch
    >>> encoder = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    >>> replace(encoder, "batch_norm", beta=nn.Parameter(torch.ones(4, 1, 1))).self_attn.kind
    'batch_norm'
    >>> replace(nn.Linear(2, 2), "local")
    Traceback (most recent call last):
    dualform.errors.AttentionError: there is no attention to replace in Linear; it must hold ...

    Args:
        where: says by its name whether a module is replaced; only torch's modules are asked for.
    """
    kind_of(kind, **options)  # raises where there is no such kind or option
    found = {name: x for name, x in model.named_modules() if isinstance(x, nn.MultiheadAttention)}
    chosen = {name: x for name, x in found.items() if where is None or where(name)}
    theirs = [] if where else _models_of_transformers(model)
    if not chosen and not theirs:
        raise AttentionError(
            f"there is no attention to replace in {type(model).__name__}; it must hold "
            "nn.MultiheadAttention, or be a model of transformers (without where=)."
        )
    twins = {name: _twin(name, old, kind, options) for name, old in chosen.items()}
    for hf in theirs:
        _switch(hf, kind, options)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and chosen:
            module.use_nested_tensor = False  # which only torch's own attention can read
    for name, twin in twins.items():
        if not name:
            return twin
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, twin)
    return model


def _twin(
    name: str, old: nn.MultiheadAttention, kind: str | Primal | Layer, options: dict[str, Any]
) -> MultiheadAttention:
    """A module of this kind that holds the parameters of another."""
    if type(old) not in (nn.MultiheadAttention, MultiheadAttention):
        raise AttentionError(
            f"'{name}' is a {type(old).__name__}, which may do more than the nn.MultiheadAttention "
            "it is made from; leave it out by where=, or replace it by hand."
        )
    kind, options = deepcopy((kind, options)) if learned_parts(kind, options) else (kind, options)
    new = MultiheadAttention(
        old.embed_dim,
        old.num_heads,
        old.dropout,
        old.in_proj_bias is not None,
        old.bias_k is not None,
        old.add_zero_attn,
        old.kdim,
        old.vdim,
        old.batch_first,
        device="meta",  # no memory is taken, and no random number
        num_kv_heads=getattr(old, "num_kv_heads", None),
        kind=kind,
        **options,
    )
    for own in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
        setattr(new, own, getattr(old, own))
    for own in ("in_proj_bias", "bias_k", "bias_v", "out_proj"):
        setattr(new, own, getattr(old, own))
    for part in learned_parts(kind, options).values():
        _move(part, old)
    return new.train(old.training)


def _move(part: nn.Parameter | nn.Module, like: nn.Module) -> None:
    """To the device and type of a layer's parameters."""
    target = next(like.parameters())
    if isinstance(part, nn.Module):
        part.to(target.device, target.dtype)
    else:
        part.data = part.data.to(target)


def _models_of_transformers(model: nn.Module) -> list[Any]:
    """The outermost models of transformers."""
    if hasattr(model, "set_attn_implementation"):
        return [model]
    return [found for child in model.children() for found in _models_of_transformers(child)]


def _switch(model: Any, kind: str | Primal | Layer, options: dict[str, Any]) -> None:
    from dualform.attention.transformers import OWN, add, calls_the_registry

    learned = learned_parts(kind, options)
    if learned.keys() - options.keys():
        raise AttentionError(
            f"{described(kind)} holds {', '.join(learned)}, which would be learned; a model of "
            "transformers can be given parameters as options only."
        )
    name = f"{OWN}{kind}" if isinstance(kind, str) and not options else f"{OWN}{next(_numbers)}"
    layers = [module for module in model.modules() if calls_the_registry(module)]
    add(name, kind, options)
    if layers:
        model.set_attn_implementation(name)
    if attention_of(model.config) != name:
        raise AttentionError(
            f"{type(model).__name__} does not read by transformers' registry of attention, so its "
            "attention cannot be replaced."
        )
    for layer in layers:
        for option, part in learned.items():
            own = deepcopy(part)
            _move(own, layer)
            setattr(layer, f"{OWN}{option}", own)
