"""Steps that the recorded optimizer does not make, and steps that nobody makes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.told import told
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import dualform
from dualform.errors import CoverageWarning, RecordingWarning


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def step(model: nn.Module, optimizer: Optimizer) -> None:
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("make", [SGD, Adam])
@pytest.mark.parametrize("marked", [True, False])
def test_an_optimizer_that_is_made_anew(make: type, marked: bool, tmp_path: Path) -> None:
    """Its first step is noticed, and all that it does is kept by step."""
    model = network()
    optimizer = make(model.parameters(), lr=0.01)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(13):
            step(model, optimizer)
        if marked:
            recorder.checkpoint()
        optimizer = make(model.parameters(), lr=0.01)
        reason = f"from step 14 on: another optimizer, {make.__name__}, stepped it; by row is what"
        with pytest.warns(CoverageWarning, match=reason):
            step(model, optimizer)
        for _ in range(12):
            step(model, optimizer)
    run = dualform.open(tmp_path / "run")
    audit = run.audit()
    assert audit.remainder <= 1e-12
    assert audit.measured_at == run.steps == 14
    assert audit.coverage == 0.0
    assert {book.granularity for book in audit.books} == {"row, then step"}
    for name, weight in run.state_dict().items():
        torch.testing.assert_close(weight, model.state_dict()[name])


def test_an_optimizer_that_is_never_stepped(tmp_path: Path) -> None:
    """Another trains the model: what it did is one change, and the user is told."""
    model = network()
    recorded, other = SGD(model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.1)
    with told(tmp_path / "run"), dualform.record(model, recorded, tmp_path / "run"):
        for _ in range(5):
            step(model, other)
    run = dualform.open(tmp_path / "run")
    assert run.steps == 1
    assert run.audit().remainder <= 1e-12
    assert {book.granularity for book in run.audit().books} == {"step"}


def test_optimizers_that_take_turns(tmp_path: Path) -> None:
    model = network()
    ours, theirs = SGD(model.parameters(), lr=0.1, momentum=0.9), Adam(model[2].parameters())
    with told(tmp_path / "run"), dualform.record(model, ours, tmp_path / "run"):
        for number in range(9):
            step(model, theirs if number % 3 == 2 else ours)
    audit = dualform.open(tmp_path / "run").audit()
    assert audit.remainder <= 1e-12
    granularity = {book.name: book.granularity for book in audit.books}
    assert granularity == {
        "0.weight": "row",
        "0.bias": "row",
        "2.weight": "row, then step",
        "2.bias": "row, then step",
    }


class Around(Optimizer):
    """Does no more than to step another optimizer."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_a_wrapper_is_no_other_optimizer(tmp_path: Path) -> None:
    for name in ("inner", "outer"):
        model = network()
        inner = SGD(model.parameters(), lr=0.1)
        outer = Around(inner)
        recorded = inner if name == "inner" else outer
        with told(tmp_path / name), dualform.record(model, recorded, tmp_path / name):
            for _ in range(4):
                step(model, outer)
        run = dualform.open(tmp_path / name)
        assert run.steps == 4
        assert run.audit().remainder <= 1e-12
        assert run.audit().coverage == (1.0 if name == "inner" else 0.0)


def test_optimizers_of_other_models_are_not_looked_at(tmp_path: Path) -> None:
    model, other = network(), network()
    optimizer, theirs = SGD(model.parameters(), lr=0.1), SGD(other.parameters(), lr=0.1)
    with told(tmp_path / "run"), dualform.record(model, optimizer, tmp_path / "run"):
        for _ in range(3):
            step(model, optimizer)
            step(other, theirs)
    assert dualform.open(tmp_path / "run").audit().coverage == 1.0


def test_no_hook_is_left_behind(tmp_path: Path) -> None:
    before = [*_global_optimizer_pre_hooks, *_global_optimizer_post_hooks]
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run"):
        step(model, optimizer)
    assert [*_global_optimizer_pre_hooks, *_global_optimizer_post_hooks] == before


def test_a_recorder_that_saw_no_step_says_so(tmp_path: Path) -> None:
    model = network()
    message = r"saw no step: the SGD it was given was not stepped inside the `with` .* Give dualf"
    optimizer = SGD(model.parameters(), lr=0.1)
    with (
        pytest.warns(RecordingWarning, match=message),
        dualform.record(model, optimizer, tmp_path / "run"),
        torch.no_grad(),
    ):
        model[0].weight.mul_(0.5)
    with (  # an error is the only thing to see
        warnings.catch_warnings(),
        pytest.raises(ZeroDivisionError),
        dualform.record(model, optimizer, tmp_path / "broken"),
    ):
        raise ZeroDivisionError


def test_an_audit_without_kept_weights_does_not_call_it_rounding(tmp_path: Path) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    start = {name: weight.clone() for name, weight in model.state_dict().items()}
    with (  # noqa: PT031
        pytest.warns(RecordingWarning, match="the weights changed after step 3, the last of the"),
        dualform.record(model, optimizer, tmp_path / "run"),
    ):
        for _ in range(3):
            step(model, optimizer)
        model.load_state_dict(start)
    audit = dualform.open(tmp_path / "run").audit()
    assert audit.measured_at == 0
    assert audit.remainder != audit.remainder  # it cannot be measured
    assert {book.reason for book in audit.books} == {""}
    assert "not measured: no weights were kept up to there" in str(audit)
