"""Every type of operator under its contract, and a new type that nothing else knows of."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.read.known_run import MAKE, Known, flat
from torch import Tensor
from torch.optim import Optimizer

from dualform import optimizers
from dualform.optimizers import (
    Elementwise,
    Modewise,
    Number,
    Operator,
    Rule,
    Sided,
    StateRule,
    Transition,
    Turned,
)
from dualform.optimizers.operators import Composed, Summed
from dualform.optimizers.operators import operator as base
from dualform.read.influence import OWN
from dualform.testing import OperatorContract, RuleContract
from dualform.testing.operators import dense


def wide(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def symmetric(size: int) -> Tensor:
    root = wide(size, size)
    return root + root.T


class TestNumber(OperatorContract):
    def make(self, shape: tuple[int, ...]) -> Operator:
        return Number(float(wide()))

    def twin(self, operator: Any, shape: tuple[int, ...]) -> Tensor:
        return operator.number * torch.eye(torch.Size(shape).numel()).double()


class TestElementwise(OperatorContract):
    def make(self, shape: tuple[int, ...]) -> Operator:
        return Elementwise(wide(*shape))

    def twin(self, operator: Any, shape: tuple[int, ...]) -> Tensor:
        return operator.numbers.flatten().diag()


@pytest.mark.parametrize("left", [True, False])
class TestSided(OperatorContract):
    shapes = ((4, 6), (6, 4))

    @pytest.fixture(autouse=True)
    def _left(self, left: bool) -> None:
        self.left = left

    def make(self, shape: tuple[int, ...]) -> Operator:
        size = shape[0 if self.left else 1]
        return Sided(wide(size, size), self.left)

    def twin(self, operator: Any, shape: tuple[int, ...]) -> Tensor:
        ones = [torch.eye(size).double() for size in shape]
        left, right = (operator.matrix, ones[1]) if operator.left else (ones[0], operator.matrix.T)
        return torch.kron(left.contiguous(), right.contiguous())


class TestModewise(OperatorContract):
    def make(self, shape: tuple[int, ...]) -> Operator:
        return Modewise(tuple(map(symmetric, shape)))

    def twin(self, operator: Any, shape: tuple[int, ...]) -> Tensor:
        return reduce(torch.kron, operator.matrices)


class TestTurned(OperatorContract):
    """Sums over three bases."""

    def make(self, shape: tuple[int, ...]) -> Operator:
        parts = []
        for _ in range(3):
            Q = tuple(torch.linalg.qr(wide(size, size))[0] for size in shape)
            parts.append(Turned.of((None, *Q[1:]) if len(shape) == 3 else Q, wide(*shape)))
        return parts[0] * 0.5 + (parts[1] + parts[2] * 0.3) * 0.7

    def twin(self, operator: Any, shape: tuple[int, ...]) -> Tensor:
        total = torch.zeros(torch.Size(shape).numel(), torch.Size(shape).numel()).double()
        for part in operator.parts:
            pairs = zip(part.Q, shape, strict=True)
            sides = [torch.eye(s).double() if q is None else q for q, s in pairs]
            Q = reduce(lambda a, b: torch.kron(a.contiguous(), b.contiguous()), sides)
            total += part.c * Q @ part.D.flatten().diag() @ Q.T
        return total


class TestComposed(OperatorContract):
    shapes = ((4, 6),)

    def make(self, shape: tuple[int, ...]) -> Operator:
        return Composed(wide(*shape), Sided(wide(shape[0], shape[0])))

    def twin(self, operator: Any, shape: tuple[int, ...]) -> Tensor:
        return dense(operator.last, shape) @ dense(operator.first, shape)


class TestSummed(TestComposed):
    def make(self, shape: tuple[int, ...]) -> Operator:
        return Summed(wide(*shape), Sided(wide(shape[0], shape[0])))

    def twin(self, operator: Any, shape: tuple[int, ...]) -> Tensor:
        return dense(operator.one, shape) + dense(operator.other, shape)


@pytest.mark.parametrize("make", [TestTurned, TestComposed])
def test_many_questions_are_asked_some_at_a_time(
    make: type[OperatorContract], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "DENSE", 1)
    monkeypatch.setattr("dualform.optimizers.operators.turned.KEPT", 1)
    make().test_answers()


class Rolled(Operator):
    """`G ↦ c P G`, where P moves the first dimension by some places: a type of this test alone."""

    def __init__(self, places: int, dims: int, number: float = 1.0) -> None:
        self.places, self.dims, self.number = places, dims, number

    def apply(self, dense: Tensor) -> Tensor:
        return self.number * dense.roll(self.places, -self.dims)

    @property
    def adjoint(self) -> Operator:
        return Rolled(-self.places, self.dims, self.number)

    def scaled(self, number: float) -> Operator:
        return Rolled(self.places, self.dims, self.number * number)


class TestRolled(OperatorContract):
    def make(self, shape: tuple[int, ...]) -> Operator:
        return Rolled(int(torch.randint(1, 4, ())), len(shape), float(wide()))

    def twin(self, operator: Any, shape: tuple[int, ...]) -> Tensor:
        P = torch.eye(shape[0]).double().roll(operator.places, 0)
        return operator.number * torch.kron(P, torch.eye(torch.Size(shape[1:]).numel()).double())


class Rolling(Optimizer):
    """`b ← μ b + g`, `W ← W − η P_t b`, where P_t moves rows by one place more at each step."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 0.2, "mu": 0.5, "places": 1})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                b = self.state[p].setdefault("velocity", torch.zeros_like(p))
                b.mul_(group["mu"]).add_(p.grad)
                p.sub_(group["lr"] * b.roll(group["places"], 0))
            group["places"] += 1


