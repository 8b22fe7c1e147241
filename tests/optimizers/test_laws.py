"""Every rule against the optimizer it describes: forward step by step, and summed going back."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.optimizers.replaying import errors, gradients, train
from torch import Tensor
from torch.optim import Optimizer

from dualform.optimizers import rule_for
from dualform.optimizers.rule import StateRule
from dualform.optimizers.steps import Hyper, walk_back
from dualform.read.moves import Moment, Move, moves

DECOUPLED = {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}
FUSED, FOREACH = {"fused": True}, {"foreach": True}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adam": [
        {},
        {"weight_decay": 0.1, "eps": 1e-3},
        {"amsgrad": True, "betas": (0.5, 0.7)},
        {"amsgrad": True, "weight_decay": 0.1, "maximize": True},
        {"lr": torch.tensor(0.01).double(), "betas": tuple(torch.tensor([0.5, 0.9]).double())},
        {"betas": (0.0, 0.0)},
        DECOUPLED,
        DECOUPLED | FOREACH,
        DECOUPLED | FUSED | {"amsgrad": True},
    ],
    "AdamW": [{}, {"amsgrad": True, "weight_decay": 0.5}, FOREACH | {"maximize": True}, FUSED],
    "NAdam": [{}, {"weight_decay": 0.1, "momentum_decay": 0.1}, DECOUPLED, FOREACH],
    "RAdam": [{}, {"weight_decay": 0.1, "betas": (0.8, 0.5)}, DECOUPLED, DECOUPLED | FOREACH],
    "Adamax": [{}, {"weight_decay": 0.1, "maximize": True, "betas": (0.5, 0.5)}, FOREACH],
    "RMSprop": [
        {},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"centered": True},
        {"centered": True, "momentum": 0.5, "weight_decay": 0.1, "maximize": True},
        {"centered": True, "momentum": 0.5, "alpha": 0.5, "foreach": True},
    ],
    "Adagrad": [
        {},
        {"lr_decay": 0.1, "initial_accumulator_value": 0.5, "weight_decay": 0.1, "maximize": True},
        FUSED | {"lr_decay": 0.1},
        FOREACH,
    ],
    "Adadelta": [{}, {"weight_decay": 0.1, "maximize": True, "rho": 0.5, "eps": 1e-2}, FOREACH],
    "Adafactor": [
        {},
        {"weight_decay": 0.1, "maximize": True},
        {"d": 1.5, "eps": (1e-3, 10.0), "beta2_decay": -0.5, "lr": 1.0},
        FOREACH,
    ],
    "ASGD": [{}, {"lambd": 0.1, "alpha": 0.5, "weight_decay": 0.1, "maximize": True}],
    "Rprop": [{}, {"maximize": True, "etas": (0.3, 1.5), "step_sizes": (1e-3, 0.02)}, FOREACH],
    "lion_pytorch.Lion": [
        {"lr": 0.01},
        {"lr": 0.01, "weight_decay": 0.1, "betas": (0.5, 0.7)},
        {"lr": 0.01, "weight_decay": 0.001, "decoupled_weight_decay": True},
    ],
    "lion_pytorch.foreach.Lion": [{"lr": 0.01, "weight_decay": 0.1}],
}
CASES = [(name, options) for name, sets in OPTIONS.items() for options in sets]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}


def make(name: str, options: dict[str, Any], parameters: Sequence[Tensor]) -> Optimizer:
    """An optimizer of torch, or of a module that is asked for by name."""
    path, _, kind = name.rpartition(".")
    module = pytest.importorskip(path) if path else torch.optim
    own = {k: v.clone() if isinstance(v, Tensor) else v for k, v in options.items()}
    found: Optimizer = getattr(module, kind)(parameters, **own)
    return found


def worst(name: str, options: dict[str, Any], kind: str, dtype: torch.dtype) -> float:
    """The largest error over shapes, and over starting from scratch or after some steps."""
    torch.manual_seed(0)
    rule = rule_for(make(name, options, [torch.zeros(1)]))
    assert isinstance(rule, StateRule)
    found = []
    for shape in ((4, 5), (6,), (2, 2, 3, 2)) if name == "Adafactor" else ((4, 5), (6,)):
        given = gradients(kind, 12, shape)
        training = train(rule, lambda p: make(name, options, p), given, dtype)
        found += [error for start in (0, 3) for error in errors(rule, training, start)]
    return max(found)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", ["plain", "gaps", "any size"])
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_replay_is_what_happened(
    name: str, options: dict[str, Any], kind: str, dtype: torch.dtype
) -> None:
    assert worst(name, options, kind, dtype) <= TOLERANCE[dtype]


@pytest.mark.parametrize("kind", ["plain", "gaps", "any size"])
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_many_steps_at_once_are_the_steps(name: str, options: dict[str, Any], kind: str) -> None:
    """Their end, what is carried through them, and the coefficients of their gradients."""
    torch.manual_seed(0)
    rule = rule_for(make(name, options, [torch.zeros(1)]))
    assert isinstance(rule, StateRule)
    given = gradients(kind, 12, (4, 5))
    training = train(rule, lambda p: make(name, options, p), given)
    for start in (0, 3):
        state = dict(training.memory[start])
        b = state.pop(rule.buffer, torch.zeros(4, 5).double())
        at = Moment(training.W[start], b, state)
        work = (rule, training.hyper[start:], given[start:], at)
        found = list(moves(*work))
        plain = rule.stretch(training.hyper[start:], state, given[start:]) is None
        asks_for_W = options.get("weight_decay") and not options.get("decoupled_weight_decay")
        able = name == "AdamW" or (name == "Adam" and not asks_for_W)
        assert plain == (not able or "amsgrad" in options), "which rules can do it"
        if plain:
            assert [move.steps for move in found] == [1] * (12 - start)
            continue
        (move,) = found
        ((W, b, after), one_by_one) = move.after, _one_by_one(*work)
        last, steps = one_by_one[-1].after, [other.step for other in one_by_one]
        assert torch.allclose(W, last.W, rtol=1e-12, atol=1e-13)
        for part in ("step", "exp_avg_sq"):
            assert torch.allclose(after[part], last.state[part], rtol=1e-13, atol=0)
        shares = [*[0.0] * (len(steps) - 1), 1.0]
        coefficients, ends = walk_back(steps, (0.0, 0.5), shares)
        at_once, ended = walk_back([move.step], (0.0, 0.5), [1.0])
        pairs = [*zip(at_once, coefficients, strict=True), *zip(ended, ends, strict=True)]
        for pair in pairs:
            one, other = (torch.as_tensor(part, dtype=torch.float64) for part in pair)
            assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)


def _one_by_one(
    rule: StateRule, hypers: Sequence[Hyper], gradients: Tensor, at: Moment
) -> list[Move]:
    found: list[Move] = []
    for hyper, gradient in zip(hypers, gradients, strict=True):
        (move,) = moves(rule, [hyper], gradient[None], found[-1].after if found else at)
        found.append(move)
    return found


@pytest.mark.parametrize("name", ["Adam", "NAdam", "RAdam", "Adamax"])
@pytest.mark.parametrize("foreach", [False, True])
def test_capturable_counts_in_float32(
    name: str, foreach: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where 1 - β2^t is off by 1e-5 of itself, so is the step, and the rule with it."""
    module = importlib.import_module(f"torch.optim.{name.lower()}")
    monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda **_: ["cpu"])
    options = {"lr": 0.1, "capturable": True, "foreach": foreach}
    assert worst(name, options, "plain", torch.float64) <= 1e-6


