"""Fixed points: found, certified, and differentiated as if they had been unrolled."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualform.errors import FamilyError
from dualform.families import Empirical, Gaussian, LogNormalizer
from dualform.families.fixed_points import (
    AttentionStep,
    Contraction,
    Decay,
    Equilibrium,
    EquilibriumAttention,
    Normalize,
    Project,
    basins,
    certify,
    conjugate_gradients,
    implicit,
    lipschitz,
    solve,
    stability,
)

law = settings(deadline=None, max_examples=8)
seeds = st.integers(0, 2**31)
F64 = torch.float64
CONTRACTIONS = [Decay(0.5), Decay(0.9), Project(1.5), Normalize()]
each = pytest.mark.parametrize("contraction", CONTRACTIONS, ids=str)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def near(actual: Tensor, expected: Tensor, tolerance: float = 1e-8) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def step_of(
    contraction: Contraction, seed: int = 0, T: float = 1.0, residual: bool = True
) -> AttentionStep:
    G = LogNormalizer(Empirical(randn(7, 4, seed=seed)), T)
    return AttentionStep(G, contraction, residual)


# --- energies ---------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("residual", [True, False])
@given(seed=seeds, T=st.sampled_from([0.1, 1.0, 5.0]))
@law
def test_no_step_raises_the_energy(
    contraction: Contraction, residual: bool, seed: int, T: float
) -> None:
    step = step_of(contraction, seed, T, residual)
    start = contraction(3 * randn(5, 4, seed=seed + 1))
    assert certify(step, start, steps=20).descends


@each
def test_steps_come_to_rest_where_they_say(contraction: Contraction) -> None:
    step = step_of(contraction)
    start = contraction(randn(5, 4, seed=3))
    found = solve(step, start, method="plain", tolerance=1e-10, steps=3000)
    assert found.converged
    near(step(found.x), found.x, 1e-9)
    assert found.residuals[-1] <= 1e-10


def test_without_a_contraction_steps_run_away() -> None:
    """Once the query leads outward, every step adds the same vertex again."""
    step = step_of(Decay(1.0), T=0.1)
    x = randn(5, 4, seed=3)
    sizes = []
    for _ in range(30):
        x = step(x)
        sizes.append(float(x.norm(dim=-1).min()))
    assert all(b > a for a, b in pairwise(sizes[5:]))
    assert sizes[-1] > 10


def test_gaussian_steps_in_closed_form() -> None:
    """x ← λ(x + m + Σx) rests at λ(I − λ(I + Σ))⁻¹ m."""
    Sigma, m = torch.diag(torch.tensor([0.1, 0.4], dtype=F64)), torch.tensor([1.0, 2.0]).double()
    step = AttentionStep(LogNormalizer(Gaussian(m, Sigma)), Decay(0.5))
    eye = torch.eye(2, dtype=F64)
    expected = torch.linalg.solve(eye - 0.5 * (eye + Sigma), 0.5 * m)
    near(solve(step, torch.zeros(1, 2, dtype=F64), tolerance=1e-12).x[0], expected)


# --- solvers ----------------------------------------------------------------------------------


@given(seed=seeds)
@law
def test_anderson_finds_what_plain_iteration_finds_in_fewer_steps(seed: int) -> None:
    A, b = randn(6, 6, seed=seed), randn(3, 6, seed=seed + 1)
    A = 0.95 * (A + A.T) / (A + A.T).norm(2)

    def step(x: Tensor) -> Tensor:
        return x @ A + b

    exact = torch.linalg.solve(torch.eye(6, dtype=F64) - A, b.T).T
    anderson = solve(step, torch.zeros_like(b), tolerance=1e-9, memory=8)
    plain = solve(step, torch.zeros_like(b), tolerance=1e-9, method="plain", steps=2000)
    near(anderson.x, exact, 1e-6)
    near(plain.x, exact, 1e-6)
    assert anderson.steps <= plain.steps


def test_anderson_arrives_among_several_fixed_points_too() -> None:
    """Without its leash it wanders here for thousands of steps."""
    points, start = randn(64, 32, seed=1) / 32**0.5, randn(128, 32, seed=2)
    step = AttentionStep(LogNormalizer(Empirical(points), 0.2), Decay(0.9), residual=False)
    found = solve(lambda x: 0.1 * start + step(x), start)
    assert found.converged
    near(0.1 * start + step(found.x), found.x, 1e-5)


def test_states_are_solved_as_if_alone() -> None:
    step, start = step_of(Decay(0.5)), randn(6, 4, seed=2)
    together = solve(step, start, tolerance=1e-11)
    alone = [solve(step, one[None], tolerance=1e-11).x[0] for one in start]
    near(together.x, torch.stack(alone), 1e-9)


def test_tokens_that_see_each_other_are_one_state() -> None:
    def step(x: Tensor) -> Tensor:
        return 0.5 * torch.tanh(x.flip(-2)) + 0.1

    found = solve(step, randn(2, 3, 4), dims=2, tolerance=1e-10)
    near(step(found.x), found.x, 1e-9)


@given(seed=seeds, n=st.integers(1, 8))
@law
def test_conjugate_gradients_solve(seed: int, n: int) -> None:
    root, b = randn(n, n, seed=seed), randn(3, n, seed=seed + 1)
    A = root @ root.T + torch.eye(n, dtype=F64)
    x = conjugate_gradients(lambda u: u @ A, b, tolerance=1e-13, steps=200)
    near(x, torch.linalg.solve(A, b.T).T)


# --- implicit gradients -----------------------------------------------------------------------


def unrolled(step: Callable[[Tensor], Tensor], x: Tensor, steps: int = 400) -> Tensor:
    for _ in range(steps):
        x = step(x)
    return x


@pytest.mark.parametrize("contraction", [Decay(0.4), Project(1.5), Normalize()], ids=str)
@pytest.mark.parametrize("T", [1.0, 3.0])
def test_implicit_gradients_equal_unrolled_ones(contraction: Contraction, T: float) -> None:
    gradients = []
    for solver in ("implicit", "unrolled"):
        points = randn(7, 4).requires_grad_()
        scale = torch.tensor(T, dtype=F64, requires_grad=True)
        step = AttentionStep(LogNormalizer(Empirical(points), scale), contraction)
        start = contraction(randn(3, 4, seed=3))
        if solver == "implicit":
            z = implicit(step, start, symmetric=step.symmetric, tolerance=1e-11, steps=4000)
        else:
            z = unrolled(step, start, 2000)
        loss = (z * randn(3, 4, seed=5)).sum() + z.sin().sum()
        gradients.append((z.detach(), *torch.autograd.grad(loss, (points, scale))))
    for by_solving, by_unrolling in zip(*gradients, strict=True):
        near(by_solving, by_unrolling, 1e-6)


def test_symmetric_and_general_solves_agree() -> None:
    points = randn(7, 4).requires_grad_()
    step = AttentionStep(LogNormalizer(Empirical(points)), Decay(0.4))
    both = [
        torch.autograd.grad(
            implicit(step, randn(3, 4), symmetric=symmetric, tolerance=1e-12).sum(), points
        )[0]
        for symmetric in (True, False)
    ]
    near(*both)


def test_a_gradient_that_is_not_reached_is_an_error() -> None:
    """J = [[0, 3], [0, 0]] contracts in two steps, but it is not symmetric."""
    A = torch.tensor([[0.0, 0.0], [3.0, 0.0]], dtype=F64, requires_grad=True)
    right, wrong = (
        implicit(lambda x: x @ A + 1, randn(1, 2), symmetric=symmetric)
        for symmetric in (False, True)
    )
    (gradient,) = torch.autograd.grad(right.sum(), A)
    x = torch.linalg.solve(torch.eye(2).double() - A.T, torch.ones(2).double())
    near(gradient, torch.autograd.grad(x.sum(), A)[0], 1e-6)
    with pytest.raises(FamilyError, match=r"^the gradient of a fixed point was not reached: a "):
        wrong.sum().backward()


def test_an_equilibrium_trains_as_the_unrolled_network_does() -> None:
    torch.manual_seed(0)
    layer = EquilibriumAttention(4, 6, decay=0.4, temperature=2.0).double()
    layer.equilibrium.tolerance = 1e-12
    assert layer.bound() < 1
    x, target = randn(8, 4), randn(8, 4, seed=1)
    by_solving = torch.autograd.grad((layer(x) - target).square().sum(), layer.patterns)[0]
    z = unrolled(lambda z: x + layer.decay * layer.G.mean(z), torch.zeros_like(x))
    by_unrolling = torch.autograd.grad((z - target).square().sum(), layer.patterns)[0]
    near(by_solving, by_unrolling)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_an_equilibrium_of_any_cell() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(3, 3).double()
    layer = Equilibrium(lambda z, x: torch.tanh(0.5 * linear(z) + x), tolerance=1e-12)
    x = randn(5, 3).requires_grad_()
    by_solving = torch.autograd.grad(layer(x).sum(), (x, linear.weight))
    z = unrolled(lambda z: torch.tanh(0.5 * linear(z) + x), torch.zeros_like(x))
    for a, b in zip(by_solving, torch.autograd.grad(z.sum(), (x, linear.weight)), strict=True):
        near(a, b)
    with torch.no_grad():
        assert not layer(x).requires_grad


# --- certificates -----------------------------------------------------------------------------


def test_lipschitz_is_the_norm_of_the_jacobian() -> None:
    for contraction in CONTRACTIONS:
        step, x = step_of(contraction), randn(3, 4, seed=1)
        jacobians = torch.stack([torch.func.jacrev(step)(one) for one in x])
        near(lipschitz(step, x, 300), torch.linalg.matrix_norm(jacobians, 2), 1e-4)


def test_lipschitz_starts_in_no_special_direction() -> None:
    """J here has no part along (1, 1), nor along x = (1, 1)."""
    A = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=F64)
    near(lipschitz(lambda x: x @ A, torch.ones(1, 2, dtype=F64)), torch.full((1,), 2.0).double())


def test_certificates_tell_contractions_from_others() -> None:
    start = randn(5, 4)
    good = certify(step_of(Decay(0.3), T=3.0), start, steps=60)
    assert good.contracts
    assert "energy never rose" in repr(good)
    assert "contracts by" in repr(good)
    bad = certify(step_of(Decay(1.0), T=0.1), start, steps=3)
    assert not bad.contracts
    assert "‖J‖ up to" in repr(bad)


def test_stability_is_read_from_the_covariance() -> None:
    """Two patterns at ±1: the middle loses its stability at T = 1, where the variance is 1."""
    points = torch.tensor([[-1.0], [1.0]], dtype=F64)
    for T, stable in ((1.2, True), (0.8, False)):
        G = LogNormalizer(Empirical(points), T)
        middle = stability(G, torch.zeros(1, dtype=F64))
        near(middle, torch.tensor(1 / T, dtype=F64))
        found = basins(
            AttentionStep(G, Decay(1.0), residual=False),
            torch.linspace(-1, 1, 8, dtype=F64).unsqueeze(-1),
        )
        assert found.converged
        assert (len(found.limits) == 1) == stable


def test_basins_of_separated_patterns_are_the_patterns() -> None:
    points = torch.eye(3, dtype=F64)
    step = AttentionStep(LogNormalizer(Empirical(points), 0.05), Decay(1.0), residual=False)
    found = basins(step, points.repeat_interleave(4, 0) + 0.1 * randn(12, 3))
    near(found.limits.sort(0).values, points.sort(0).values, 1e-5)
    near(found.shares, torch.full((3,), 1 / 3))
    assert repr(found) == "Basins(3 limits; shares 0.33, 0.33, 0.33)"


def test_basins_that_were_not_reached_say_so() -> None:
    found = basins(lambda x: x + 1, torch.zeros(2, 1), steps=5)
    assert repr(found) == "Basins(1 places, not converged; shares 1.00)"


# --- words ------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "rate": (lambda: Decay(1.5), "rate=1.5 does not contract; it must lie in (0, 1]."),
    "method": (
        lambda: solve(lambda x: x, torch.ones(1, 1), method="broyden"),
        "method='broyden' is unknown; there are 'plain' and 'anderson'.",
    ),
    "steps": (
        lambda: solve(lambda x: x, torch.ones(1, 1), steps=0),
        "steps=0 leave nothing to be found; give 1 or more.",
    ),
    "divergence": (
        lambda: implicit(lambda x: 2 * x + 1, torch.ones(1, 1), method="plain", steps=5),
        "no fixed point was reached: FixedPoint(not converged, 5 steps, residual 3.2e+01). "
        "Contract more (a smaller decay, a larger temperature), allow more steps, or a larger "
        "tolerance.",
    ),
    "decay": (
        lambda: EquilibriumAttention(2, 2, decay=1.0),
        "decay=1.0 does not contract; it must lie between 0 and 1.",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    act, message = WRONG[case]
    with pytest.raises(FamilyError) as caught:
        act()
    assert str(caught.value) == message
