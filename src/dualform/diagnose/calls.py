"""The attention weights of a forward pass: asked of modules, or computed beside a fused call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dualform.attention import MultiheadAttention
from dualform.attention.kinds import averages
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


@dataclass
class BlockState:
    """What was seen of one block in a forward pass."""

    name: str
    tokens: Tensor
    """(batch, tokens, width), after the block."""
    weights: list[Tensor] = field(default_factory=list)
    """(batch, heads, tokens, tokens) for each time that tokens of the block attended to each other,
    where asked for."""


@contextmanager
def watched_attention(model: nn.Module, running: Mapping[nn.Module, BlockState]) -> Iterator[None]:
    """While it lasts, the weights of each self-attention are handed to the blocks that run.

    Weights whose rows do not sum to 1 are left out: they are no averages of tokens. So are those
    of cross-attention, which reads other tokens.
    """
    calls = _AttentionCalls(running)
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

    def __init__(self, running: Mapping[nn.Module, BlockState]) -> None:
        super().__init__()
        self.running = running
        self._inside = 0
        """How many modules are at work whose own calls are not to be counted again."""

    def saw(self, weights: Tensor) -> None:
        for block in self.running.values():
            block.weights.append(weights.detach())

    def ask(self, module: nn.MultiheadAttention) -> Callable[[], None]:
        """Lets a module return its weights, and hands on what its caller asked for.

        Undone by the call that is returned.
        """
        asked: list[dict[str, Any] | None] = []
        fits = not isinstance(module, MultiheadAttention) or averages(module.kind, module.options)

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
            self.saw(weights if weights.ndim == 4 else weights[None])
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
        return partial(self._read, read, averages(kind, options))

    def _read(
        self, read: Callable[..., Any], fits: bool, *args: Any, **named: Any
    ) -> tuple[Tensor, Tensor | None]:
        self._inside += 1
        y, weights = read(*args, **{**named, **({"output_attentions": True} if fits else {})})
        self._inside -= 1
        if fits and weights.shape[-2] == weights.shape[-1]:
            self.saw(weights)
        return y, weights if named.get("output_attentions") else None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and self.running and not self._inside:
            weights = _weights(*args, **kwargs)
            if weights.shape[-2] == weights.shape[-1]:
                self.saw(weights if weights.ndim == 4 else weights[(None,) * (4 - weights.ndim)])
        return func(*args, **kwargs)


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
) -> Tensor:
    """`softmax(q·k s + mask)` as `scaled_dot_product_attention` has it."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.mT
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return torch.softmax(wide(scores), -1).nan_to_num(0.0)