def test_fused_counts_in_float64() -> None:
    options = {"lr": 0.1, "capturable": True, "fused": True}
    assert worst("Adam", options, "plain", torch.float64) <= 1e-12


def test_differentiable_counts_in_float32() -> None:
    options = {"lr": 0.1, "differentiable": True}
    assert worst("Adam", options, "plain", torch.float64) <= 1e-7
    assert worst("NAdam", options, "plain", torch.float64) <= 1e-7


@pytest.mark.parametrize("name", ["ASGD", "NAdam"])
def test_numbers_are_kept_as_torch_keeps_them(name: str) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert worst(name, {"weight_decay": 0.1}, "plain", torch.float64) <= 1e-12
    finally:
        torch.set_default_dtype(torch.float32)


def test_foreach_averaging_rounds_its_length_once_more() -> None:
    assert worst("ASGD", {"foreach": True, "lambd": 0.1}, "plain", torch.float64) <= 1e-6


BETAS = st.one_of(st.just(0.0), st.floats(0.01, 0.9999))  # below, torch's 1 - (1 - β) is not β


@given(
    name=st.sampled_from(["Adam", "AdamW", "NAdam", "RAdam", "Adamax"]),
    lr=st.floats(1e-4, 1.0),
    betas=st.tuples(BETAS, BETAS),
    eps=st.floats(1e-12, 1.0),
    weight_decay=st.one_of(st.just(0.0), st.floats(0.0, 0.5)),
    maximize=st.booleans(),
    kind=st.sampled_from(["plain", "gaps", "any size"]),
)
@settings(max_examples=40, deadline=None)
def test_any_hyperparameters(name: str, kind: str, **options: Any) -> None:
    assert worst(name, options, kind, torch.float64) <= 1e-9


@given(
    alpha=st.floats(0.05, 0.999),
    momentum=st.one_of(st.just(0.0), st.floats(0.0, 0.99)),
    eps=st.floats(1e-9, 1.0),
    weight_decay=st.floats(0.0, 0.5),
    centered=st.booleans(),
    maximize=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_any_hyperparameters_of_rmsprop(**options: Any) -> None:
    assert worst("RMSprop", options, "plain", torch.float64) <= 1e-9
