"""The attention of a forward pass: weights asked of modules, or computed beside a fused call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dualform.attention import MultiheadAttention
from dualform.attention.kinds import averages, record_of
from dualform.attention.shapes import wide

ARGUMENTS = (
    "query",
    "key",
    "value",
    "key_padding_mask",
    "need_weights",
    "attn_mask",
    "average_attn_weights",
    "is_causal",
)
"""What nn.MultiheadAttention takes, in order."""


class Projections(NamedTuple):
    """What softmax attention reads: (batch, heads, tokens, D) each, and the scale of its scores."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None = None


@dataclass
class AttentionCall:
    """One time that tokens attended to each other."""

    weights: Tensor
    """(batch, heads, tokens, tokens)."""
    outputs: Tensor | None = None
    """(batch, heads, tokens, D): what each head gives; None where it is not known."""
    projected: Projections | None = None
    """Where the layer is softmax attention."""
    mix: Tensor | None = None
    """(width, heads · D): the matrix that the heads' outputs are multiplied by, the model's own."""


@dataclass
class BlockState:
    """What was seen of one block in a forward pass."""

    name: str
    tokens: Tensor
    """(batch, tokens, width), after the block."""
    given: Tensor = field(default_factory=lambda: torch.empty(0))
    """The same before it."""
    calls: list[AttentionCall] = field(default_factory=list)
    """The block's self-attention, where asked for."""

    @property
    def weights(self) -> list[Tensor]:
        """(batch, heads, tokens, tokens) of each call."""
        return [call.weights for call in self.calls]

    def is_apart(self, call: AttentionCall) -> bool:
        """Whether a call is among a part of the tokens only, as attention in windows is."""
        return self.given.ndim == 3 and call.weights.shape[-2] < self.given.shape[1]


@contextmanager
def watched_attention(
    model: nn.Module, running: Mapping[nn.Module, BlockState], averages_only: bool = True
) -> Iterator[None]:
    """While it lasts, the weights of each self-attention are handed to the blocks that run.

    Those of cross-attention, which reads other tokens, are left out. So are, unless all are asked
    for, weights whose rows do not sum to 1: they are no averages of tokens.
    """
    calls = _AttentionCalls(running, averages_only)
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.MultiheadAttention):
                stack.callback(calls.ask(module))
        ours = sys.modules.get("dualform.attention.transformers")
        if ours is not None:  # else no model reads by a kind of ours
            stack.enter_context(ours.wrapped(calls.of_transformers))
        stack.enter_context(calls)
        yield


