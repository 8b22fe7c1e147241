"""What a case is: a small model that is trained, and what the laws must know about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

MIXES = "mixes"
"""A sample's loss depends on the other samples of its batch, also in evaluation mode."""
LINEAR = "linear"
"""The model is one layer, and its output is linear in its parameters."""
REFUSED = "refused"
"""The model cannot be asked questions: it changes its weights when it is called."""


def output(model: nn.Module, inputs: Any) -> Any:
    """Calls the model with one tensor, with a tuple of arguments, or with arguments by name."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def squares(model: nn.Module, inputs: Any) -> Tensor:
    """The loss of each sample, for a model that gives anything with samples first."""
    out = output(model, inputs).flatten(1)
    return out.square().mean(1) + out[:, 0]


def classes(model: nn.Module, inputs: Any) -> Tensor:
    """The loss of each sample, for a model that gives three numbers to each."""
    out = output(model, inputs)
    return F.cross_entropy(out, torch.arange(len(out)) % 3, reduction="none")


@dataclass(frozen=True)
class Case:
    """A model, the batches it is trained on, the loss of each sample, and known exceptions.

    The first two are enough for most cases. Every law in `tests/laws` runs on every case, unless
    a tag says that it cannot.
    """

    make: Callable[[], nn.Module]
    """The model, in float32; called under a fixed seed."""
    inputs: Callable[[int], Any]
    """The inputs of a batch, given its number: one tensor, or arguments in a tuple or by name."""
    losses: Callable[[nn.Module, Any], Tensor] = squares
    """The loss of each sample of a batch, from the model and the inputs."""
    by_step: Mapping[str, str] = field(default_factory=dict)
    """Books that are kept by step: a part of their names, and how the reason begins."""
    noise: str = ""
    """A pattern of books whose gradient is zero up to rounding; some optimizers magnify that."""
    ids: Callable[[int], Sequence[Any]] | None = None
    """The ids of a batch, given its number, where they are not simply one for each sample."""
    axis: int = 0
    """The dimension of the inputs that counts samples."""
    tags: frozenset[str] = frozenset()

    def batch(self, number: int, dtype: torch.dtype) -> Any:
        """The inputs of a batch in a precision: the same for the same number, whatever was drawn.

        >>> case = Case(lambda: nn.Linear(4, 3), lambda number: torch.randn(8, 4))
        >>> torch.equal(case.batch(1, torch.float64), case.batch(1, torch.float64))
        True
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            drawn = self.inputs(number)
        return cast(drawn, dtype)

    def names(self, number: int, inputs: Any) -> list[Any]:
        """The ids of a batch; by default the same for all, each time in another order."""
        if self.ids is not None:
            return list(self.ids(number))
        count = tree_leaves(inputs)[0].shape[self.axis]
        return [(place + number) % count for place in range(count)]

    def queries(self, inputs: Any) -> Any:
        """What the model itself is given of the inputs: everything but targets."""
        if not isinstance(inputs, dict):
            return inputs
        return {name: x for name, x in inputs.items() if name != "targets"}

    def reason(self, book: str) -> str | None:
        """How the reason begins for which a book is kept by step; None if it is kept by row."""
        return next((self.by_step[part] for part in self.by_step if part in book), None)


def cast(inputs: Any, dtype: torch.dtype) -> Any:
    """The same inputs, with their numbers in another precision."""
    change = lambda x: x.to(dtype) if x.is_floating_point() else x  # noqa: E731
    return tree_map_only(Tensor, change, inputs)
