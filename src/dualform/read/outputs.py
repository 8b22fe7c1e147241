"""What a model gives for one query: a number for each class, at each position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dualform.errors import ReadingError
from dualform.read.queries import arguments, check_model
from dualform.read.targets import Asked

__all__ = [
    "Asked",
    "check_model",
    "logits",
    "model_outputs",
    "model_places",
    "output_tensor",
    "usual_places",
]


def model_outputs(model: nn.Module, x: Any) -> Tensor:
    """(places, classes): what the model gives for one query."""
    args, kwargs = arguments(x)
    with torch.no_grad():
        return logits(model(*args, **kwargs)).double().cpu()


def logits(output: Any) -> Tensor:
    """(places, classes): one query's output, whose batch has one element."""
    found = output_tensor(output)
    if found.ndim not in (2, 3) or found.shape[-1] < 1:
        raise ReadingError(
            f"the model gives {tuple(found.shape)} for one query; the explorer asks about models "
            "that give (batch, classes) or (batch, positions, classes). Ask about a layer instead."
        )
    return found.reshape(-1, found.shape[-1])


def output_tensor(output: Any) -> Tensor:
    """A model's output as a tensor; transformers' models call it logits."""
    found = getattr(output, "logits", output)
    return found if isinstance(found, Tensor) else torch.zeros(0)


def usual_places(outputs: Tensor, positions: int) -> Tensor:
    """(queries,): which place is meant where none is given, of (queries, places, width).

    The last, where the layer has the positions of the model: that is what a language model is
    asked about. Otherwise the place with most output.

    >>> outputs = torch.tensor([[[5.0], [1.0], [2.0]]])
    >>> usual_places(outputs, positions=3), usual_places(outputs, positions=1)
    (tensor([2]), tensor([0]))
    """
    if outputs.shape[1] == positions:
        return torch.full((len(outputs),), positions - 1)
    return outputs.amax(2).argmax(1)


def model_places(model: nn.Module, x: Any, queries: int = 1) -> int:
    """For how many positions of a query the model gives outputs."""
    try:
        return len(model_outputs(model, x)) // queries
    except ReadingError:  # its outputs are no classes: layers can still be asked
        return 1
