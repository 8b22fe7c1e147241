"""Which parameters are there to compute a weight from: by their names, and by the graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

PARAMETRIZED = "parametrizations."
"""In the names of parameters that a weight is computed from."""
GIVEN = "dualform: given by a layer"
"""In the metadata of a node of the graph."""


def computed_weight(name: str, names: Iterable[str]) -> str:
    """The weight that a parameter is there for, by the names torch gives; "" for most.

    >>> computed_weight("fc.parametrizations.weight.original0", [])
    'fc.parametrizations.weight'
    >>> computed_weight("fc.weight_g", ["fc.weight_g", "fc.weight_v"])
    'fc.weight'
    >>> computed_weight("fc.weight_orig", []), computed_weight("fc.weight", [])
    ('fc.weight', '')
    """
    head, mark, rest = name.partition(PARAMETRIZED)
    if mark:
        return head + mark + rest.partition(".")[0]
    if name.endswith("_orig"):
        return name.removesuffix("_orig")
    stem = name[:-2]
    pair = {f"{stem}_g", f"{stem}_v"}
    return stem if name in pair and pair <= set(names) else ""


def is_weight_norm(name: str, owner: Any) -> bool:
    """Whether a parameter, of this name in its module, is one that a weight norm is made of.

    >>> is_weight_norm("weight_g", None), is_weight_norm("weight_orig", None)
    (True, False)
    """
    if not name.startswith("original"):
        return name.endswith(("_g", "_v"))
    return type(owner[0]).__name__ == "_WeightNorm"


def leaves(node: Any) -> Iterator[Tensor | None]:
    """The tensors that a graph begins with, each once; None for what a layer gave."""
    seen, waiting = {node}, [node]
    while waiting:
        node = waiting.pop()
        if GIVEN in node.metadata:
            yield None
        if hasattr(node, "variable"):
            yield node.variable
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        waiting += new


def mark_given(out: Tensor) -> None:
    """Marks what a layer gave, so that nothing made of it is taken for a computed weight."""
    if out.grad_fn is not None:
        metadata: Any = out.grad_fn.metadata
        metadata[GIVEN] = True
