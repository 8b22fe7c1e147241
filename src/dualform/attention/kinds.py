"""The registry of layers: by name, by a primal problem, or a function of one's own.

Whatever takes a `kind` (`MultiheadAttention`, `Cache`, `memory`, `replace`, transformers) takes any
of the three. A name of one's own is added by `register_kind`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from inspect import Parameter, signature
from typing import Any

from torch import Tensor, nn

from dualform.attention.batch_norm import batch_norm
from dualform.attention.derived import Derived
from dualform.attention.entmax import entmax
from dualform.attention.hyper import hyper, latent_codes
from dualform.attention.linear import linear
from dualform.attention.local import local
from dualform.attention.primal import Primal
from dualform.attention.ridge import ridge
from dualform.attention.robust import robust, robust_with_weights
from dualform.attention.scaled_heads import batch_norm_scaled_heads, scaled_heads
from dualform.attention.shapes import with_unit_values
from dualform.attention.softmax import softmax
from dualform.errors import AttentionError

Layer = Callable[..., Tensor]


@dataclass(frozen=True)
class Kind:
    """A layer, and what those who use it must know of it.

    >>> Kind(softmax).has_positions
    False
    """

    layer: Layer
    """A function of q, k, v, attn_mask, is_causal, scale, offset, dropout_p and its options."""
    is_causal: bool = True
    """Whether it has a causal form."""
    has_positions: bool = False
    """Whether it matters where a key stands, as for windows and blocks."""
    pools: bool = False
    """Whether keys are taken together, as blocks or as one matrix: a mask may only hide keys."""
    takes_scale: bool = True
    """Whether a model's own scale of logits is meant for it."""
    averages: bool = True
    """Whether the weights of a query sum to 1."""
    codes: Layer | None = None
    """Of a layer that has no weights of its values: a function of q and k in place of them."""
    weighed: Callable[..., tuple[Tensor, Tensor]] | None = None
    """Of a layer whose weights depend on its values: a function that gives its output and them."""

    @property
    def is_linear(self) -> bool:
        """Whether the output is linear in the values.

        >>> Kind(softmax).is_linear, KINDS["hyper"].is_linear
        (True, False)
        """
        return self.codes is None and self.weighed is None


KINDS: dict[str, Kind] = {
    "softmax": Kind(softmax),
    "linear": Kind(linear, takes_scale=False),
    "local": Kind(local, has_positions=True),
    "batch_norm": Kind(batch_norm),
    "scaled_heads": Kind(scaled_heads, has_positions=True, pools=True),
    "batch_norm_scaled_heads": Kind(batch_norm_scaled_heads, has_positions=True, pools=True),
    "entmax": Kind(entmax),
    "ridge": Kind(ridge, is_causal=False, averages=False),
    "hyper": Kind(hyper, averages=False, codes=latent_codes),
    "robust": Kind(robust, pools=True, weighed=robust_with_weights),
}
"""Every kind that has a name."""
OF_A_CALL = ("q", "k", "v", "attn_mask", "is_causal", "offset", "dropout_p")


def register_kind(
    name: str,
    layer: Layer | Primal,
    *,
    is_causal: bool = True,
    has_positions: bool = False,
    takes_scale: bool = True,
) -> str:
    """Gives a layer of one's own, or the layer of a primal problem, a name.

    A function takes q, k, v and, as the other layers do, attn_mask, is_causal, scale, offset and
    dropout_p; its further keywords are options. Of a problem everything else is known.

    >>> import torch
    >>> from dualform import attention
    >>> name = register_kind("cosine", attention.Primal(keys=(attention.UnitLength(),)))
    >>> attention.MultiheadAttention(16, 4, kind="cosine")(*torch.randn(3, 5, 2, 16))[0].shape
    torch.Size([5, 2, 16])
    >>> register_kind("softmax", softmax)
    Traceback (most recent call last):
    dualform.errors.AttentionError: kind='softmax' is taken; choose another name.
    >>> del KINDS[name]
    """
    if name in KINDS:
        raise AttentionError(f"kind='{name}' is taken; choose another name.")
    if isinstance(layer, (Primal, Derived)):
        KINDS[name] = record_of(layer)
    else:
        _require_arguments(layer)
        KINDS[name] = Kind(layer, is_causal, has_positions, takes_scale=takes_scale)
    return name


def record_of(kind: str | Primal | Layer) -> Kind:
    """The layer of a kind, and what is known of it.

    >>> record_of(Primal(sees=3)).has_positions, record_of("linear").takes_scale
    (True, False)
    """
    if isinstance(kind, str):
        if kind not in KINDS:
            raise AttentionError(f"kind='{kind}' is unknown; choose one of {', '.join(KINDS)}.")
        return KINDS[kind]
    if isinstance(kind, Primal):
        kind = kind.attention()
    if isinstance(kind, Derived):
        return Kind(
            kind,
            has_positions=kind.has_positions,
            pools=kind.pools,
            takes_scale=kind.takes_scale,
            averages=kind.averages,
        )
    _require_arguments(kind)
    return Kind(kind)


