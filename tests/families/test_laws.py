"""Laws that hold in every type: divergences are not negative, means come back, modules move."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from dualform.errors import FamilyError
from dualform.families import (
    Chain,
    Empirical,
    Gaussian,
    Hypercube,
    Interval,
    Laplace,
    LogNormalizer,
    Measure,
    Mixture,
    Poisson,
    Product,
    Pushforward,
    Sphere,
)
from dualform.families.bessel import concentration, ratio
from dualform.families.layers import Boltzmann, Conditional, ConditionalRandomField, Hopfield

law = settings(deadline=None, max_examples=5)
seeds = st.integers(0, 2**31)
F32, F64 = torch.float32, torch.float64


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def near(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


ROOT = randn(2, 2, seed=3)
MEASURES: dict[str, Callable[[], Measure]] = {
    "empirical": lambda: Empirical(randn(9, 3)),
    "weighted": lambda: Empirical(randn(9, 3), randn(9, seed=1).exp(), bias=randn(9, seed=2)),
    "masked": lambda: Empirical(randn(9, 3), mask=torch.arange(9) > 2),
    "gaussian": lambda: Gaussian(randn(2), ROOT @ ROOT.T),
    "mixture": lambda: Mixture(Gaussian(randn(3, 2, seed=4)), randn(3).exp()),
    "sphere 1": lambda: Sphere(1),
    "sphere 2": lambda: Sphere(2),
    "sphere 3": lambda: Sphere(3),
    "sphere 50": lambda: Sphere(50),
    "hypercube": lambda: Hypercube(3),
    "poisson": lambda: Poisson(2),
    "interval": lambda: Interval(randn(2) - 3, randn(2) + 3),
    "product": lambda: Product(Hypercube(1), Gaussian(randn(1)), Poisson(1)),
    "pushforward": lambda: Pushforward(Hypercube(2), ROOT.clone(), randn(2)),
    "chain": lambda: Chain(length=3, labels=2),
    "laplace": lambda: Laplace(lambda x: torch.ones(len(x)), [-1.0, 0.0], [1.0, 2.0], nodes=12),
}
each = pytest.mark.parametrize("name", MEASURES)


# --- what rounding must not do ----------------------------------------------------------------


@each
@given(seed=seeds, size=st.sampled_from([0.1, 3.0, 100.0]), apart=st.sampled_from([1e-6, 1e-3, 1]))
@law
def test_divergence_is_not_negative_in_float32(
    name: str, seed: int, size: float, apart: float
) -> None:
    if name in ("poisson", "product"):
        size = min(size, 3.0)  # exp(100) leaves float32
    G = LogNormalizer(MEASURES[name]().float())
    eta = (size * randn(20, G.measure.width, seed=seed)).float()
    other = eta + (apart * randn(20, G.measure.width, seed=seed + 1)).float()
    kl = G.kl(eta, other)
    assert (kl >= 0).all()
    assert (G.kl(eta, eta) == 0).all() or name in ("mixture", "chain")
    assert (G.kl(eta, eta) >= 0).all()


@pytest.mark.parametrize("name", ["empirical", "weighted", "hypercube", "poisson", "gaussian"])
@given(seed=seeds, apart=st.sampled_from([1e-6, 1e-4, 1e-2, 1.0]))
@law
def test_small_divergences_have_their_digits_in_float32(name: str, seed: int, apart: float) -> None:
    measure = MEASURES[name]().float()
    eta = randn(5, measure.width, seed=seed).float()
    other = eta + (apart * randn(5, measure.width, seed=seed + 1)).float()
    exact = copy.deepcopy(measure).double().divergence(eta.double(), other.double())
    torch.testing.assert_close(measure.divergence(eta, other).double(), exact, rtol=2e-5, atol=0)


@pytest.mark.parametrize("T", [1e-30, 1e-8, 1e-4, 1e-2, 1.0, 1e3, 1e9])
@given(seed=seeds, n=st.sampled_from([1, 2, 50]))
@law
def test_entropy_lies_between_0_and_log_n_at_every_temperature_in_float32(
    T: float, seed: int, n: int
) -> None:
    x, q = randn(n, 64, seed=seed).float(), 100 * randn(40, 64, seed=seed + 1).float()
    entropy = LogNormalizer(Empirical(x), T).entropy(torch.cat([q, torch.zeros(1, 64)]))
    assert (entropy >= 0).all()
    assert (entropy <= torch.tensor(math.log(n), dtype=F32)).all()
    bits = LogNormalizer(Hypercube(64), T).entropy(q)
    assert ((bits >= 0) & (bits <= 64 * math.log(2) * (1 + 1e-6))).all()


def test_a_cold_family_has_no_entropy() -> None:
    x, q = randn(50, 64).float(), 100 * randn(200, 64, seed=1).float()
    assert (LogNormalizer(Empirical(x), 1e-4).entropy(q) < 1e-6).all()


@pytest.mark.parametrize("masked", [False, True])
@given(seed=seeds, T=st.sampled_from([1e-6, 1e-3, 1.0]))
@law
def test_the_derivative_by_temperature_is_the_entropy(masked: bool, seed: int, T: float) -> None:
    mask = torch.arange(9) > 2 if masked else None
    x, eta = randn(9, 3, seed=seed).float(), randn(5, 3, seed=seed + 1).float()
    t = torch.tensor(T, requires_grad=True)
    G = LogNormalizer(Empirical(x, mask=mask), t)
    (slope,) = torch.autograd.grad(G.value(eta).sum(), t)
    torch.testing.assert_close(slope, G.entropy(eta).sum().detach(), rtol=1e-4, atol=1e-5)
    for measure in (Sphere(3), Hypercube(3)):
        G = LogNormalizer(measure, t)
        (slope,) = torch.autograd.grad(G.value(eta).sum(), t)
        torch.testing.assert_close(slope, G.entropy(eta).sum().detach(), rtol=1e-4, atol=1e-4)


@each
def test_divergence_and_entropy_are_differentiable_twice(name: str) -> None:
    measure = MEASURES[name]()
    eta, other = (randn(measure.width, seed=s).div(2).requires_grad_() for s in (1, 2))
    assert gradcheck(measure.divergence, (eta, other), fast_mode=True)
    assert gradgradcheck(measure.divergence, (eta, other), fast_mode=True)
    assert gradcheck(measure.entropy, (eta,), fast_mode=True)
    assert gradgradcheck(measure.entropy, (eta,), fast_mode=True)
    at = eta.detach()  # where it is least, its curvature is the covariance
    slope = torch.func.jacrev(lambda x: measure.divergence(at, x))
    near(torch.func.jacrev(slope)(at), measure.covariance(at), 1e-8)


# --- means come back --------------------------------------------------------------------------


@each
@given(seed=seeds, size=st.sampled_from([1e-9, 0.3, 5.0, 40.0]), dtype=st.sampled_from([F32, F64]))
@law
def test_natural_gives_a_parameter_with_the_same_mean(
    name: str, seed: int, size: float, dtype: torch.dtype
) -> None:
    if name in ("poisson", "product"):
        size = min(size, 5.0)  # exp(40) has no digits to compare
    G = LogNormalizer(MEASURES[name]().to(dtype), 0.7 if name == "gaussian" else 1.0)
    mu = G.mean((size * randn(64, G.measure.width, seed=seed)).to(dtype))
    eta = G.natural(mu)
    assert eta.isfinite().all()
    scale = 1 + mu.abs().amax(-1, keepdim=True)
    assert ((G.mean(eta) - mu).abs() <= 300 * torch.finfo(dtype).eps * scale).all()
    assert G.conjugate(mu).isfinite().all()


@pytest.mark.parametrize("d", [1, 2, 3, 64, 5000])
@given(r=st.floats(1e-12, 1 - 1e-12))
@law
def test_concentration_inverts_the_mean_of_the_sphere(d: int, r: float) -> None:
    kappa = concentration(torch.tensor(r, dtype=F64), d)
    near(kappa * ratio(kappa**2, d), torch.tensor(r, dtype=F64), 1e-14)


def test_a_sphere_of_many_dimensions_inverts_no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sphere, "covariance", None)
    monkeypatch.setattr(Interval, "covariance", None)
    mu = torch.nn.functional.normalize(randn(2, 4096), dim=-1) * 0.99
    for measure in (Sphere(4096), Interval(-torch.ones(4096), torch.ones(4096))):
        at = mu.clone().requires_grad_()
        eta = measure.natural(at)
        near(measure.mean(eta).detach(), mu, 1e-13)
        (slope,) = torch.autograd.grad(measure.conjugate(at).sum(), at)
        near(slope, eta.detach(), 1e-6)


@pytest.mark.parametrize("name", sorted(set(MEASURES) - {"chain"}))
def test_natural_and_conjugate_are_differentiable_twice(name: str) -> None:
    """Means of a chain lie in a plane, which differences would leave."""
    measure = MEASURES[name]()
    mu = measure.mean(randn(measure.width, seed=1) / 2).detach().requires_grad_()
    for function in (measure.natural, measure.conjugate):
        assert gradcheck(function, (mu,), atol=1e-5, fast_mode=True)
        assert gradgradcheck(function, (mu,), atol=1e-4, rtol=1e-2, fast_mode=True)


def test_corners_and_edges_have_finite_parameters() -> None:
    for measure, edge in (
        (Hypercube(2), [0.0, 1.0]),
        (Poisson(2), [0.0, 1.0]),
        (Interval(torch.zeros(2), torch.ones(2)), [0.0, 1.0]),
        (Sphere(2), [0.6, 0.8]),
    ):
        for dtype in (F32, F64):
            mu = torch.tensor(edge, dtype=dtype)
            eta = LogNormalizer(measure).natural(mu)
            assert eta.isfinite().all()
            assert (LogNormalizer(measure).mean(eta) - mu).abs().max() <= torch.finfo(dtype).eps
    with pytest.raises(FamilyError, match=r"^mu must lie inside the box from \[0.0\] to \[1.0\]."):
        Interval(torch.zeros(1), torch.ones(1)).natural(torch.tensor([1.001]))


# --- measures are modules ---------------------------------------------------------------------


@each
def test_measures_move_copy_and_load(name: str) -> None:
    measure = MEASURES[name]()
    eta = randn(4, measure.width).div(2)
    expected = measure.mean(eta)
    narrow = copy.deepcopy(measure).float()
    assert all(x.dtype in (F32, torch.bool) for x in narrow.state_dict().values())
    assert narrow.mean(eta.float()).dtype == F32
    near(narrow.mean(eta.float()).double(), expected, 1e-5)
    near(narrow.double().mean(eta), expected, 1e-5)
    other = MEASURES[name]()
    for x in other.state_dict().values():
        x.zero_() if x.is_floating_point() else x.fill_(True)
    other.load_state_dict(measure.state_dict())
    near(other.mean(eta), expected)
    near(other.natural(expected), measure.natural(expected), 1e-6)


def test_layers_carry_their_measures() -> None:
    classes = ConditionalRandomField(5, Empirical(torch.eye(3)), Hypercube(4)).double()
    assert classes(randn(2, 5)).dtype == F64
    machine = Boltzmann(Gaussian(torch.zeros(4)), Hypercube(3)).double()
    assert machine.sample(2, steps=2).dtype == F64
    assert machine.field().free_energy(randn(2, 4)).dtype == F64
    conditional = Conditional(5, Gaussian(torch.zeros(3)))
    assert set(conditional.state_dict()) >= {"measure.m", "measure.Sigma"}
    network = Hopfield(torch.eye(3), temperature=torch.tensor(0.1)).double()
    assert set(network.state_dict()) == {"G.temperature", "G.measure.points"}
    assert network.retrieve(randn(2, 3)).states.dtype == F64


def test_learned_points_weights_and_spreads_are_read_as_they_are_now() -> None:
    """Nothing that was computed when the measure was made outlives a step of the optimizer."""
    points, weights = nn.Parameter(randn(5, 3)), nn.Parameter(randn(5).exp())
    spread = nn.Parameter(torch.eye(3, dtype=F64))
    measures = Empirical(points, weights), Gaussian(torch.zeros(3, dtype=F64), spread)
    assert [len(list(m.parameters())) for m in measures] == [2, 1]
    with torch.no_grad():
        points *= 1e200
        weights *= torch.arange(1, 6)
        spread *= 4
    eta = randn(2, 3)
    fresh = Empirical(points.detach(), weights.detach())
    assert measures[0].limit == fresh.limit
    near(measures[0].mean(eta / 1e200), fresh.mean(eta / 1e200))
    near(measures[1].natural(eta), eta / 4)
