"""What the architectures are trained on, how, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tests.cases.architectures import CASES, SAMPLES, Batch
from tests.cases.case import cast
from tests.laws.training import recording
from torch import Tensor, nn

from dualform.read import Run
from dualform.testing.training import Loop

LOOP = Loop(steps=6, batch=4)
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
NAMES = list(CASES)
RATES = {"LSTM": 4.0, "LSTM, time first": 4.0, "LSTM, packed": 6.0, "LoRA on Linear": 3.0}
RATES |= {"GPT-2": 0.2, "LoRA on GPT-2": 0.3}
"""Rates of SGD at which weights change appreciably, where that is not 1."""
OPTIMIZERS = ["SGD", "AdamW"]
DECAY = 0.1
RATE = 0.05
"""AdamW's."""


# Training them


@dataclass(frozen=True)
class Problem:
    """A model before training, and its data."""

    name: str
    model: nn.Module
    batch: Batch
    targets: Tensor

    def of(self, ids: Tensor) -> tuple[Batch, Tensor]:
        axis = CASES[self.name].axis
        chosen = {name: x.index_select(axis, ids) for name, x in self.batch.items()}
        return chosen, self.targets.index_select(axis if self.targets.ndim > 1 else 0, ids)

    def loss(self, model: nn.Module, ids: Tensor) -> Tensor:
        """A sum over samples, so that each has a share of its own."""
        batch, targets = self.of(ids)
        return CASES[self.name].losses(model, batch | {"targets": targets}).sum()


def problem(name: str, dtype: torch.dtype) -> Problem:
    torch.manual_seed(0)
    model = CASES[name].make().to(dtype)
    batch = cast(CASES[name].inputs(0), dtype)
    targets = batch.pop("targets")
    return Problem(name, model, batch, targets)


def optimizer_of(name: str, optimizer: str, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if optimizer == "AdamW":
        return torch.optim.AdamW(trained, lr=RATE, weight_decay=DECAY)
    return torch.optim.SGD(trained, lr=RATES.get(name, 1.0), momentum=0.9)


def train(
    given: Problem, model: nn.Module, optimizer: str, steps: int = LOOP.steps, path: Any = None
) -> None:
    """Trains with dropout; records it if a path is given."""
    made = optimizer_of(given.name, optimizer, model.train())
    torch.manual_seed(1)
    with recording(model, made, path) as name_samples:
        for number, ids in enumerate(LOOP.batches(SAMPLES)):
            if number == steps:
                break
            name_samples(ids)
            given.loss(model, ids).backward()
            made.step()
            made.zero_grad()


@dataclass(frozen=True)
class Trained:
    """A model after training, and the run that was recorded."""

    given: Problem
    before: nn.Module
    model: nn.Module
    run: Run

    def queries(self, ids: list[int]) -> Batch:
        return self.given.of(torch.tensor(ids))[0]


@dataclass(frozen=True)
class Stepped:
    """One step of plain gradient descent from `problem`, in evaluation mode."""

    given: Problem
    ids: list[int]
    rate: float
    model: nn.Module
    run: Run
    seen: dict[str, tuple[Tensor, Tensor]]
    """What each module got, and the error at what it gave."""


@contextmanager
def seeing(model: nn.Module) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Keeps each module's first input and output; once backward has run, the output's error."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            out = out[0] if isinstance(out, tuple) else out
            if not args or not isinstance(args[0], Tensor) or not isinstance(out, Tensor):
                return
            seen[name] = (args[0].detach(), out.detach().clone())
            if out.requires_grad:
                out.register_hook(lambda error: seen.update({name: (args[0].detach(), error)}))

        return hook

    handles = [m.register_forward_hook(look(n)) for n, m in model.named_modules() if n]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
