"""Trained architectures, each once for all tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from tests.architectures.problems import Stepped, Trained, problem, recording, seeing, train

import dualform


@pytest.fixture(scope="session")
def trained() -> Iterator[Callable[..., Trained]]:
    """Trains each architecture once for all tests."""
    with TemporaryDirectory() as folder:

        @cache
        def make(name: str, optimizer: str, dtype: torch.dtype) -> Trained:
            given = problem(name, dtype)
            model = copy.deepcopy(given.model)
            path = Path(folder) / f"{name}, {optimizer}, {dtype}"
            train(given, model, optimizer, path=path)
            return Trained(given, given.model, model, dualform.open(path))

        yield lambda name, optimizer, dtype=torch.float64: make(name, optimizer, dtype)


@pytest.fixture(scope="session")
def stepped() -> Iterator[Callable[[str], Stepped]]:
    with TemporaryDirectory() as folder:

        @cache
        def make(name: str) -> Stepped:
            given, ids, rate = problem(name, torch.float64), [9, 2, 7, 4], 0.3
            model = copy.deepcopy(given.model).eval()
            with seeing(model) as seen:
                given.loss(model, torch.tensor(ids)).backward()
            model.zero_grad()
            sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], rate)
            with recording(model, sgd, Path(folder) / name) as name_samples:
                name_samples(torch.tensor(ids))
                given.loss(model, torch.tensor(ids)).backward()
                sgd.step()
            return Stepped(given, ids, rate, model, dualform.open(Path(folder) / name), seen)

        yield make
