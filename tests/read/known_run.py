"""A training that is recorded, and done again by hand: what a plain loop knows of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.cases.optimizers import OPTIMIZERS
from torch import Tensor, nn
from torch.optim import Optimizer

import dualform
from dualform.read.influence import PANELS
from dualform.testing import Loop, train

Layers = dict[str, tuple[Tensor, Tensor]]
"""A sample's input and error in each layer."""


def flat(parts: Mapping[str, Tensor], begin: int = 0) -> Tensor:
    """All parameters as one vector, or (queries, …) as one matrix."""
    return torch.cat([parts[name].flatten(begin) for name in sorted(parts)], begin)


def grouped_sgd(parameters: list[nn.Parameter]) -> Optimizer:
    """Another rate for each layer."""
    groups = [{"params": parameters[:2], "lr": 0.2}, {"params": parameters[2:], "lr": 0.02}]
    return torch.optim.SGD(groups, momentum=0.9)


MAKE: dict[str, Callable[[Any], Optimizer]] = {
    **OPTIMIZERS,
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, groups": grouped_sgd,
}


class Known:
    """A recorded run of a tiny network, and all that a plain loop knows of it."""

    LOOP = Loop(steps=8, batch=5)

    def __init__(self, path: Path, optimizer: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        self.x, self.y = torch.randn(10, 4).double(), 3 * torch.randn(10, 3).double()
        twin = copy.deepcopy(self.model)
        made = MAKE[optimizer](list(twin.parameters()))
        self.steps = [self.step(twin, made, ids) for ids in self.LOOP.batches(10)]
        train(
            self.model,
            MAKE[optimizer](list(self.model.parameters())),
            self.x,
            self.y,
            self.LOOP,
            path,
        )
        self.run = dualform.open(path)

    def step(self, twin: nn.Module, made: Optimizer, ids: Tensor) -> dict[int, Layers]:
        """One step by hand, each sample on its own; its errors are the gradients of biases."""
        found: dict[int, Layers] = {}
        made.zero_grad()
        for i in ids.tolist():
            x, before = self.x[[i]], [p.grad for p in twin.parameters()]
            twin.zero_grad()
            ((twin(x) - self.y[[i]]).square().sum() / 8).backward()
            hidden = torch.tanh(twin[0](x)).detach()
            found[i] = {"0": (x[0], twin[0].bias.grad), "2": (hidden[0], twin[2].bias.grad)}
            for p, earlier in zip(twin.parameters(), before, strict=True):
                p.grad = p.grad if earlier is None else p.grad + earlier
        made.step()
        return found

    @staticmethod
    def gradient(layers: Layers) -> Tensor:
        weights = {f"{name}.weight": torch.outer(e, k) for name, (k, e) in layers.items()}
        return flat(weights | {f"{name}.bias": e for name, (_, e) in layers.items()})

    def summed(self) -> Tensor:
        """(samples, parameters): the gradients of each sample, over all steps."""
        zero = torch.zeros(51, dtype=torch.float64)
        visits = [[self.gradient(s[i]) for s in self.steps if i in s] for i in range(10)]
        return torch.stack([sum(own, zero) for own in visits])

    def last_seen(self) -> list[Layers]:
        """Each sample's layers where training last saw it; of its own loss, not of the mean."""
        found: dict[int, Layers] = {}
        for s in self.steps:
            found |= {i: {n: (k, e * len(s)) for n, (k, e) in s[i].items()} for i in s}
        return [found[i] for i in range(10)]

    def contributions(self) -> Tensor:
        """C (samples, parameters): what subtracting each sample takes away."""
        trained, left = flat(self.run.state_dict()), [self.run.subtract([i]) for i in range(10)]
        return torch.stack([trained - flat(weights) for weights in left])

    def directions(self) -> Tensor:
        """(queries, parameters): gradients averaged over the line, as influence takes them."""
        first, last = self.run.source.ledger.weights(0), self.run.state_dict()
        points = [at / PANELS for at in range(PANELS + 1)]
        found = [
            self.gradients({n: torch.lerp(first[n], last[n], at) for n in last}) for at in points
        ]
        return (sum(found) - (found[0] + found[-1]) / 2) / PANELS

    def gradients(self, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """(queries, parameters): plain autograd."""
        model, rows = copy.deepcopy(self.model), []
        model.load_state_dict(dict(weights or self.run.state_dict()))
        for query in self.x[:3]:
            model.zero_grad()
            model(query[None])[0, 1].backward()
            rows.append(flat({name: p.grad for name, p in model.named_parameters()}))
        return torch.stack(rows)

    def influence(self, method: str = "ridge", **options: Any) -> np.ndarray:
        return self.run.influence(self.model, self.x[:3], 1, method=method, **options).values