class RollingRule(StateRule):
    name, fields, buffer = "rolling", ("lr", "mu", "places"), "velocity"

    def describes(self, optimizer: Optimizer) -> bool:
        return type(optimizer) is Rolling

    def transition(self, hyper: Any, state: Any, W: Tensor, b: Tensor, gradient: Tensor) -> Any:
        P, mu = Rolled(int(hyper["places"]), W.ndim, -hyper["lr"]), hyper["mu"]
        return Transition(M=((1.0, P * mu), (0.0, mu)), n=(P, 1.0)), state


@pytest.fixture(autouse=True)
def _known_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "RULES", (RollingRule(), *optimizers.RULES))
    monkeypatch.setitem(MAKE, "rolling", Rolling)


class TestRolling(RuleContract):
    def rule(self) -> Rule:
        return RollingRule()

    def make(self, parameters: Iterable[Tensor]) -> Optimizer:
        return Rolling(parameters)


def by_hand(made: Known) -> Tensor:
    """(samples, parameters): what each sample's gradients became, step after step."""
    b, W = torch.zeros(10, 51).double(), torch.zeros(10, 51).double()
    parameters = sorted(made.model.named_parameters())
    for places, step in enumerate(made.steps, start=1):
        b = 0.5 * b
        for sample, layers in step.items():
            b[sample] += made.gradient(layers)
        parts = b.split([p.numel() for _, p in parameters], 1)
        shaped = [b.view(10, *p.shape) for b, (_, p) in zip(parts, parameters, strict=True)]
        W = W - 0.2 * torch.cat([b.roll(places, 1).flatten(1) for b in shaped], 1)
    return W


def test_every_read_works_on_a_new_type(tmp_path: Path) -> None:
    """Contributions are those of a plain loop, in every read, though nothing knows the type."""
    made = Known(tmp_path / "run", "rolling")
    run, C = made.run, by_hand(made)
    assert run.audit().coverage == 1.0
    assert run.audit().remainder <= 1e-12
    torch.testing.assert_close(made.contributions(), C, rtol=0, atol=1e-13)
    by_layer = made_parts(C)
    hidden = torch.tanh(made.model[0](made.x[:3])).detach()
    for layer, keys in (("0", made.x[:3]), ("2", hidden)):
        reading = run.spotlight(made.model, made.x[:3])[layer]
        units = reading.directions.argmax(1)
        weight, bias = by_layer[f"{layer}.weight"], by_layer[f"{layer}.bias"]
        expected = torch.einsum("iqk,qk->iq", weight[:, units], keys) + bias[:, units]
        values = torch.from_numpy(reading.samples().values)
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-12)
    explained = run.explain(made.model, made.x[:3], 1)
    directions = flat(explained.questions[0].directions, 1)
    account = C @ directions.T.double()
    assert abs(torch.from_numpy(explained.values) - account).max() <= 1e-6 * account.abs().max()
    accounting = C @ made.gradients().T
    found = torch.from_numpy(made.influence("accounting"))
    assert abs(found - accounting).max() <= 1e-5 * accounting.abs().max()
    ridge = torch.from_numpy(made.influence(damping=1e12))
    account = OWN * C @ made.directions().T
    assert abs(ridge - account).max() <= 1e-5 * account.abs().max()


def made_parts(C: Tensor) -> dict[str, Tensor]:
    """Contributions by parameter."""
    shapes = {"0.bias": (6,), "0.weight": (6, 4), "2.bias": (3,), "2.weight": (3, 6)}
    parts = C.split([torch.Size(shape).numel() for shape in shapes.values()], 1)
    return {n: p.view(10, *shapes[n]) for n, p in zip(shapes, parts, strict=True)}
