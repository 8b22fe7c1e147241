"""What the linear layers of a model are given, and how far what they give moves its output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def layer_inputs(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """(samples, width) for each linear layer, by name: what it is given when the model runs on x.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> found = layer_inputs(model, torch.ones(4, 2))
    >>> found["0"].shape, found["2"].shape
    (torch.Size([4, 2]), torch.Size([4, 3]))
    """
    seen: dict[str, Tensor] = {}
    with _watched(model, lambda name, given, _: seen.update({name: given})), torch.no_grad():
        model(x)
    return seen


def sensitivities(model: nn.Module, x: Tensor, outputs: Tensor) -> dict[str, Tensor]:
    """(queries, width) for each linear layer: how far what it gives moves one output of the model.

    Asked along these directions, a layer answers in units of that output.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> found = sensitivities(model, torch.ones(1, 2), torch.tensor([1]))
    >>> found["2"].tolist(), found["0"].shape
    ([[0.0, 1.0]], torch.Size([1, 3]))
    """
    seen: dict[str, Tensor] = {}
    with _watched(model, lambda name, _, given: seen.update({name: given})):
        chosen = model(x).gather(1, outputs[:, None].to(x.device)).sum()
    found = torch.autograd.grad(chosen, list(seen.values()))
    return {name: gradient.cpu() for name, gradient in zip(seen, found, strict=True)}


@contextmanager
def _watched(model: nn.Module, see: Callable[[str, Tensor, Tensor], None]) -> Iterator[None]:
    """Shows the name, the input and the output of every linear layer that is called."""

    def hook(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda _, given, output: see(name, given[0], output)

    hooks = [
        layer.register_forward_hook(hook(name))
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()
