"""Shampoo and SOAP of pytorch-optimizer: replayed, under the contract, and what is left to step."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.optimizers.replaying import errors, gradients, train
from torch import Tensor, nn
from torch.optim import Optimizer

import dualform
from dualform.memory.blocks import Functional, as_matrix
from dualform.memory.views import View
from dualform.optimizers import Modewise, Rule, Turned, apply, rule_for
from dualform.optimizers.operators import Operator
from dualform.optimizers.operators import operator as operators_module
from dualform.optimizers.operators.turned import FADED
from dualform.optimizers.shampoo import ShampooRule
from dualform.optimizers.soap import SOAPRule
from dualform.testing import Loop, RuleContract
from dualform.testing import train as train_model

packaged = pytest.importorskip("pytorch_optimizer")
DECAY = {"weight_decay": 0.02, "weight_decouple": True}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "Shampoo": {
        "plain": {},
        "maximize": {"maximize": True},
        "decay": DECAY,
        "fixed decay": DECAY | {"fixed_decay": True, "maximize": True},
        "seldom": {"preconditioning_compute_steps": 3},
    },
    "SOAP": {
        "plain": {},
        "often": {"precondition_frequency": 1, "betas": (0.9, 0.99)},
        "by hand": {"precondition_frequency": 3, "correct_bias": False, "maximize": True},
        "normalized": {"precondition_frequency": 4, "normalize_gradient": True},
        "vectors": {"precondition_frequency": 2, "precondition_1d": True, "shampoo_beta": 0.5},
        "one side": {"precondition_frequency": 2, "max_precondition_dim": 4, "weight_decay": 0.0},
    },
}
CASES = [(name, options) for name, variants in OPTIONS.items() for options in variants.values()]
RULES: dict[str, type[ShampooRule] | type[SOAPRule]] = {"Shampoo": ShampooRule, "SOAP": SOAPRule}
STEADY: dict[str, dict[str, Any]] = {
    "Shampoo": {"lr": 0.5, "matrix_eps": 4.0},
    "SOAP": {"lr": 0.05, "eps": 1e-3},
}
"""So that nothing is divided by what is only rounding."""
SHAPES = [(4, 7), (7, 4), (6,), (), (3, 2, 4), (2, 3, 2, 2)]


def make(name: str, options: dict[str, Any], parameters: Iterable[Tensor]) -> Optimizer:
    found: Optimizer = getattr(packaged, name)(list(parameters), **{**STEADY[name], **options})
    return found


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_replay_is_what_happened(
    name: str, options: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    rule = RULES[name]()
    for kind in ("plain", "gaps") if shape else ("plain",):
        training = train(rule, lambda p: make(name, options, p), gradients(kind, 12, shape), dtype)
        for start in (0, 3):
            assert max(errors(rule, training, start)) <= tolerance


CONTRACTED = [
    ("Shampoo", "plain"),
    ("Shampoo", "decay"),
    ("SOAP", "plain"),
    ("SOAP", "by hand"),
]


@pytest.mark.parametrize("variant", CONTRACTED, ids=str)
class TestPreconditioned(RuleContract):
    """The contract's loops."""

    @pytest.fixture(autouse=True)
    def _variant(self, variant: tuple[str, str]) -> None:
        self.optimizer, self.options = variant[0], OPTIONS[variant[0]][variant[1]]

    def rule(self) -> Rule:
        return RULES[self.optimizer]()

    def make(self, parameters: Iterable[Tensor]) -> Optimizer:
        return make(self.optimizer, self.options, parameters)


@pytest.mark.parametrize("name", RULES)
def test_a_subclass_may_do_anything(name: str) -> None:
    changed = type(name, (getattr(packaged, name),), {})
    assert rule_for(changed([torch.zeros(2, 2)])).name == "observed"
    assert rule_for(make(name, {}, [torch.zeros(2, 2)])).name == name.lower()
    assert rule_for(make(name, {}, [torch.zeros(1, dtype=torch.complex64)])).name == "observed"
    assert rule_for(packaged.ScalableShampoo([torch.zeros(2, 2)])).name == "observed"


def test_bases_are_kept_when_they_change() -> None:
    weight = torch.zeros(2, 3)
    optimizer = make("SOAP", {"precondition_frequency": 3}, [weight])
    found = []
    for _ in range(8):
        weight.grad = torch.randn(2, 3)
        optimizer.step()
        found.append(SOAPRule().keeps(optimizer, joined=False))
    assert found == [True, False, False, True, False, False, True, False]
    assert SOAPRule().keeps(optimizer, joined=True)
    assert not ShampooRule().keeps(optimizer, joined=True)


