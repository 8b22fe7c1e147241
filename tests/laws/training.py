"""Training a case on its batches, recorded or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tests.cases import CASES, KINDS
from tests.cases.case import Case
from tests.cases.optimizers import OPTIMIZERS, trained
from tests.told import told
from torch import nn
from torch.optim import Optimizer

import dualform

STEPS, PARTS = 3, 2
"""Steps of a training, and batches whose gradients are added up for a step."""
DECAYING = ("SGD, Nesterov", "AdamW, amsgrad")
"""One rule of numbers and one with state. Both let weights decay, each in its own way."""


def pairs(*kinds: str) -> list[tuple[str, str]]:
    """Every case of some kinds with one of these optimizers, in turn; architectures with both."""
    return [
        (f"{kind}: {name}", optimizer)
        for kind in kinds
        for at, name in enumerate(KINDS[kind])
        for optimizer in (DECAYING if kind == "architectures" else [DECAYING[at % 2]])
    ]


@contextmanager
def recording(
    model: nn.Module, optimizer: Optimizer, path: Path | None
) -> Iterator[Callable[[Any], None]]:
    """Records if a path is given. Gives the function that names the samples of a batch."""
    if path is None:
        yield lambda ids: None
    else:
        with told(path), dualform.record(model, optimizer, path) as recorder:
            yield recorder.samples


def new_model(case: Case, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return case.make().to(dtype)


def fit(
    name: str,
    optimizer: str,
    dtype: torch.dtype,
    path: Path | None = None,
    before_step: Callable[[int, nn.Module], None] = lambda step, model: None,
) -> tuple[nn.Module, Optimizer]:
    """Trains a case with dropout; records if a path is given."""
    case = CASES[name]
    model = new_model(case, dtype)
    made = OPTIMIZERS[optimizer](trained(model))
    torch.manual_seed(1)
    with recording(model, made, path) as name_samples:
        for step in range(STEPS):
            before_step(step, model)
            for number in range(PARTS * step, PARTS * (step + 1)):
                inputs = case.batch(number, dtype)
                name_samples(case.names(number, inputs))
                case.losses(model, inputs).mean().backward()
            made.step()
            made.zero_grad()
    return model, made
