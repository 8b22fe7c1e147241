"""Every optimizer rule, under its contract, and SGD over the whole of its hyper-parameters."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import dualform
from dualform.optimizers import BY_ROW, History, Rule
from dualform.optimizers.sgd import SGDRule
from dualform.testing import Loop, RuleContract, train
from dualform.testing.layers import TOLERANCE
from dualform.testing.optimizers import LOOPS

VARIANTS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.3},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "decay": {"weight_decay": 0.1},
    "maximize": {"momentum": 0.5, "maximize": True, "weight_decay": 0.1},
    "decay and momentum": {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.5},
    "decay and nesterov": {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    "one by one": {"momentum": 0.9, "foreach": False},
    "fused": {"momentum": 0.9, "fused": True, "weight_decay": 0.1},
}


@pytest.mark.parametrize("variant", VARIANTS)
class TestSGD(RuleContract):
    """The contract's loops × every variant: the grid of the specification."""

    @pytest.fixture(autouse=True)
    def _variant(self, variant: str) -> None:
        self.options = VARIANTS[variant]

    def rule(self) -> Rule:
        return SGDRule()

    def make(self, parameters: Iterable[Tensor]) -> Optimizer:
        return SGD(parameters, lr=0.1, **self.options)


@given(
    momentum=st.one_of(st.just(0.0), st.floats(0.0, 0.99)),
    dampening=st.floats(0.0, 1.0),
    weight_decay=st.one_of(st.just(0.0), st.floats(0.0, 0.5)),
    nesterov=st.booleans(),
    maximize=st.booleans(),
    lr=st.floats(0.01, 0.1),  # smaller ones change weights by less than float64 resolves to 1e-12
    loop=st.sampled_from(list(LOOPS.values())),
)
@settings(max_examples=40, deadline=None)
def test_any_hyperparameters_balance(
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    lr: float,
    loop: Loop,
) -> None:
    nesterov = nesterov and momentum > 0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = SGD(
        model.parameters(),
        lr,
        momentum,
        0.0 if nesterov else dampening,
        weight_decay,
        nesterov,
        maximize=maximize,
    )
    with TemporaryDirectory() as folder:
        inputs, targets = torch.randn(10, 6).double(), torch.randn(10, 3).double()
        train(model, optimizer, inputs, targets, loop, Path(folder) / "run")
        audit = dualform.open(Path(folder) / "run").audit()
    assert audit.remainder <= TOLERANCE[torch.float64], audit


@pytest.mark.parametrize("options", list(itertools.product((0.0, 0.9), (0.0, 0.3), (0.0, 0.1))))
def test_rule_equals_the_optimizer(options: tuple[float, ...]) -> None:
    """`W_T = c0 W_0 + Σ a_t g_t` against torch's own step on given gradients, in float64."""
    momentum, dampening, weight_decay = options
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 2, dtype=torch.float64))
    start, gradients = weight.detach().clone(), torch.randn(9, 3, 2, dtype=torch.float64)
    optimizer = SGD([weight], 0.1, momentum, dampening, weight_decay)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    rule = SGDRule()
    hyper = torch.tensor([rule.hyper(optimizer.param_groups[0])] * 9).double().numpy()
    states = torch.full((9,), BY_ROW, dtype=torch.uint8).numpy()
    coefficients = rule.coefficients(History(states, hyper, SGDRule.fields, {0: False}))
    sums = torch.einsum("t,tij->ij", torch.from_numpy(coefficients.steps), gradients)
    assert torch.allclose(coefficients.initial * start + sums, weight, rtol=0, atol=1e-6)


def test_constant_momentum_has_its_closed_form() -> None:
    """`a_s = -η (1 - μ^(T-s+1)) / (1 - μ)` without decay and at constant η."""
    eta, mu, steps = 0.1, 0.9, 20
    hyper = torch.tensor([[eta, mu, 0, 0, 0, 0]] * steps, dtype=torch.float64).numpy()
    states = torch.full((steps,), BY_ROW, dtype=torch.uint8).numpy()
    found = SGDRule().coefficients(History(states, hyper, SGDRule.fields, {0: False}))
    ages = torch.arange(steps, 0, -1).double()
    expected = -eta * (1 - mu**ages) / (1 - mu)
    assert abs(found.steps - expected.numpy()).max() < 1e-15
    assert found.initial == 1.0
