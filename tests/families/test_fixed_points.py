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
            z = unrolled(step, start, 600)
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


def trained(layer: EquilibriumAttention, steps: int) -> list[float]:
    """The losses of a small classifier with this layer inside, whose patterns grow."""
    network = torch.nn.Sequential(torch.nn.Linear(10, 16), layer, torch.nn.Linear(16, 3))
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    x = torch.randn(256, 10)
    y = (2 * x[:, :3] + x[:, 3:6]).argmax(1)
    losses = []
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(network(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("seed", "steps"),
    [(0, 60), *(pytest.param(seed, 400, marks=pytest.mark.long) for seed in (0, 1, 2))],
)
def test_an_equilibrium_contracts_however_long_it_is_trained(seed: int, steps: int) -> None:
    torch.manual_seed(seed)
    layer = EquilibriumAttention(16, 32)
    losses = trained(layer, steps)
    assert losses[-1] < 0.15 < losses[0]
    assert (
        float(layer.decay * layer._square_radius().detach()) > 1
    )  # it would not, at temperature 1
    assert layer.bound() <= 0.9 + 1e-6


@given(seed=seeds, scale=st.sampled_from([0.1, 1.0, 30.0]), decay=st.sampled_from([0.2, 0.9]))
@law
def test_the_bound_of_an_equilibrium_bounds_its_jacobian(
    seed: int, scale: float, decay: float
) -> None:
    torch.manual_seed(seed)
    layer = EquilibriumAttention(4, 6, decay=decay).double()
    layer.patterns.data.mul_(scale)
    x = scale * randn(5, 4, seed=seed)
    assert (lipschitz(lambda z: layer._cell(z, x), layer(x)) <= layer.bound() + 1e-9).all()
    assert layer.bound() <= 0.9 + 1e-12


def test_without_a_fixed_point_the_output_is_further_steps_and_a_warning_says_so() -> None:
    w = torch.tensor(3.0, dtype=F64, requires_grad=True)
    x = randn(5, 3)
    layer = Equilibrium(lambda z, x: torch.sin(w * z + x), steps=20, fallback=2)
    with pytest.warns(
        UserWarning, match=r"^no fixed point was reached: FixedPoint\(not .*; contract"
    ):
        z = layer(x)
    start = solve(lambda z: torch.sin(w * z + x), torch.zeros_like(x), steps=20).x
    expected = unrolled(lambda z: torch.sin(w * z + x), start, 2)
    near(z, expected)
    near(torch.autograd.grad(z.sum(), w)[0], torch.autograd.grad(expected.sum(), w)[0])
    with pytest.raises(FamilyError, match=r"^no fixed point was reached"):
        Equilibrium(lambda z, x: torch.sin(w * z + x), steps=20)(x)
    layer = Equilibrium(lambda z, x: torch.tanh(w * z / 9 + x), fallback=2)
    near(layer(x), Equilibrium(layer.cell)(x), 1e-6)  # where there is one, it is found


def test_a_warm_start_saves_steps_and_changes_nothing_else() -> None:
    calls = []

    def cell(z: Tensor, x: Tensor) -> Tensor:
        calls.append(z)
        return torch.tanh(0.9 * z.flip(-1) + x)

    x, layer = randn(5, 3), Equilibrium(cell, tolerance=1e-10)
    cold = layer(x)
    many = len(calls)
    calls.clear()
    near(layer(x + 1e-6, start=cold), layer(x + 1e-6), 1e-8)
    calls.clear()
    layer(x + 1e-6, start=cold)
    assert len(calls) < many
    attention = EquilibriumAttention(3, 5).double()
    near(attention(x, start=attention(x)), attention(x), 1e-5)


def test_the_penalty_estimates_the_jacobian_and_shrinks_it() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(3, 3).double()
    layer = Equilibrium(lambda z, x: torch.tanh(linear(z) + x), fallback=0)
    x = randn(4, 3)
    z = layer(x)
    jacobians = torch.stack([torch.func.jacrev(lambda z, x=x: layer.cell(z, x))(z.detach())])
    exact = jacobians.square().sum().detach() / 4
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([layer.penalty(x, z, generator).detach() for _ in range(400)])
    assert abs(draws.mean() - exact) <= 5 * draws.std() / 20
    with torch.no_grad():
        assert not layer.penalty(x, layer(x)).requires_grad
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    for _ in range(30):
        optimizer.zero_grad()
        layer.penalty(x, layer(x), generator).backward()
        optimizer.step()
    assert layer.penalty(x, layer(x), generator).detach() < exact / 2


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
    "contraction": (
        lambda: EquilibriumAttention(2, 2, contraction=1.0),
        "contraction=1.0 bounds no contraction; it must lie between 0 and 1, or be None for none.",
    ),
    "fallback": (
        lambda: Equilibrium(lambda z, x: z, fallback=-1),
        "fallback=-1 is no number of steps; give 1 or more, or 0 to raise where no fixed point is "
        "reached.",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    act, message = WRONG[case]
    with pytest.raises(FamilyError) as caught:
        act()
    assert str(caught.value) == message