def kind(kind: str | Primal | Layer, **options: Any) -> Layer:
    """The layer of a name, a primal problem or a function, with its own options filled in.

    >>> kind("local", window=3).keywords
    {'window': 3}
    >>> kind("sparse")
    Traceback (most recent call last):
    dualform.errors.AttentionError: kind='sparse' is unknown; choose one of softmax, linear, ...
    """
    options_of(kind, options)
    return partial(record_of(kind).layer, **options)


def options_of(kind: str | Primal | Layer, given: dict[str, Any]) -> dict[str, Any]:
    """Every option of a kind, as given or by default; raises where there is no such option.

    >>> options_of("local", {"scale": 0.5})
    {'scale': 0.5, 'window': 64}
    """
    parameters = signature(record_of(kind).layer).parameters.values()
    known = {p.name: p.default for p in parameters if p.name not in OF_A_CALL}
    for name in (name for name in given if name not in known):
        raise AttentionError(
            f"kind={described(kind)} has no option '{name}'; it has {', '.join(known)}."
        )
    return {**known, **given}


def averages(kind: str | Primal | Layer, options: dict[str, Any]) -> bool:
    """Whether the weights of a query sum to 1: ridge solves for its values, and some are told to.

    >>> averages("linear", {}), averages("linear", {"normalized": False}), averages("ridge", {})
    (True, False, False)
    """
    return record_of(kind).averages and bool(options.get("normalized", True))


def described(kind: str | Primal | Layer) -> str:
    """A kind as its user wrote it.

    >>> described("local"), described(softmax)
    ("'local'", 'softmax')
    """
    named = kind.problem if isinstance(kind, Derived) else kind
    return repr(kind) if isinstance(kind, str) else getattr(named, "__name__", repr(named))


def learned_parts(
    kind: str | Primal | Layer, options: dict[str, Any]
) -> dict[str, nn.Parameter | nn.Module]:
    """Parameters and modules among the options and, by their field, in a primal problem.

    >>> import torch
    >>> list(learned_parts("batch_norm", {"beta": nn.Parameter(torch.ones(()))}))
    ['beta']
    """
    found: dict[str, Any] = dict(options)
    layer = record_of(kind).layer
    if isinstance(layer, Derived):
        problem = layer.problem
        found |= {"kernel": problem.kernel, "normalizer": problem.normalizer}
        for place, step in enumerate(problem.keys):
            found[f"keys_{place}"] = step
            own: list[str] = [one.name for one in fields(step)] if is_dataclass(step) else []
            found |= {f"keys_{place}_{name}": getattr(step, name) for name in own}
    elif isinstance(layer, nn.Module):
        found["kind_module"] = layer
    return {name: x for name, x in found.items() if isinstance(x, (nn.Parameter, nn.Module))}


def with_weights(
    layer: Layer, q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """y and, (…, heads, L, S), the weights with y = weights @ v; of "hyper", its latent codes.

    Layers that are linear in their values have such weights: what they make of unit values. Of a
    layer that is not, its kind says what gives them (`weighed`), or what stands in their place
    (`codes`).

    >>> import torch
    >>> q, k, v = torch.randn(3, 2, 5, 8).unbind()
    >>> y, weights = with_weights(kind("scaled_heads", factors=(1, 2)), q, k, v)
    >>> torch.allclose(weights @ v, y, atol=1e-6), weights.shape
    (True, torch.Size([2, 5, 5]))
    """
    plain = layer.func if isinstance(layer, partial) else layer
    known = next((one for one in KINDS.values() if one.layer is plain), None)
    asked = {**(layer.keywords if isinstance(layer, partial) else {}), **options}
    if known is not None and known.weighed is not None:
        return known.weighed(q, k, v, **asked)
    if known is not None and known.codes is not None:
        names = signature(known.codes).parameters
        codes = known.codes(q, k, **{name: asked[name] for name in asked if name in names})
        return layer(q, k, v, **options), codes
    y = layer(q, k, with_unit_values(v), **options)
    return y[..., : v.shape[-1]], y[..., v.shape[-1] :]


def _require_arguments(layer: Layer) -> None:
    """Raise unless a function can be called as the layers are."""
    if not callable(layer):
        raise AttentionError(
            f"kind={layer!r} is no layer; give a name ({', '.join(KINDS)}), a Primal, or a "
            "function of q, k, v."
        )
    known = signature(layer).parameters
    if any(p.kind is Parameter.VAR_KEYWORD for p in known.values()):
        return
    needed = ("attn_mask", "is_causal", "scale", "offset", "dropout_p")
    missing = [name for name in needed if name not in known]
    if missing:
        raise AttentionError(
            f"kind={described(layer)} takes {', '.join(known)}, but not {', '.join(missing)}; a "
            f"layer takes q, k, v and the keywords {', '.join(needed)}. Refuse in it what "
            "it cannot do."
        )
