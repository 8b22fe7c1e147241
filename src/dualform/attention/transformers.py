"""The layers in transformers' registry: `attn_implementation="dualform_batch_norm"` and so on.

A model's mask says everything: causality, padding on either side, packed documents, windows, a
cache that is longer than what it holds. So layers are handed the mask that torch's own attention
gets, taken apart only where it is a causal one. A quantized cache gives its numbers back before a
layer reads them, so it is a cache like others. What a layer cannot follow is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dualform.attention.kinds import (
    KINDS,
    Layer,
    described,
    learned_parts,
    record_of,
    with_weights,
)
from dualform.attention.kinds import kind as kind_of
from dualform.attention.masks import Sight, read_mask
from dualform.attention.primal import Primal
from dualform.attention.shapes import with_unit_values
from dualform.errors import AttentionError
from dualform.private import ATTENTION_REGISTRY, attention_of, version_of

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask
except ImportError as error:
    raise ImportError(
        "dualform.attention.transformers needs transformers; install it with: "
        "pip install 'dualform[hf]'"
    ) from error

__all__ = ["register"]

HARMLESS = {
    "cache_position",
    "deterministic",
    "layer_idx",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "target_dtype",
    "use_cache",
}
"""What models pass on that says nothing about who sees whom, or what the mask says already."""
PACKING = {"cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"}
"""What says which document a token belongs to; the mask says it too, where there is one."""
OWN = "dualform_"


def register(
    kind: str | Primal | Layer | None = None, name: str | None = None, **options: Any
) -> list[str]:
    """Makes every kind known to transformers as `dualform_<kind>`, or one with options by a name.

    Models that cap their scores, add sinks, or keep pages of a cache are refused when they run.

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
    if kind is not None and not isinstance(kind, str) and name is None:
        raise AttentionError(
            f"{described(kind)} has no name of its own; give one: register(problem, name='mine')."
        )
    if kind is not None and learned_parts(kind, options):
        learned = ", ".join(learned_parts(kind, options))
        raise AttentionError(
            f"{learned} of kind={described(kind)} would be learned, but a registered function owns "
            "no parameters; use attention.replace(model, kind, …), which gives every layer its own."
        )
    chosen = list(KINDS) if kind is None else [kind]
    names = [name or f"{OWN}{each}" for each in chosen]
    for known, each in zip(names, chosen, strict=True):
        add(known, each, options)
    return names


def add(name: str, kind: str | Primal | Layer, options: dict[str, Any]) -> None:
    """Makes one kind known by a name; options that are learned are looked up in the layer.

    >>> add("dualform_near", "local", {"window": 2})
    """
    kind_of(kind, **options)  # raises where there is no such kind or option
    AttentionInterface.register(name, partial(_forward, kind=kind, options=options))
    AttentionMaskInterface.register(name, _mask)


@contextmanager
def wrapped(
    around: Callable[
        [Callable[..., Any], str | Primal | Layer, dict[str, Any]], Callable[..., Any]
    ],
) -> Iterator[None]:
    """While it lasts, models read by what `around` makes of each function that was registered.

    >>> with wrapped(lambda read, kind, options: read):
    ...     register("local", name="narrow", window=2)
    ['narrow']
    """
    table: Any = AttentionInterface()  # type: ignore[no-untyped-call]
    own = {name: table[name] for name in table if getattr(table[name], "func", None) is _forward}
    for name, read in own.items():
        AttentionInterface.register(
            name, around(read, read.keywords["kind"], read.keywords["options"])
        )
    try:
        yield
    finally:
        for name, read in own.items():
            AttentionInterface.register(name, read)


def _mask(*given: Any, config: Any = None, **named: Any) -> Tensor | None:
    """The mask of torch's attention; a model that would not ask our layers is refused here."""
    modeling = sys.modules.get(type(config).__module__.replace("configuration_", "modeling_"))
    if modeling is not None and not hasattr(modeling, ATTENTION_REGISTRY):
        raise AttentionError(
            f"the model of {type(config).__name__} does not read by transformers' registry of "
            f"attention, so attn_implementation='{attention_of(config)}' would be ignored; "
            "choose 'eager', or another model."
        )
    mask: Tensor | None = sdpa_mask(*given, config=config, **named)
    return mask


