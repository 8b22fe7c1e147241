"""What rules do not describe is kept by step, and the audit says which option it was and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.told import told
from torch import Tensor, nn
from torch.optim import LBFGS, Adam, AdamW, Optimizer, RMSprop

import dualform
from dualform.optimizers import RULES, Rule, rule_for, why_observed

Make = Callable[[Iterable[Tensor]], Optimizer]


def packaged(name: str, **options: Any) -> Make:
    """An optimizer of pytorch-optimizer."""
    pytest.importorskip("pytorch_optimizer")
    return lambda p: getattr(import_module("pytorch_optimizer"), name)(list(p), **options)


class MyAdamW(AdamW):
    """May do anything."""


def decoupled_lion(parameters: Iterable[Tensor]) -> Optimizer:
    made: Optimizer = pytest.importorskip("lion_pytorch").Lion(
        list(parameters), lr=torch.tensor(0.01), decoupled_weight_decay=True
    )
    return made


REFUSED: dict[str, tuple[Callable[[], Make], str]] = {
    "Shampoo, momentum": (
        lambda: packaged("Shampoo", momentum=0.9),
        "Shampoo with momentum=0.9 divides again what earlier steps have divided; by row is "
        "momentum=0",
    ),
    "Shampoo, coupled decay": (
        lambda: packaged("Shampoo", weight_decay=0.1),
        "Shampoo with weight_decay=0.1 in the gradient divides again what earlier steps have "
        "divided; by row is weight_decouple=True",
    ),
    "SOAP, merged": (
        lambda: packaged("SOAP", merge_dims=True, max_precondition_dim=2),
        "SOAP with merge_dims=True has bases for merged dimensions; by row is merge_dims=False",
    ),
    "Lion, a tensor": (
        lambda: decoupled_lion,
        "Lion with decoupled_weight_decay=True divides by its first lr, a tensor that may change "
        "unseen; by row is lr=float",
    ),
    "a subclass": (
        lambda: MyAdamW,
        "MyAdamW is a subclass of AdamW and may do anything; by row is AdamW itself",
    ),
    "no rule": (lambda: LBFGS, "LBFGS has no rule yet"),
}


def problem() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    return model, torch.randn(8, 4), torch.randn(8, 3)


def train(
    model: nn.Module,
    optimizer: Optimizer,
    data: tuple[Tensor, Tensor],
    path: Path,
    before: Callable[[int], None] = lambda step: None,
) -> dualform.Audit:
    """Six recorded steps; what happens before each may change the optimizer."""
    x, y = data
    with told(path), dualform.record(model, optimizer, path) as recorder:
        for step in range(6):
            before(step)

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = (model(x) - y).square().sum() / 8
                loss.backward()
                return loss

            recorder.samples(torch.arange(8))
            if isinstance(optimizer, LBFGS):
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
    return dualform.open(path).audit()


@pytest.mark.parametrize("name", REFUSED)
def test_the_audit_says_why(name: str, tmp_path: Path) -> None:
    make, reason = REFUSED[name]
    model, *data = problem()
    audit = train(model, make()(model.parameters()), (data[0], data[1]), tmp_path / "run")
    assert {book.granularity for book in audit.books} == {"step"}
    assert {book.reason for book in audit.books} == {reason}
    assert audit.remainder <= 1e-6
    assert reason.split(";")[0].split()[0] in repr(audit)


def test_complex_parameters() -> None:
    optimizer = RMSprop([torch.zeros(1, dtype=torch.complex64)])
    assert rule_for(optimizer).name == "observed"
    expected = "RMSprop steps the two parts of complex64 parameters apart; by row are real ones"
    assert why_observed(optimizer) == expected


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_refusal_has_a_cure(rule: Rule) -> None:
    """A rule refuses nothing that it was made for."""
    made = getattr(torch.optim, rule.optimizer, None)
    if made is not None and rule.optimizer:
        optimizer = made([torch.zeros(2, 2)], lr=0.1)
        assert rule.accepts(optimizer)
        assert not rule.refusal(optimizer)
        assert not any(map(rule.group_refusal, optimizer.param_groups))


def test_other_groups_stay_by_row(tmp_path: Path) -> None:
    """A group that the rule refuses does not take the others with it."""
    model, x, y = problem()
    groups = [
        {"params": [*model[0].parameters()]},
        {"params": [*model[2].parameters()], "merge_dims": True, "max_precondition_dim": 2},
    ]
    optimizer = packaged("SOAP", precondition_frequency=2, lr=0.05, eps=1e-2)(groups)
    audit = train(model, optimizer, (x, y), tmp_path / "run")
    kept = {book.name: book.granularity for book in audit.books}
    assert kept == {"0.weight": "row", "0.bias": "row", "2.weight": "step", "2.bias": "step"}
    assert [bool(book.reason) for book in audit.books] == [False, False, True, True]
    assert audit.remainder <= 1e-5


def test_options_that_change_on_the_way(tmp_path: Path) -> None:
    """By row up to there, then by step."""
    model, x, y = problem()
    optimizer = packaged("Shampoo", lr=0.5, matrix_eps=4.0)(model.parameters())

    def before(step: int) -> None:
        if step == 3:
            optimizer.param_groups[0]["momentum"] = 0.5

    audit = train(model, optimizer, (x, y), tmp_path / "run", before)
    assert {book.granularity for book in audit.books} == {"row, then step"}
    assert {book.reason for book in audit.books} == {
        "Shampoo with momentum=0.5 divides again what earlier steps have divided; by row is "
        "momentum=0"
    }
    assert audit.remainder <= 1e-6


def test_a_group_that_is_added(tmp_path: Path) -> None:
    model, x, y = problem()
    optimizer = packaged("SOAP", precondition_frequency=2, lr=0.05, eps=1e-2)(model[0].parameters())

    def before(step: int) -> None:
        if step == 2:
            added = {
                "params": [*model[2].parameters()],
                "merge_dims": True,
                "max_precondition_dim": 2,
            }
            optimizer.add_param_group(added)

    audit = train(model, optimizer, (x, y), tmp_path / "run", before)
    kept = {book.name: book.granularity for book in audit.books}
    assert kept == {"0.weight": "row", "0.bias": "row", "2.weight": "step", "2.bias": "step"}
    assert audit.remainder <= 1e-5


def test_adam_alone_is_accepted() -> None:
    assert rule_for(Adam([torch.zeros(1)])).name == "adam"
    assert rule_for(MyAdamW([torch.zeros(1)])).name == "observed"
