"""One cell of the grid: a case trained by an optimizer, recorded and not."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tests.cases import CASES, layers
from tests.cases.case import Case, cast
from tests.cases.optimizers import LOOSER, OPTIMIZERS, takes, trained
from tests.told import told
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.read import Run, open_run
from dualform.read.audit import ROUNDING
from dualform.recording.bookkeeping import NOISY
from dualform.testing import Loop, train
from dualform.testing.layers import TOLERANCE

LOOP = Loop(steps=6, batch=6, accumulate=2)
FAR = 10.0
"""How far the targets are: training moves toward them all along, so weights change steadily."""
STEEPNESS = {
    "LSTM": 5.0,
    "LSTM, projected": 2.0,
    "RNN": 0.5,
    "Cells": 5.0,
    "GRU": 3.0,
    "MultiheadAttention": 1.5,
    "Functional": 0.2,
}
"""Of the loss, by case or its first word: layers that pass on little of an error need more."""


@dataclass(frozen=True)
class Cell:
    """What the books of one training say."""

    remainder: float
    coverage: float
    reasons: Mapping[str, str]
    """The reason of every book that the audit gives one for."""
    identical: bool
    """Whether recording changed nothing, to the bit."""
    reading: float
    """The largest remainder of the spotlight's readings, relative to the layer's output."""
    rounding: bool
    """Whether no remainder is more than 1e-6 and more than rounding of stored weights can be."""


@dataclass
class Problem:
    """A case to train: model, inputs, targets and the loss."""

    model: nn.Module
    x: Tensor
    y: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]

    def twin(self) -> Problem:
        """The same again."""
        return Problem(copy.deepcopy(self.model), self.x, self.y, self.loss)

    def train(self, optimizer: str, path: Path | None, loop: Loop = LOOP) -> Optimizer:
        """Trains under a fixed seed; records where there is a path."""
        torch.manual_seed(1)
        made = OPTIMIZERS[optimizer](trained(self.model))
        with told(path):
            train(self.model, made, self.x, self.y, loop, path, self.loss)
        return made


def problem(name: str, dtype: torch.dtype, seed: int = 1) -> Problem:
    """A batch of a case with one input, most often of a layer, and targets far from its output."""
    case = layers.CASES.get(name) or CASES[name]
    torch.manual_seed(seed)
    model, x = case.make().to(dtype), cast(case.inputs(0), dtype)
    with torch.no_grad():
        y = FAR * (torch.randn_like(model(x)) + 0.5)
    steep = STEEPNESS.get(name, STEEPNESS.get(name.partition(",")[0], 1.0)) / FAR

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return steep * (output - target).square().flatten(1).mean(1).sum()

    return Problem(model, x, y, loss)


def run_cell(
    case: str,
    optimizer: str,
    dtype: torch.dtype,
    path: Path,
    autocast: torch.dtype | None = None,
    seed: int = 1,
) -> Cell:
    """Trains a case twice, once recorded, and reads its books."""
    recorded = problem(case, dtype, seed)
    twin = recorded.twin()
    if autocast is not None:
        cast_forward(recorded.model, autocast)
        cast_forward(twin.model, autocast)
    after, plain = recorded.train(optimizer, path), twin.train(optimizer, None)
    run = open_run(path)
    audit = run.audit()
    return Cell(
        audit.remainder,
        audit.coverage,
        {book.name: book.reason for book in audit.books if book.reason},
        same(recorded.model.state_dict(), twin.model.state_dict())
        and same(after.state_dict()["state"], plain.state_dict()["state"]),
        worst_reading(run, recorded.model, recorded.x[:3]),
        not audit.beyond_rounding,
    )


def cast_forward(model: nn.Module, dtype: torch.dtype) -> None:
    """Puts autocast around the model's forward pass."""
    forward = model.forward

    def cast(*args: Any) -> Any:
        with torch.autocast("cpu", dtype):
            return forward(*args)

    model.forward = cast


def worst_reading(run: Run, model: nn.Module, x: Tensor) -> float:
    """The largest remainder of all readings, relative to their layer's output."""
    found = [
        abs(reading.check.remainder).max() / (reading.queries.outputs.abs().max().item() + 1e-12)
        for reading in run.spotlight(model, x).values()
    ]
    return float(max(found, default=0.0))


def same(one: Any, other: Any) -> bool:
    """Whether nested values are equal, tensors to the bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def tolerance(optimizer: str, dtype: torch.dtype) -> float:
    """The remainder that is allowed, relative to the change of the weights."""
    return LOOSER.get(optimizer, TOLERANCE)[dtype]


def unexpected(case: Case, reasons: Mapping[str, str]) -> dict[str, str]:
    """The reasons that the case does not give, and what it gives that is not among the reasons."""
    found = {}
    for book, reason in reasons.items():
        known = case.reason(book)
        noisy = case.noise and re.search(case.noise, book) and reason in (NOISY, ROUNDING)
        if not noisy and (known is None or not reason.startswith(known)):
            found[book] = reason
    missing = [part for part in case.by_step if not any(part in book for book in reasons)]
    return found | dict.fromkeys(missing, "is not kept by step")


@cache
def whole_grid() -> tuple[tuple[str, str], ...]:
    """Every case with every optimizer that can train it."""
    return tuple(
        (name, optimizer)
        for name, case in layers.CASES.items()
        for model in [case.make()]
        for optimizer in OPTIMIZERS
        if takes(optimizer, model)
    )