def calls_the_registry(module: nn.Module) -> bool:
    """Whether a module reads its keys by a function of the registry.

    >>> calls_the_registry(nn.Linear(2, 2))
    False
    """
    forward: Any = type(module).forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return ATTENTION_REGISTRY in getattr(forward, "__code__", forward.__init__).co_names


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
    kind: str | Primal | Layer,
    options: dict[str, Any],
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    cache: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    known, keys = record_of(kind), key.shape[-2]
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    _require_plain(softcap, s_aux, cache)
    _require_understood(others, attention_mask)
    _require_form(kind, causal)
    sight = _sight(query, key, attention_mask, causal, known.has_positions or known.pools)
    if sight.keys is not None:
        key, value = (x[..., : sight.keys, :] for x in (key, value))
    if position_bias is not None:
        sight = _with_bias(sight, position_bias[..., : key.shape[-2]], query)
    width, wants_weights = value.shape[-1], bool(others.get("output_attentions"))
    if wants_weights and known.is_linear:
        value = with_unit_values(value)
    own = {name: getattr(module, f"{OWN}{name}", x) for name, x in options.items()}
    given = {"scale": scaling, **own} if known.takes_scale else own
    read: Callable[..., Tensor] = partial(known.layer, dropout_p=dropout, **given)
    if wants_weights and not known.is_linear:
        read = partial(_beside_weights, read)
    if known.has_positions:
        _require_places(kind, module, sight, causal, query, key)
    if known.pools:
        _require_blocks(kind, sight, sliding_window, key.shape[-2])
    blocks = known.pools and known.has_positions
    y = (_from_first_keys if blocks else _read)(read, query, key, value, sight)
    weights = pad(y[..., width:], (0, keys - key.shape[-2])) if wants_weights else None
    return y[..., :width].transpose(1, 2).contiguous(), weights


def _beside_weights(
    read: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **at: Any
) -> Tensor:
    """What a layer that is not linear in its values reads, and beside it its weights or codes."""
    return torch.cat(with_weights(read, q, k, v, attn_mask=mask, **at), -1)


