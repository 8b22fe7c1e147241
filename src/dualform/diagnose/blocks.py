"""Watching a transformer's blocks: what tokens look like after each, and who attended to whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dualform.errors import AttentionError

SMALLEST = 2
"""So many modules of one kind in a row are the blocks of a network."""


@dataclass
class BlockState:
    """What was seen of one block in a forward pass."""

    name: str
    tokens: Tensor
    """(batch, tokens, width), after the block."""
    weights: list[Tensor] = field(default_factory=list)
    """(batch, heads, queries, keys) for each call of attention in the block, where asked for."""


See: TypeAlias = Callable[[BlockState], object]


def find_blocks(
    model: nn.Module, layers: str | Sequence[str] | None = None
) -> dict[str, nn.Module]:
    """The blocks of a transformer by name: those that are named, or the largest row of alike ones.

    >>> block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> list(find_blocks(nn.TransformerEncoder(block, 3)))
    ['layers.0', 'layers.1', 'layers.2']
    """
    modules = dict(model.named_modules())
    if layers is not None:
        patterns = [layers] if isinstance(layers, str) else list(layers)
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in modules):
                some = ", ".join(f"'{name}'" for name in [*modules][1:9])
                raise AttentionError(
                    f"layers has '{pattern}', and no module of the model is called so; it has "
                    f"{some} …"
                )
        return {n: m for n, m in modules.items() if any(fnmatchcase(n, p) for p in patterns)}
    rows = [
        {f"{name}.{part}" if name else part: child for part, child in module.named_children()}
        for name, module in modules.items()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len(module) >= SMALLEST
        and len({type(child) for child in module}) == 1
    ]
    rows = [row for row in rows if _size(row) > 0]
    if not rows:
        raise AttentionError(
            f"{type(model).__name__} has no row of {SMALLEST} or more modules of one kind, such as "
            "the blocks of a transformer; name what to look at with layers=, such as ['block*']."
        )
    return max(rows, key=_size)


def _size(blocks: dict[str, nn.Module]) -> int:
    return sum(p.numel() for block in blocks.values() for p in block.parameters())


@contextmanager
def watched(
    model: nn.Module, blocks: dict[str, nn.Module], see: See, with_weights: bool = False
) -> Iterator[None]:
    """While it lasts, `see` is told of each block when its forward pass is over."""
    found: dict[nn.Module, BlockState] = {}
    calls = _AttentionCalls() if with_weights else None
    with ExitStack() as stack:
        stack.callback(
            torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled()
        )
        torch.backends.mha.set_fastpath_enabled(False)  # it makes no calls that could be seen

        def enter(block: nn.Module, _: Any) -> None:
            found[block] = BlockState(names[block], torch.empty(0))
            if calls is not None:
                calls.weights = found[block].weights

        def leave(block: nn.Module, _: Any, out: Any) -> None:
            seen = found.pop(block)
            seen.tokens = _tokens(block, names[block], out)
            if calls is not None:
                calls.weights = None
            see(seen)

        names = {block: name for name, block in blocks.items()}
        for block in blocks.values():
            stack.callback(block.register_forward_pre_hook(enter).remove)
            stack.callback(block.register_forward_hook(leave).remove)
        if calls is not None:
            for module in model.modules():
                if isinstance(module, nn.MultiheadAttention):
                    stack.callback(calls.ask(module))
            stack.enter_context(calls)
        yield


def _tokens(block: nn.Module, name: str, out: Any) -> Tensor:
    """(batch, tokens, width) of what a block returned."""
    x = out[0] if isinstance(out, tuple | list) else out
    x = getattr(x, "last_hidden_state", x)
    if not isinstance(x, Tensor) or x.ndim not in (2, 3):
        given = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise AttentionError(
            f"'{name}' returned {given}; a block of a transformer returns its tokens, (batch, "
            "tokens, width). Name other modules with layers=."
        )
    x = x.detach()
    if x.ndim == 2:
        return x[None]
    attention = next((m for m in block.modules() if isinstance(m, nn.MultiheadAttention)), None)
    return x if attention is None or attention.batch_first else x.transpose(0, 1)


class _AttentionCalls(TorchFunctionMode):
    """Computes the weights of each call of attention, beside the call itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] | None = None

    def ask(self, module: nn.MultiheadAttention) -> Callable[[], None]:
        """Lets a module of torch return its weights; undone by the call that is returned."""

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return args[:4], {
                **dict(zip(("need_weights", "attn_mask"), args[4:6], strict=False)),
                **kwargs,
                "need_weights": True,
                "average_attn_weights": False,
            }

        def after(_: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
            if self.weights is not None and out[1] is not None:
                weights = out[1].detach()
                self.weights.append(weights if weights.ndim == 4 else weights[None])
            return out

        first = module.register_forward_pre_hook(before, with_kwargs=True)
        last = module.register_forward_hook(after, with_kwargs=True)

        def remove() -> None:
            first.remove()
            last.remove()

        return remove

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and self.weights is not None:
            self.weights.append(_weights(*args, **kwargs))
        return func(*args, **kwargs)


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
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return torch.softmax(scores.float(), -1).nan_to_num(0.0)
