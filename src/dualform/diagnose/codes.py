"""The latent codes of pairs of tokens: what attention computes for a pair, read as one vector.

Where attention is a hypernetwork, the scores of a pair, one a head, are the weights of a small
network that reads the pair: its *latent code*. Of other kinds, too, the weights of the heads can be
put together to a vector. A probe then tells what this vector is about.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dualform.diagnose.blocks import find_blocks, look
from dualform.diagnose.calls import BlockState
from dualform.errors import AttentionError

Places: TypeAlias = slice | Sequence[int]
"""Which tokens of a sequence: a slice, or numbers, of which negative ones count from the end."""
EVERY = slice(None)


def pair_codes(
    model: nn.Module,
    *inputs: Any,
    queries: Places = EVERY,
    keys: Places = EVERY,
    layers: str | Sequence[str] | None = None,
    **named: Any,
) -> dict[str, Tensor]:
    """(batch, queries, keys, heads) for each layer of attention: the codes of pairs of tokens.

    The model is called with these inputs, in eval mode, and is left as it was. A code is what
    `hyper` makes its networks of; of other kinds it is the heads' weights. Layers are all modules
    of attention, else the model's blocks, or those that `layers=` names.

    >>> from dualform import attention
    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <...>
    >>> model = attention.replace(nn.TransformerEncoderLayer(16, 4, 32), "hyper")
    >>> codes = pair_codes(model, torch.randn(10, 3, 16), queries=[-1])    # 10 tokens, 3 samples
    >>> codes["self_attn"].shape
    torch.Size([3, 1, 10, 4])
    """
    blocks: dict[str, nn.Module] = {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, nn.MultiheadAttention)
    }
    if layers is not None or not blocks:
        blocks = find_blocks(model, layers)
    found: dict[str, Tensor] = {}

    def see(seen: BlockState) -> None:
        for weights in seen.weights:
            name, again = seen.name, 2
            while name in found:
                name, again = f"{seen.name} #{again}", again + 1
            found[name] = _some(weights, queries, keys).permute(0, 2, 3, 1)

    look(model, blocks, see, inputs, named, averages_only=False)
    if not found:
        raise AttentionError(
            f"none of {', '.join(map(repr, blocks))} attended among its own tokens in the forward "
            "pass; name blocks that do with layers=."
        )
    return found


def _some(weights: Tensor, queries: Places, keys: Places) -> Tensor:
    """Some rows and columns of (batch, heads, queries, keys)."""
    for axis, places in ((2, queries), (3, keys)):
        count = weights.shape[axis]
        wanted = range(count)[places] if isinstance(places, slice) else places
        for place in wanted:
            if not -count <= place < count:
                raise AttentionError(
                    f"there is no token {place}: sequences have {count} tokens, 0 to {count - 1} "
                    "from their start or -1 from their end."
                )
        rows = torch.tensor([place % count for place in wanted], device=weights.device)
        weights = weights.index_select(axis, rows.long())
    return weights