def _read(read: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
    return read(q, k, v, sight.mask, is_causal=sight.is_causal, offset=sight.offset)


def _sight(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, places: bool) -> Sight:
    """Who sees whom, by the rules of transformers' sdpa attention."""
    L, S = q.shape[-2], k.shape[-2]
    if mask is None:
        if not causal:
            return Sight(None)
        # One query is the last of all tokens; several are the first, and further keys are room.
        return Sight(None, True, S - 1) if L == 1 else Sight(None, True, 0, L)
    if mask.ndim != 4 or any(a not in (1, b) for a, b in zip(mask.shape[-2:], (L, S), strict=True)):
        raise AttentionError(
            f"attention_mask of shape {tuple(mask.shape)} does not say of {L} queries and {S} keys "
            f"who sees whom; give (batch, tokens), or (batch, 1 or heads, {L}, {S})."
        )
    if torch.compiler.is_compiling() and not places:
        return Sight(mask)  # right for all that do not ask where a query stands, and one graph
    return _read_outside_of_graphs(mask, causal, L, S)


class _LastRead:
    """`read_mask`, once for all layers of a model that are handed the same mask."""

    def __init__(self) -> None:
        self._last: tuple[Any, int, bool, Sight] | None = None

    def __call__(self, mask: Tensor, causal: bool, L: int, S: int) -> Sight:
        last = self._last
        if last and last[0]() is mask and last[1:3] == (version_of(mask), causal):
            return last[3]
        sight = read_mask(mask.expand(*mask.shape[:-2], L, S), causal)
        self._last = (ref(mask), version_of(mask), causal, sight)
        return sight


_read_outside_of_graphs: Callable[..., Sight] = torch.compiler.disable(_LastRead())  # type: ignore[no-untyped-call]


def _with_bias(sight: Sight, bias: Tensor, q: Tensor) -> Sight:
    """The bias where the mask shows a key, −∞ where it hides one."""
    mask = sight.mask
    if mask is not None:
        hides = mask.dtype == torch.bool
        bias = bias.masked_fill(~mask, -torch.inf) if hides else bias + mask
    return sight._replace(mask=bias.to(q.dtype))


def _from_first_keys(
    read: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, sight: Sight
) -> Tensor:
    """Blocks counted from each sample's first key that is seen, so that padding moves none."""
    if sight.mask is None or sight.mask.shape[1] > 1:
        return _read(read, q, k, v, sight)
    keep = sight.mask.expand(len(q), -1, -1, -1)
    firsts = keep[:, 0, 0].int().argmax(-1)
    y = q.new_zeros(*q.shape[:-1], v.shape[-1])
    for first in sorted(set(firsts.tolist())):
        own = (firsts == first).nonzero().flatten()
        begin = max(first - sight.offset, 0) if sight.is_causal else 0
        moved = Sight(keep[own, ..., first:], sight.is_causal, max(sight.offset - first, 0))
        part = _read(read, q[own, :, begin:], k[own, :, first:], v[own, :, first:], moved)
        y[own, :, begin:] = part.to(y.dtype)
    return y


def _require_plain(softcap: float | None, sinks: Tensor | None, cache: Any) -> None:
    """What a model asks of its attention besides masks, and the kinds do not have."""
    if softcap is not None or sinks is not None:
        raise AttentionError(
            f"this model caps its scores ({softcap=}) or adds sinks to them, which no kind does; "
            "choose a model without, or another attn_implementation."
        )
    if cache is not None:
        raise AttentionError(
            f"this model keeps its past in pages ({type(cache).__name__}), which no kind reads; "
            "generate without continuous batching, or with another attn_implementation."
        )


def _require_understood(others: dict[str, Any], mask: Tensor | None) -> None:
    given = {name for name, x in others.items() if x is not None and x is not False}
    if given & PACKING and mask is None:
        raise AttentionError(
            f"{', '.join(sorted(given & PACKING))} pack documents, but no mask says so; give "
            "position_ids that begin anew with each document, or a 4-D attention_mask."
        )
    unknown = sorted(given - PACKING - HARMLESS)
    if unknown:
        raise AttentionError(
            f"this model passes {', '.join(unknown)} to its attention, which no kind understands; "
            "choose another attn_implementation, or a model without."
        )


def _require_form(kind: str | Primal | Layer, causal: bool) -> None:
    if causal and not record_of(kind).is_causal:
        raise AttentionError(
            f"kind={described(kind)} has no causal form, and this model is causal; choose another "
            "kind, or a model that sees all of its tokens."
        )


def _require_places(
    kind: str | Primal | Layer, module: nn.Module, sight: Sight, causal: bool, q: Tensor, k: Tensor
) -> None:
    """Windows need to know where a query stands among the keys."""
    L, S = q.shape[-2], k.shape[-2]
    cross = getattr(module, "is_cross_attention", False) or getattr(module, "is_decoder", False)
    if record_of(kind).pools or sight.is_causal:
        return
    if not causal and (L != S or cross):
        raise AttentionError(
            f"kind={described(kind)} has a window around each query, but these {L} queries stand "
            f"in another sequence than the {S} keys; choose another kind for cross-attention."
        )
    if L != S:
        raise AttentionError(
            f"kind={described(kind)} must know where {L} queries stand among {S} keys, and this "
            "mask is not a causal one; choose another kind, or leave the mask out."
        )


def _require_blocks(
    kind: str | Primal | Layer, sight: Sight, window: int | None, keys: int
) -> None:
    """Blocks of keys have one weight and are counted from the first; a matrix of keys is whole."""
    if not sight.same_for_all:
        raise AttentionError(
            f"kind={described(kind)} takes keys together, the same for all queries, but here "
            "queries see different keys (packed documents, a window, a position bias, or a mask "
            "of one's own); choose another kind, or one document a row."
        )
    if window is not None and window <= keys:
        raise AttentionError(
            f"kind={described(kind)} takes keys from the first token on, but this model forgets "
            f"tokens after sliding_window={window}; choose sliding_window=None in its config."
        )