class _AttentionCalls(TorchFunctionMode):
    """Sees each call of attention once: that of a module, or the fused call where no module is."""

    def __init__(self, running: Mapping[nn.Module, BlockState], averages_only: bool) -> None:
        super().__init__()
        self.running, self.averages_only = running, averages_only
        self._inside = 0
        """How many modules are at work whose own calls are not to be counted again."""
        self._last: AttentionCall | None = None
        """The call whose heads have not been multiplied by a matrix yet."""

    def saw(self, call: AttentionCall) -> None:
        for block in self.running.values():
            block.calls.append(call)
        self._last = call if call.mix is None else None

    def ask(self, module: nn.MultiheadAttention) -> Callable[[], None]:
        """Lets a module return its weights, and hands on what its caller asked for.

        Undone by the call that is returned.
        """
        asked: list[dict[str, Any] | None] = []
        fits = not isinstance(module, MultiheadAttention) or self._fits(module.kind, module.options)

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._inside += 1
            named = {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
            if not fits or not _is_self_attention(named) or named.get("cache") is not None:
                asked.append(None)
                return None
            asked.append(named)
            return (), {**named, "need_weights": True, "average_attn_weights": False}

        def after(_: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
            self._inside -= 1
            if (named := asked.pop()) is None:
                return None
            y, weights = out
            self.saw(_of_module(module, named, weights.detach()))
            if not named.get("need_weights", True):
                return y, None
            return y, weights.mean(-3) if named.get("average_attn_weights", True) else weights

        first = module.register_forward_pre_hook(before, with_kwargs=True)
        last = module.register_forward_hook(after, with_kwargs=True)

        def remove() -> None:
            first.remove()
            last.remove()

        return remove

    def of_transformers(
        self, read: Callable[..., tuple[Tensor, Tensor | None]], kind: Any, options: dict[str, Any]
    ) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """A function of transformers' registry that also tells its weights."""
        return partial(self._read, read, self._fits(kind, options))

    def _fits(self, kind: Any, options: dict[str, Any]) -> bool:
        return not self.averages_only or averages(kind, options)

    def _read(
        self, read: Callable[..., Any], fits: bool, *args: Any, **named: Any
    ) -> tuple[Tensor, Tensor | None]:
        self._inside += 1
        y, weights = read(*args, **{**named, **({"output_attentions": True} if fits else {})})
        self._inside -= 1
        if fits and weights.shape[-2] == weights.shape[-1]:
            self.saw(AttentionCall(weights.detach(), y.detach().transpose(1, 2)))
        return y, weights if named.get("output_attentions") else None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.running or self._inside:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._fused(*args, **kwargs)
        if self._last is not None and func in (F.linear, torch.addmm) and not kwargs:
            x, W = (args[0], args[1]) if func is F.linear else (args[1], args[2].mT)
            if _is_of_heads(x, self._last.outputs):
                self._last.mix, self._last = W.detach(), None
        return func(*args, **kwargs)

    def _fused(self, *args: Any, **kwargs: Any) -> Tensor:
        y = F.scaled_dot_product_attention(*args, **kwargs)
        weights, read = _weights(*args, **kwargs)
        if weights.shape[-2] == weights.shape[-1]:
            q, k, v = (_by_heads(x.detach()) for x in read[:3])
            parts = Projections(q, k, v, read.scale)
            self.saw(AttentionCall(_by_heads(weights), _by_heads(y.detach()), parts))
        return y


def _by_heads(x: Tensor) -> Tensor:
    """(batch, heads, …), also where there is one head without a dimension of its own."""
    return x.unsqueeze(-3) if x.ndim == 3 else x if x.ndim == 4 else x[None, None]


def _is_of_heads(x: Tensor, outputs: Tensor | None) -> bool:
    """Whether a layer's input are the outputs of heads, side by side."""
    if outputs is None or x.numel() != outputs.numel() or x.dtype != outputs.dtype:
        return False
    return torch.equal(x.reshape(-1), outputs.transpose(1, 2).reshape(-1))


@torch.no_grad()
def _of_module(
    module: nn.MultiheadAttention, named: dict[str, Any], weights: Tensor
) -> AttentionCall:
    """What a module did: its projections are computed again, as it does not give them."""
    if module.in_proj_weight is not None:
        matrices = module.in_proj_weight.chunk(3)
    else:
        matrices = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases: Sequence[Tensor | None] = (None, None, None)
    if module.in_proj_bias is not None:
        biases = torch.split(module.in_proj_bias, [len(W) for W in matrices])
    parts = []
    for name, W, b in zip(("query", "key", "value"), matrices, biases, strict=True):
        rows: Tensor = named[name]
        rows = (
            rows[None] if rows.ndim == 2 else rows if module.batch_first else rows.transpose(0, 1)
        )
        x = F.linear(rows, W, b)
        x = x.view(*x.shape[:2], len(W) // module.head_dim, module.head_dim)
        parts.append(x.transpose(1, 2))
    q, k, v = (each.repeat_interleave(module.num_heads // each.shape[1], 1) for each in parts)
    weights = weights if weights.ndim == 4 else weights[None]
    are_codes = isinstance(module, MultiheadAttention) and record_of(module.kind).codes is not None
    if are_codes or weights.shape[-1] != v.shape[-2]:  # add_bias_kv, add_zero_attn: more keys
        return AttentionCall(weights)
    is_softmax = not isinstance(module, MultiheadAttention) or module.kind == "softmax"
    scale = module.options.get("scale") if isinstance(module, MultiheadAttention) else None
    return AttentionCall(
        weights,
        weights.to(v.dtype) @ v,
        Projections(q, k, v, scale) if is_softmax else None,
        module.out_proj.weight.detach(),
    )


def _is_self_attention(named: dict[str, Any]) -> bool:
    """Whether keys or values are the queries' own tokens, before projection."""
    query: Tensor = named["query"]
    others: list[Tensor] = [named["key"], named["value"]]
    return any(x is query or (x.shape == query.shape and torch.equal(x, query)) for x in others)


@torch.no_grad()
def _weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Projections]:
    """`softmax(q·k s + mask)` as `scaled_dot_product_attention` has it, and what it reads."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.mT
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = torch.softmax(wide(scores), -1).nan_to_num(0.0)
    return weights, Projections(query, key, value, scale)
