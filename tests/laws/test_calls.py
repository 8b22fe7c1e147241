"""Cases that are called in a roundabout way: compiled, or with parameters handed in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.cases.optimizers import OPTIMIZERS, trained
from tests.laws.grid import LOOP, Problem, problem
from tests.told import told
from torch import Tensor, nn
from torch.func import functional_call

import dualform
from dualform.read.audit import Audit

CASES = ["Embedding, tied head", "Conv2d", "LSTM, packed", "TransformerEncoder"]
Call = Callable[[Tensor], Tensor]


def audited(given: Problem, call: Call, path: Path) -> Audit:
    """Trains the case through another call than the model's own."""
    optimizer = OPTIMIZERS["SGD, Nesterov"](trained(given.model))
    with told(path), dualform.record(given.model, optimizer, path) as recorder:
        for ids in LOOP.batches(len(given.x)):
            recorder.samples(ids)
            given.loss(call(given.x[ids]), given.y[ids]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return dualform.open(path).audit()


def handed_in(model: nn.Module, change: Callable[[Tensor], Tensor]) -> Call:
    """Calls the model with its parameters given as arguments."""

    def call(x: Tensor) -> Tensor:
        given = {name: change(parameter) for name, parameter in model.named_parameters()}
        return functional_call(model, given, (x,))

    return call


@pytest.mark.parametrize("case", CASES)
def test_a_compiled_wrapper(case: str, tmp_path: Path) -> None:
    given = problem(case, torch.float64)
    audit = audited(given, torch.compile(given.model, backend="eager"), tmp_path / "run")
    assert audit.coverage == 1.0, audit
    assert audit.remainder <= 1e-12


@pytest.mark.parametrize("case", CASES)
def test_parameters_handed_in(case: str, tmp_path: Path) -> None:
    given = problem(case, torch.float64)
    audit = audited(given, handed_in(given.model, lambda p: p), tmp_path / "run")
    assert audit.coverage == 1.0, audit
    assert audit.remainder <= 1e-12


@pytest.mark.parametrize("case", CASES)
def test_other_tensors_handed_in(case: str, tmp_path: Path) -> None:
    """What is made of the parameters before the call is not seen; each book says so."""
    given = problem(case, torch.float64)
    audit = audited(given, handed_in(given.model, lambda p: 0.5 * p), tmp_path / "run")
    assert audit.coverage == 0.0, audit
    assert audit.remainder <= 1e-12
    assert all(book.reason.startswith("no call was seen in which") for book in audit.books), audit
