"""Derivatives of fixed points, of every order, equal those of the unrolled iteration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import dualform
from dualform.errors import FamilyError
from dualform.families import Empirical, LogNormalizer
from dualform.families.fixed_points import (
    AttentionStep,
    Decay,
    Equilibrium,
    Normalize,
    Project,
    implicit,
)

F64 = torch.float64
Solve = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def solved(step: Callable[[Tensor], Tensor], x: Tensor, symmetric: bool = False) -> Tensor:
    return implicit(step, x, tolerance=1e-13, steps=4000, symmetric=symmetric)


def unrolled(step: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    for _ in range(150):
        x = step(x)
    return x


def by_hand(solve: Solve, A: Tensor, b: Tensor) -> Tensor:
    """Rows that do not see each other, and a Jacobian that is not symmetric."""
    return solve(lambda z: torch.tanh(z @ A / 4 + b), torch.zeros(2, 3, dtype=F64))


def upstream(solve: Solve, A: Tensor, b: Tensor) -> Tensor:
    """What the step uses depends on something else that it uses."""
    c = torch.sin(b @ A)
    return solve(lambda z: torch.tanh(z @ A / 4 + c) + b / 9, torch.zeros(2, 3, dtype=F64))


def listed(solve: Solve, A: Tensor, b: Tensor) -> Tensor:
    """Tensors in a list, by keyword, and one that is used twice."""

    def step(z: Tensor) -> Tensor:
        both = torch.stack([z @ A / 5, b], dim=0)
        return torch.add(both.sum(0).sin() / 2, other=b * b.mean(), alpha=0.1)

    return solve(step, torch.zeros(2, 3, dtype=F64))


def attention(contraction: Any, symmetric: bool = False) -> Callable[[Solve, Tensor, Tensor], Any]:
    def point(solve: Solve, A: Tensor, b: Tensor) -> Tensor:
        step = AttentionStep(LogNormalizer(Empirical(A), 3.0), contraction)
        options = {"symmetric": True} if symmetric and solve is solved else {}
        return solve(step, contraction(randn(2, 3, seed=3)), **options) + b**3

    return point


POINTS: dict[str, Callable[[Solve, Tensor, Tensor], Tensor]] = {
    "by hand": by_hand,
    "upstream": upstream,
    "listed": listed,
    "decay": attention(Decay(0.4)),
    "decay, symmetric": attention(Decay(0.4), symmetric=True),
    "sphere": attention(Project(1.5)),
    "layer norm": attention(Normalize()),
}
each = pytest.mark.parametrize("name", POINTS)


@each
def test_first_and_second_derivatives_are_those_of_differences(name: str) -> None:
    A, b = randn(3, 3).requires_grad_(), randn(2, 3, seed=1).requires_grad_()

    def point(A: Tensor, b: Tensor) -> Tensor:
        return POINTS[name](solved, A, b)

    assert gradcheck(point, (A, b), atol=1e-6, fast_mode=True)
    assert gradgradcheck(point, (A, b), atol=1e-5, fast_mode=True)


@each
def test_two_derivatives_are_those_of_the_unrolled_iteration(name: str) -> None:
    found = []
    for solve in (solved, unrolled):
        A, b = randn(3, 3, seed=7).div(2).requires_grad_(), randn(2, 3, seed=1).requires_grad_()
        y = (POINTS[name](solve, A, b) * randn(2, 3, seed=5)).sum()
        first = torch.autograd.grad(y, (A, b), create_graph=True)
        mixed = (first[0] * A.detach().cos()).sum() + first[1].sin().sum()
        found.append([y, *first, *torch.autograd.grad(mixed, (A, b))])
    for by_solving, by_unrolling in zip(*found, strict=True):
        torch.testing.assert_close(by_solving, by_unrolling, rtol=1e-7, atol=1e-7)


def test_a_third_derivative_too() -> None:
    """tanh(w z + b), a number."""
    found = []
    for solve in (solved, unrolled):
        w = torch.tensor(0.5, dtype=F64, requires_grad=True)
        b = torch.tensor(0.3, dtype=F64, requires_grad=True)
        y = solve(lambda z, w=w, b=b: torch.tanh(w * z + b), torch.zeros(1, 1, dtype=F64)).sum()
        found.append([y.item()])
        for variable in (b, w, b):
            (y,) = torch.autograd.grad(y, variable, create_graph=True)
            found[-1].append(y.item())
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_a_cell_is_differentiated_twice_in_its_parameters_and_its_input() -> None:
    torch.manual_seed(0)
    cell = torch.nn.Linear(3, 3).double()
    layer = Equilibrium(lambda z, x: torch.tanh(0.4 * cell(z) + x), tolerance=1e-13)

    def output(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        given = {"weight": weight, "bias": bias}
        step = Equilibrium(
            lambda z, x: torch.tanh(0.4 * torch.func.functional_call(cell, given, (z,)) + x),
            tolerance=1e-13,
        )
        return step(x)

    x = randn(2, 3).requires_grad_()
    assert torch.equal(layer(x), output(x, *cell.parameters()))
    assert gradgradcheck(output, (x, *cell.parameters()), atol=1e-5, fast_mode=True)


def test_a_first_derivative_costs_one_solve() -> None:
    """z, which moves with θ, is not asked again where nothing is left for it."""
    calls = []
    w = torch.tensor(0.5, dtype=F64, requires_grad=True)

    def step(z: Tensor) -> Tensor:
        calls.append(z)
        return torch.tanh(w * z + 1)

    z = implicit(step, torch.zeros(1, 1, dtype=F64))
    calls.clear()
    z.sum().backward()
    assert len(calls) == 1


def test_a_cell_is_recorded_by_row(tmp_path: Path) -> None:
    """The output is one real step, so its rows are the gradient, as in any other layer."""
    torch.manual_seed(0)
    cell = torch.nn.Linear(4, 4)
    layer = Equilibrium(lambda z, x: torch.tanh(0.3 * cell(z) + x))
    layer.linear = cell
    model = torch.nn.Sequential(layer, torch.nn.Linear(4, 2))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 4)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(4):
            recorder.samples(range(8))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert "100% of trained parameters by row" in str(dualform.open(tmp_path / "run").audit())


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, w: Tensor) -> Tensor:
        return z / 2 + w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        return g / 2, g


def test_a_second_derivative_that_cannot_be_known_is_refused() -> None:
    w = torch.ones(1, 2, dtype=F64, requires_grad=True)
    z = implicit(lambda z: Half.apply(z, w), torch.zeros(1, 2, dtype=F64))
    (gradient,) = torch.autograd.grad(z.sum(), w, retain_graph=True)
    torch.testing.assert_close(gradient, torch.full((1, 2), 2.0, dtype=F64))
    with pytest.raises(FamilyError, match=r"^a second derivative of this fixed point is not known"):
        torch.autograd.grad(z.sum(), w, create_graph=True)
    seen = implicit(lambda z: Half.apply(z, w.view_as(w)), torch.zeros(1, 2, dtype=F64))
    (gradient,) = torch.autograd.grad((seen**2).sum(), w, create_graph=True)
    assert torch.autograd.grad(gradient.sum(), w)[0].tolist() == [
        pytest.approx([8.0, 8.0])
    ]  # (2w)²


def test_a_step_that_does_not_move_with_its_state() -> None:
    w = torch.ones(1, 2, dtype=F64, requires_grad=True)
    z = implicit(lambda z: w.exp(), torch.zeros(1, 2, dtype=F64))
    (gradient,) = torch.autograd.grad(z.sum(), w, create_graph=True)
    assert torch.equal(gradient, w.exp())
    assert torch.equal(torch.autograd.grad(gradient.sum(), w)[0], w.exp())