@pytest.mark.parametrize("name", RULES)
def test_parameters_that_join_late(name: str, tmp_path: Path) -> None:
    """Steps are counted by the group, and a basis is made of the first gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    optimizer = make(name, {}, model.parameters())
    x, y = torch.randn(12, 4).double(), torch.randn(12, 3).double()
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for step in range(14):
            recorder.samples(torch.arange(12))
            (model(x) - y).square().sum().backward()
            if step < 4 or step == 8:
                model[0].weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
    audit = dualform.open(tmp_path / "run").audit()
    assert audit.coverage == 1.0
    assert audit.remainder <= 1e-12, audit


@pytest.mark.parametrize("name", RULES)
def test_going_on_after_a_break(name: str, tmp_path: Path) -> None:
    contract = TestPreconditioned()
    contract.optimizer, contract.options = name, {}
    model, optimizer, x, y = contract.problem(torch.float64)
    for resume in (False, True):
        with dualform.record(model, optimizer, tmp_path / "run", resume=resume) as recorder:
            for _ in range(7):
                recorder.samples(torch.arange(10))
                (model(x) - y).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    run = dualform.open(tmp_path / "run")
    assert run.steps == 14
    assert run.audit().remainder <= 1e-12


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dense", [operators_module.DENSE, 1])
def test_the_parts_add_up(
    name: str, dense: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Initial value, samples, remainder are the output; samples are what `subtract` takes away."""
    monkeypatch.setattr(operators_module, "DENSE", dense)
    contract = TestPreconditioned()
    contract.optimizer, contract.options = name, {}
    model, optimizer, x, y = contract.problem(torch.float64)
    train_model(model, optimizer, x, y, Loop(steps=12, schedule=True), tmp_path / "run")
    run = dualform.open(tmp_path / "run")
    gone = run.ids[2:4]
    left = run.subtract(gone)
    for layer, reading in run.spotlight(model, x[:4]).items():
        values = reading.samples().values
        actual = (reading.queries.outputs * reading.directions).sum(1).numpy()
        assert abs(reading.initial + values.sum(0) - actual).max() < 1e-12
        after = reading.queries.inputs @ left[f"{layer}.weight"].T + left[f"{layer}.bias"]
        lost = actual - (after * reading.directions).sum(1).numpy()
        assert abs(values[2:4].sum(0) - lost).max() < 1e-12


def classified(name: str, options: dict[str, Any], dtype: torch.dtype, path: Path) -> float:
    """The largest remainder of a classifier's books; the errors of its classes add up to zero."""
    torch.manual_seed(0)
    x = torch.randn(100, 12).to(dtype)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5)).to(dtype)
    labels = x @ torch.randn(12, 5).to(dtype)
    optimizer = getattr(packaged, name)(model.parameters(), **options)
    with dualform.record(model, optimizer, path) as recorder:
        for ids in torch.randint(0, 100, (40, 16)):
            recorder.samples(ids)
            nn.functional.cross_entropy(model(x[ids]), labels[ids].argmax(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return dualform.open(path).audit().remainder


@pytest.mark.parametrize(
    ("name", "default", "better"),
    [("Shampoo", {"lr": 0.1}, {"matrix_eps": 1e-2}), ("SOAP", {"lr": 0.03}, {"eps": 1e-3})],
)
def test_rounding_is_magnified_by_the_smallest_divisors(
    name: str, default: dict[str, Any], better: dict[str, Any], tmp_path: Path
) -> None:
    """With the package's own ε, what float32 rounds shows; with a larger one it does not."""
    usual = classified(name, default, torch.float32, tmp_path / "usual")
    assert 1e-6 < usual < 0.2
    assert classified(name, default, torch.float64, tmp_path / "double") < 1e-9
    assert classified(name, default | better, torch.float32, tmp_path / "better") < 2e-6


def symmetric(size: int) -> Tensor:
    root = torch.randn(size, size, dtype=torch.float64)
    return root + root.T


def operators(shape: tuple[int, ...]) -> list[Operator]:
    """Of both kinds, the second a sum over two bases."""
    bases = [
        tuple(torch.linalg.qr(symmetric(size))[0] if at else None for at, size in enumerate(shape))
        for _ in range(2)
    ]
    parts = [Turned.of(Q, torch.rand(shape, dtype=torch.float64)) for Q in bases]
    return [Modewise(tuple(map(symmetric, shape))) * -0.5, parts[0] * 2.0 + parts[1] + parts[0]]


@pytest.mark.parametrize("view", ["rows", "swapped", "flat"])
@pytest.mark.parametrize(
    ("shape", "groups"), [((4, 3), 1), ((4, 6, 2), 2), ((4, 2, 3), 1)], ids=str
)
def test_a_question_goes_through(view: str, shape: tuple[int, ...], groups: int) -> None:
    """`⟨D, H G⟩ = ⟨H D, G⟩` for units, rank-one questions and dense ones."""
    torch.manual_seed(0)
    sight, G = View(shape, view, groups), torch.randn(shape, dtype=torch.float64)
    seen = as_matrix(G, view, groups)
    height, width = seen.shape
    a, b = torch.randn(5, height).double(), torch.randn(5, width).double()
    units = torch.arange(5) % height
    for operator in operators(shape):
        after = as_matrix(apply(operator, G), view, groups)
        for question in (Functional(units, b), Functional(a, b), Functional(a, b).dense(height)):
            found = operator.asked(question, sight)
            torch.testing.assert_close(found.at(seen), question.at(after))
            whole_rank = isinstance(operator, Modewise) and view == "rows" and groups == 1
            assert isinstance(found, Functional) == (
                whole_rank and question.__class__ is Functional
            )


def test_what_has_faded_is_left_out() -> None:
    old, new = (Turned.of((torch.eye(2),), torch.ones(2)) for _ in range(2))
    for faded, count in ((2 * FADED, 2), (FADED / 2, 1)):
        found = new + old * faded
        assert isinstance(found, Turned)
        assert len(found.parts) == count
    assert torch.equal(apply(new + old * (FADED / 2), torch.ones(2)), torch.ones(2))
