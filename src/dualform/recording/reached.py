"""Which parameters a backward pass adds to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from dualform.private import will_execute


class Reached:
    """Whether a backward pass will add to a parameter's gradient, or only passes by.

    The gradient of an input (`torch.autograd.grad(loss, x)`, an attack, a saliency map) passes by.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._nodes: dict[str, Node] = {}

    def __call__(self, books: Iterable[str]) -> bool:
        """Whether it adds to any of these."""
        for book in books:
            node = self._nodes.get(book) or self._find(book)
            try:
                if node is not None and will_execute(node):
                    return True
            except RuntimeError:  # torch.autograd.grad(loss, parameters): the loop may use it
                return True
        return False

    def _find(self, book: str) -> Node | None:
        """What adds to the parameter's gradient; it is there while the parameter is trained."""
        if not self._parameters[book].requires_grad:
            return None
        self._nodes[book] = get_gradient_edge(self._parameters[book]).node
        return self._nodes[book]
