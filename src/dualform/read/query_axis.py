"""Which dimension of an input counts the queries: the layers inside propose, an experiment decides.

Recurrent layers and attention may take time first while the model around them takes samples first,
or the other way round. A query asked alone gets the answer that it gets among others; a time step
asked alone does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dualform.layers import first_tensor, usual_axis
from dualform.private import tree_flatten, tree_map

FEW, MOST = 4, 128
"""How many entries are tried along the dimension in question, and along the other."""


def query_axis(model: nn.Module, x: Any) -> int:
    """The dimension of x along which the model can be asked piece by piece: 0 or 1.

    >>> lstm = nn.LSTM(3, 2)
    >>> query_axis(lstm, torch.randn(5, 4, 3))
    1
    >>> query_axis(nn.LSTM(3, 2, batch_first=True), torch.randn(5, 4, 3))
    0
    """
    usual, given = usual_axis(model), first_tensor(x)
    mixing = (nn.RNNBase, nn.MultiheadAttention)
    if given is None or given.ndim < 2:
        return 0
    if not any(isinstance(module, mixing) for module in model.modules()):
        return usual
    sure = given.shape[usual] > 1 and _stands_alone(model, x, usual)
    return usual if sure or not _stands_alone(model, x, 1 - usual) else 1 - usual


def select(x: Any, axis: int, count: int, queries: Tensor) -> Any:
    """Some queries, in the form of x: from every argument that has an entry for each of them."""

    def chosen(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            return leaf
        own = min(axis, leaf.ndim - 1)
        every = leaf.shape[own] == count
        return leaf.index_select(own, queries.to(leaf.device)) if every else leaf

    return tree_map(chosen, x)


def call(model: Any, x: Any) -> Any:
    """What a model gives for an input: a tuple of arguments, a mapping of keywords, or one."""
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


@torch.no_grad()
def _stands_alone(model: nn.Module, x: Any, axis: int) -> bool:
    """Whether the last entry along a dimension gets the same answer alone as among the others.

    The last, since the first step of a sequence does not depend on those that follow.
    """
    x = _last_of(_last_of(x, 1 - axis, MOST), axis, FEW)
    given = first_tensor(x)
    assert given is not None
    try:
        together, alone = (_tensors(call(model, part)) for part in (x, _last_of(x, axis, 1)))
    except Exception:  # whatever a model says to an input that it was not made for
        return False
    return bool(together and alone) and _is_last(together[0], alone[0], given.shape[axis])


def _last_of(x: Any, axis: int, most: int) -> Any:
    """The last entries along a dimension, so many at most."""
    given = first_tensor(x)
    assert given is not None
    count = given.shape[axis]
    return x if count <= most else select(x, axis, count, torch.arange(count - most, count))


def _tensors(output: Any) -> list[Tensor]:
    """The tensors of an output; transformers' models call theirs logits."""
    leaves = tree_flatten(getattr(output, "logits", output))[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]


def _is_last(together: Tensor, alone: Tensor, count: int) -> bool:
    """Whether a tensor is the last entry of another, along either of the first dimensions."""
    for axis in range(min(2, together.ndim)):
        last = together.narrow(axis, together.shape[axis] - 1, 1)
        if together.shape[axis] == count and last.shape == alone.shape:
            wide = together.dtype in (torch.float32, torch.float64)
            tolerance = 1e-4 if wide else 3e-2
            if torch.allclose(last.float(), alone.float(), tolerance, tolerance):
                return True
    return False
