"""Watching a transformer's blocks: what tokens look like after each, and who attended to whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dualform.diagnose.calls import BlockState, watched_attention
from dualform.errors import AttentionError

SMALLEST = 2
"""So many modules of one kind in a row are the blocks of a network."""
NO_TOKENS = torch.empty(0)
"""In the place of tokens that are not known."""

See: TypeAlias = Callable[[BlockState], object]


def find_blocks(
    model: nn.Module, layers: str | Sequence[str] | None = None
) -> dict[str, nn.Module]:
    """The blocks of a transformer by name: those that are named, or the largest row of alike ones.

    A name may be a pattern, as "layers.*". It names the outermost modules that it fits; the parts
    of these, which it may fit too, are not blocks of their own.

    >>> block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> list(find_blocks(nn.TransformerEncoder(block, 3)))
    ['layers.0', 'layers.1', 'layers.2']
    >>> list(find_blocks(nn.TransformerEncoder(block, 3), "layers.*"))
    ['layers.0', 'layers.1', 'layers.2']
    """
    modules = dict(model.named_modules())
    if layers is not None:
        patterns = [layers] if isinstance(layers, str) else list(layers)
        chosen = {name for pattern in patterns for name in _matches(modules, pattern)}
        return {name: module for name, module in modules.items() if name in chosen}
    rows = [
        {f"{name}.{part}" if name else part: child for part, child in module.named_children()}
        for name, module in modules.items()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len(module) >= SMALLEST
        and len({type(child) for child in module}) == 1
    ]
    sizes = [_size(row) for row in rows]
    if not any(sizes):
        raise AttentionError(
            f"{type(model).__name__} has no row of {SMALLEST} or more modules of one kind, such as "
            "the blocks of a transformer; name what to look at with layers=, such as ['block*']."
        )
    return rows[sizes.index(max(sizes))]


def _matches(modules: dict[str, nn.Module], pattern: str) -> list[str]:
    """The outermost modules with such a name, but for lists of modules, which do not run."""
    found = [name for name in modules if name and fnmatchcase(name, pattern)]
    if not found:
        some = ", ".join(f"'{name}'" for name in [*modules][1:9])
        raise AttentionError(
            f"layers has '{pattern}', and no module of the model is called so; it has {some} …"
        )
    lists = nn.ModuleList | nn.ModuleDict
    found = [name for name in found if not isinstance(modules[name], lists)] or found
    outer = {f"{name}." for name in found}
    return [n for n in found if not any(n[: at + 1] in outer for at in range(len(n)))]


def _size(blocks: dict[str, nn.Module]) -> int:
    return sum(p.numel() for block in blocks.values() for p in block.parameters())


@contextmanager
def watched(
    model: nn.Module,
    blocks: dict[str, nn.Module],
    see: See,
    with_weights: bool = False,
    averages_only: bool = True,
) -> Iterator[None]:
    """While it lasts, `see` is told of each block when its forward pass is over.

    Weights that are no averages, such as the codes of `hyper`, are told where `averages_only` is
    not asked for.
    """
    running: dict[nn.Module, BlockState] = {}
    names = {block: name for name, block in blocks.items()}
    turned = {block for block in blocks.values() if _takes_tokens_first(block)}

    def enter(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        given = next((x for x in tensors if x.is_floating_point()), NO_TOKENS)
        running[block] = BlockState(names[block], NO_TOKENS, _in_batches(given, block in turned))

    def leave(block: nn.Module, _: Any, out: Any) -> None:
        seen = running.pop(block)
        seen.tokens = _in_batches(_tokens(seen.name, out), block in turned)
        see(seen)

    with ExitStack() as stack:
        stack.callback(
            torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled()
        )
        torch.backends.mha.set_fastpath_enabled(False)  # it makes no calls that could be seen
        if with_weights:  # first, so that a block that is attention has its weights when it ends
            stack.enter_context(watched_attention(model, running, averages_only))
        for block in blocks.values():
            stack.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(leave).remove)
        yield


def look(
    model: nn.Module,
    blocks: dict[str, nn.Module],
    see: See,
    inputs: Sequence[Any],
    named: Mapping[str, Any],
    with_weights: bool = True,
    averages_only: bool = True,
) -> Any:
    """Calls a model in eval mode, tells `see` of each block that runs, and gives what came out.

    The model is left as it was. `averages_only` is that of `watched`.
    """
    ran: list[str] = []

    def note(seen: BlockState) -> None:
        ran.append(seen.name)
        see(seen)

    watching = watched(model, blocks, note, with_weights, averages_only)
    with torch.no_grad(), in_eval_mode(model), watching:
        out = model(*inputs, **named)
    if not ran:
        raise AttentionError(
            f"none of the blocks {', '.join(map(repr, blocks))} ran in the forward pass; name "
            "those that do with layers=."
        )
    return out


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Without dropout, with statistics that stay as they are; all modules get their modes back."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _tokens(name: str, out: Any) -> Tensor:
    """The tokens that a block returned, in its own order."""
    x = out[0] if isinstance(out, tuple | list) else out
    x = getattr(x, "last_hidden_state", x)
    if not isinstance(x, Tensor) or x.ndim not in (2, 3):
        given = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise AttentionError(
            f"'{name}' returned {given}; a block of a transformer returns its tokens, (batch, "
            "tokens, width). Name other modules with layers=."
        )
    if not x.numel():
        raise AttentionError(
            f"'{name}' returned no tokens, {tuple(x.shape)}: give a batch of one sample or more."
        )
    return x


def _takes_tokens_first(block: nn.Module) -> bool:
    """Whether a block takes (tokens, batch, width)."""
    attention = next((m for m in block.modules() if isinstance(m, nn.MultiheadAttention)), None)
    return attention is not None and not attention.batch_first


def _in_batches(x: Tensor, turned: bool) -> Tensor:
    """(batch, tokens, width) of tokens as a block takes them."""
    x = x.detach()
    if x.ndim != 3:
        return x[None] if x.ndim == 2 else x
    return x.transpose(0, 1) if turned else x
