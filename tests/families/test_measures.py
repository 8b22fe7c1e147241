"""Laws of the log-normalizer, for every measure: its gradient, its Hessian, its conjugate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

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
    reference,
)
from dualform.families.bessel import log_hypergeometric, ratio

law = settings(deadline=None, max_examples=4)
few = settings(deadline=None, max_examples=2)
F64 = torch.float64


def tensor(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=F64)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def near(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


SQUARE = randn(2, 2, seed=3)
MEASURES: dict[str, Measure] = {
    "empirical": Empirical(randn(9, 3)),
    "weighted": Empirical(randn(9, 3), randn(9, seed=1).exp(), bias=randn(9, seed=2)),
    "gaussian": Gaussian(tensor(1, -2), SQUARE @ SQUARE.T),
    "mixture": Mixture(
        Gaussian(randn(3, 2, seed=4), (SQUARE @ SQUARE.T).expand(3, 2, 2)), tensor(0.2, 0.3, 0.5)
    ),
    "sphere 1": Sphere(1),
    "sphere 2": Sphere(2),
    "sphere 3": Sphere(3),
    "sphere 7": Sphere(7),
    "hypercube": Hypercube(3),
    "poisson": Poisson(2),
    "interval": Interval(tensor(0, -2), tensor(1, 5)),
    "product": Product(Hypercube(1), Gaussian(tensor(0.5)), Poisson(1)),
    "pushforward": Pushforward(Hypercube(2), SQUARE, tensor(1, 2)),
    "chain": Chain(length=3, labels=2),
    "laplace": Laplace(lambda x: torch.exp(-x.square().sum(-1)), [-1.0, 0.0], [1.0, 2.0], nodes=12),
}
each = pytest.mark.parametrize("name", MEASURES)


def parameters(measure: Measure, seed: int, *batch: int) -> Tensor:
    return randn(*batch, measure.width, seed=seed)


# --- derivatives ------------------------------------------------------------------------------


@each
@given(seed=st.integers(0, 2**31), T=st.sampled_from([0.3, 1.0, 2.5]))
@law
def test_gradient_of_G_is_the_mean_and_its_hessian_the_covariance(
    name: str, seed: int, T: float
) -> None:
    G = LogNormalizer(MEASURES[name], T)
    eta = parameters(G.measure, seed, 2)
    near(G.mean(eta), torch.func.vmap(torch.func.grad(G.value))(eta), 1e-11)
    near(G.jacobian(eta), torch.func.vmap(torch.func.jacrev(G.mean))(eta), 1e-10)
    near(G.jacobian(eta)[0], torch.func.jacrev(torch.func.grad(G.value))(eta[0]), 1e-10)
    t = parameters(G.measure, seed + 1, 2)
    near(G.hvp(eta, t), (G.jacobian(eta) @ t.unsqueeze(-1)).squeeze(-1), 1e-11)
    near(G.covariance(eta) / T, G.jacobian(eta))


@each
@given(seed=st.integers(0, 2**31))
@law
def test_covariance_is_symmetric_and_positive_semidefinite(name: str, seed: int) -> None:
    G = LogNormalizer(MEASURES[name])
    covariance = G.covariance(3 * parameters(G.measure, seed, 3))
    near(covariance, covariance.mT, 1e-13)
    assert (torch.linalg.eigvalsh(covariance) >= -1e-13 * covariance.abs().max()).all()


@each
def test_gradcheck_once_and_twice(name: str) -> None:
    G = LogNormalizer(MEASURES[name], 0.7)
    eta = parameters(G.measure, 5).requires_grad_()
    for function in (G.value, G.mean):
        assert gradcheck(function, eta)
        assert gradgradcheck(function, eta, fast_mode=True)


@each
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_mode(name: str) -> None:
    """torch's own forward mode warns of torch's own `jit.script`."""
    G = LogNormalizer(MEASURES[name], 0.7)
    eta = parameters(G.measure, 4)
    near(torch.func.hessian(G.value)(eta), G.jacobian(eta))


@each
def test_default_derivatives_agree_with_closed_forms(name: str) -> None:
    measure = MEASURES[name]
    eta = parameters(measure, 6, 2, 3)
    near(Measure.mean(measure, eta), measure.mean(eta))
    near(Measure.hvp(measure, eta, eta + 1), measure.hvp(eta, eta + 1))
    near(Measure.covariance(measure, eta), measure.covariance(eta))


@each
def test_batch_equals_loop_and_vmap(name: str) -> None:
    G = LogNormalizer(MEASURES[name], 0.7)
    eta = parameters(G.measure, 7, 4)
    for function in (G.value, G.mean, G.covariance, G.entropy):
        near(function(eta), torch.stack([function(one) for one in eta]))
        near(function(eta), torch.func.vmap(function)(eta))


# --- duality ----------------------------------------------------------------------------------


@each
@given(seed=st.integers(0, 2**31), T=st.sampled_from([0.5, 1.0, 2.0]))
@few
def test_conjugate_duality(name: str, seed: int, T: float) -> None:
    G = LogNormalizer(MEASURES[name], T)
    eta = parameters(G.measure, seed, 2)
    mu = G.mean(eta)
    near(G.value(eta) + G.conjugate(mu), (eta * mu).sum(-1), 1e-9)
    near(G.conjugate(mu), -T * G.entropy(eta), 1e-9)
    near(G.mean(G.natural(mu)), mu, 1e-10)
    other = parameters(G.measure, seed + 1, 2)  # Fenchel's inequality
    assert (G.value(other) + G.conjugate(mu) >= (other * mu).sum(-1) - 1e-9).all()


@each
def test_gradient_of_the_conjugate_is_the_natural_parameter(name: str) -> None:
    G = LogNormalizer(MEASURES[name])
    mu = G.mean(parameters(G.measure, 8, 2) / 2).requires_grad_()
    eta = G.natural(mu)
    near(torch.autograd.grad(G.conjugate(mu).sum(), mu)[0], eta.detach(), 1e-8)
    slope = torch.autograd.grad(eta.sum(), mu)[0].detach()
    inverse = torch.linalg.pinv(G.covariance(eta.detach()), hermitian=True)
    near(slope, inverse.sum(-1), 1e-6)


@each
@given(seed=st.integers(0, 2**31))
@law
def test_kl_is_a_bregman_divergence(name: str, seed: int) -> None:
    G = LogNormalizer(MEASURES[name], 0.7)
    eta, other = parameters(G.measure, seed, 3), parameters(G.measure, seed + 1, 3)
    slope = ((other - eta) * G.mean(eta)).sum(-1)
    near(G.kl(eta, other), (G.value(other) - G.value(eta) - slope) / 0.7, 1e-9)
    assert (G.kl(eta, other) >= -1e-12).all()
    near(G.kl(eta, eta), torch.zeros(3, dtype=F64), 1e-12)


# --- against plain sums, grids and draws ------------------------------------------------------


def grid(low: float, high: float, count: int = 60) -> tuple[list[list[float]], list[float]]:
    """Gauss–Legendre nodes and weights on an interval."""
    import numpy as np

    t, w = np.polynomial.legendre.leggauss(count)
    return [[low + (high - low) * (x + 1) / 2] for x in t], list(w * (high - low) / 2)


def angles(count: int = 64) -> tuple[list[list[float]], list[float]]:
    steps = [2 * math.pi * i / count for i in range(count)]
    return [[math.cos(a), math.sin(a)] for a in steps], [1 / count] * count


def normal(points: list[list[float]], weights: list[float]) -> list[float]:
    return [
        w * math.exp(-(x[0] ** 2) / 2) / math.sqrt(2 * math.pi)
        for x, w in zip(points, weights, strict=True)
    ]


LINE = grid(-12, 12, 120)
SEQUENCES = torch.tensor(list(itertools.product(range(3), repeat=4)))
PLAIN: dict[str, tuple[Measure, list[list[float]], list[float]]] = {
    "empirical": (MEASURES["empirical"], MEASURES["empirical"].keys.tolist(), [1.0] * 9),  # type: ignore[attr-defined]
    "hypercube": (
        Hypercube(2),
        [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]],
        [1.0] * 4,
    ),
    "poisson": (
        Poisson(1),
        [[float(x)] for x in range(60)],
        [1 / math.factorial(x) for x in range(60)],
    ),
    "interval": (Interval(tensor(-1), tensor(2)), *grid(-1, 2)),
    "gaussian": (Gaussian(tensor(0)), LINE[0], normal(*LINE)),
    "mixture": (
        Mixture(Gaussian(tensor(-1, 2).unsqueeze(-1))),
        [[x[0] - 1] for x in LINE[0]] + [[x[0] + 2] for x in LINE[0]],
        [w / 2 for w in normal(*LINE) * 2],
    ),
    "sphere 1": (Sphere(1), [[-1.0], [1.0]], [0.5, 0.5]),
    "sphere 2": (Sphere(2), *angles()),
    "spins": (
        Pushforward(Hypercube(1), 2 * torch.eye(1, dtype=F64), tensor(-1)),
        [[-1.0], [1.0]],
        [1.0, 1.0],
    ),
    "chain": (Chain(4, 3), Chain(4, 3).statistics(SEQUENCES).tolist(), [1.0] * 81),
    "laplace": (Laplace(lambda x: torch.ones(len(x)), [-1.0], [2.0]), *grid(-1, 2)),
}


@pytest.mark.parametrize("name", PLAIN)
@given(seed=st.integers(0, 2**31))
@law
def test_moments_equal_the_reference(name: str, seed: int) -> None:
    measure, points, weights = PLAIN[name]
    eta = parameters(measure, seed)
    G, mean, covariance = reference.moments(points, weights, eta.tolist())
    near(measure.log_normalizer(eta), torch.tensor(G, dtype=F64), 1e-11)
    near(measure.mean(eta), torch.tensor(mean, dtype=F64), 1e-11)
    near(measure.covariance(eta), torch.tensor(covariance, dtype=F64), 1e-11)


def test_sphere_of_three_dimensions_is_langevin() -> None:
    eta = tensor(0, 0, 2)
    near(Sphere(3).log_normalizer(eta), tensor(2).sinh().div(2).log().squeeze())
    near(Sphere(3).mean(eta)[2:], 1 / tensor(2).tanh() - 0.5)


@pytest.mark.parametrize("d", [1, 2, 3, 4, 8, 64, 512, 4096, 100_000])
@pytest.mark.parametrize("kappa", [1e-8, 1e-3, 0.1, 1.0, 10.0, 64.0, 300.0, 1e3, 1e4])
def test_bessel_functions_equal_mpmath(d: int, kappa: float) -> None:
    s = tensor(kappa**2)
    with mpmath.workdps(60):
        nu, k = mpmath.mpf(d) / 2 - 1, mpmath.sqrt(mpmath.mpf(s.item()))
        low, high = (mpmath.besseli(nu + i, k, maxterms=10**6) for i in (0, 1))
        F = float(mpmath.loggamma(nu + 1) + nu * mpmath.log(2 / k) + mpmath.log(low))
        R = float(high / (k * low))
    assert log_hypergeometric(s, d).item() == pytest.approx(F, rel=3e-14, abs=0)
    assert ratio(s, d).item() == pytest.approx(R, rel=3e-15, abs=0)


@pytest.mark.parametrize("d", [1, 2, 3, 5, 16, 64, 1000, 100_000])
@given(size=st.floats(-8, 5))
@settings(deadline=None, max_examples=15)
def test_the_sphere_has_the_digits_that_it_promises(d: int, size: float) -> None:
    s = tensor(10 ** (2 * size))
    with mpmath.workdps(60):
        nu, k = mpmath.mpf(d) / 2 - 1, mpmath.sqrt(mpmath.mpf(s.item()))
        low, high, top = (mpmath.besseli(nu + i, k, maxterms=10**6) for i in (0, 1, 2))
        F = mpmath.loggamma(nu + 1) + nu * mpmath.log(2 / k) + mpmath.log(low)
        R, above = high / (k * low), top / (k * high)
        along = float(R + k**2 * R * (above - R))
    assert log_hypergeometric(s, d).item() == pytest.approx(float(F), rel=1e-13, abs=0)
    assert ratio(s, d).item() == pytest.approx(float(R), rel=1e-14, abs=0)
    own, up = ratio(s, d), ratio(s, d + 2)
    variance = (own + s * own * (up - own)).item()
    assert variance == pytest.approx(along, rel=1e-13, abs=5e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sphere_is_defined_from_no_to_any_concentration(dtype: torch.dtype) -> None:
    for d in (1, 2, 3, 1000):
        for size in (0.0, 1e-30, 1e-8, 1e8, 1e18):
            eta = torch.zeros(d, dtype=dtype)
            eta[0] = size
            eta.requires_grad_()
            mean = Sphere(d).mean(eta)
            (gradient,) = torch.autograd.grad(mean.sum(), eta)
            assert mean.isfinite().all()
            assert gradient.isfinite().all()
            assert 0 <= mean[0] <= 1 + 1e-15
    near(Sphere(3).mean(torch.tensor([0.0, 1e12, 0.0], dtype=F64)), tensor(0, 1, 0))


@dataclass(frozen=True)
class Draws:
    """Draws of a family, and what they should average to."""

    drawn: Tensor
    expected: Tensor

    def check(self) -> None:
        """Within five standard errors, coordinate by coordinate."""
        error = self.drawn.std(0) / math.sqrt(len(self.drawn))
        assert ((self.drawn.mean(0) - self.expected).abs() <= 5 * error + 1e-12).all()


@each
def test_draws_average_to_the_mean_and_to_the_entropy(name: str) -> None:
    G = LogNormalizer(MEASURES[name], 0.7)
    eta = parameters(G.measure, 9, 2)
    generator = torch.Generator().manual_seed(0)
    x = G.sample(eta, 20_000, generator)
    Draws(x, G.mean(eta)).check()
    second = x.unsqueeze(-1) * x.unsqueeze(-2)
    mean = G.mean(eta)
    expected = G.covariance(eta) + mean.unsqueeze(-1) * mean.unsqueeze(-2)
    Draws(second, expected).check()


@pytest.mark.parametrize("size", [0.0, 1e-9, 1e-3, 40.0])
def test_draws_of_a_box_at_every_tilt(size: float) -> None:
    G, eta = LogNormalizer(MEASURES["interval"]), size * tensor(1, -1)
    x = G.sample(eta, 20_000, torch.Generator().manual_seed(0))
    Draws(x, G.mean(eta)).check()
    Draws((x - G.mean(eta)).square(), G.covariance(eta).diagonal()).check()


@pytest.mark.parametrize("name", sorted(set(MEASURES) - {"weighted"}))
def test_log_prob_averages_to_the_entropy(name: str) -> None:
    """−E log p(x|η) + E log h(x) = entropy relative to h, on the draws themselves."""
    G = LogNormalizer(MEASURES[name], 0.7)
    eta = parameters(G.measure, 10)
    x = G.sample(eta, 20_000, torch.Generator().manual_seed(1))
    surprise = G.measure.log_base(x) - G.log_prob(x, eta)
    assert surprise.isfinite().all()
    Draws(surprise, G.entropy(eta)).check()


def test_log_prob_sums_or_integrates_to_one() -> None:
    for name in ("hypercube", "interval", "gaussian", "poisson", "spins", "empirical"):
        measure, points, weights = PLAIN[name]
        eta = parameters(measure, 11)
        x = torch.tensor(points, dtype=F64)
        cell = tensor(*weights) if name in ("interval", "gaussian") else torch.ones(len(points))
        if name == "gaussian":
            cell = tensor(*LINE[1])
        total = (LogNormalizer(measure).log_prob(x, eta).exp() * cell).sum()
        near(total, torch.ones((), dtype=F64), 1e-10)


def test_log_prob_is_minus_infinity_off_the_support() -> None:
    off = {
        "empirical": tensor(9, 9, 9),
        "sphere 3": tensor(1, 1, 0),
        "hypercube": tensor(0.5, 0, 1),
        "poisson": tensor(-1, 2),
        "interval": tensor(2, 0),
        "chain": torch.eye(14, dtype=F64)[0],
    }
    for name, x in off.items():
        assert LogNormalizer(MEASURES[name]).log_prob(x, torch.zeros_like(x)) == -torch.inf


# --- chains -----------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**31), n=st.integers(1, 5), s=st.integers(1, 3))
@law
def test_a_cold_chain_is_viterbis_sequence(seed: int, n: int, s: int) -> None:
    chain, labels, neighbors = Chain(n, s), randn(n, s, seed=seed), randn(s, s, seed=seed + 1)
    sequences = torch.tensor(list(itertools.product(range(s), repeat=n)))
    eta = chain.eta(labels, neighbors)
    scores = [
        sum(float(labels[t, y[t]]) for t in range(n))
        + sum(float(neighbors[y[t], y[t + 1]]) for t in range(n - 1))
        for y in sequences
    ]
    near(chain.statistics(sequences).double() @ eta, tensor(*scores))
    best = max(range(len(scores)), key=lambda i: scores[i])
    cold = LogNormalizer(chain, 1e-9)
    near(cold.value(eta), tensor(scores[best]).squeeze(), 1e-6)
    near(cold.mean(eta), chain.statistics(sequences[best]).double())


def test_marginals_of_a_chain_and_a_loss_that_fits_them() -> None:
    chain = Chain(4, 3)
    eta = chain.eta(randn(2, 4, 3), randn(2, 3, 3, 3, seed=1)).requires_grad_()
    p = torch.softmax(chain.statistics(SEQUENCES).double() @ eta.T, 0)
    at = (SEQUENCES.unsqueeze(-1) == torch.arange(3)).double()
    near(chain.marginals(eta), torch.einsum("yb,yns->bns", p, at))
    y = chain.statistics(SEQUENCES[[5, 70]]).double()
    loss = -LogNormalizer(chain).log_prob(y, eta).sum()
    near(torch.autograd.grad(loss, eta)[0], (chain.mean(eta) - y).detach())


@given(seed=st.integers(0, 2**31))
@law
def test_excluded_labels_and_neighbors_do_not_happen(seed: int) -> None:
    """The family of the sequences that are left: their sum, marginals and derivatives."""
    chain, labels, neighbors = Chain(4, 3), randn(4, 3, seed=seed), randn(3, 3, seed=seed + 1)
    labels[1, 2], neighbors[0, 1], neighbors[2] = -torch.inf, -torch.inf, -torch.inf
    left = [
        y
        for y in SEQUENCES
        if y[1] != 2 and all((a, b) != (0, 1) and a != 2 for a, b in itertools.pairwise(y.tolist()))
    ]
    x, eta = chain.statistics(torch.stack(left)).double(), chain.eta(labels, neighbors)
    finite = eta.masked_fill(eta == -torch.inf, 0)
    p = torch.softmax(x @ finite, 0)
    T = torch.tensor(1.0, dtype=F64, requires_grad=True)
    G, eta = LogNormalizer(chain, T), eta.requires_grad_()
    near(G.value(eta), (x @ finite).logsumexp(0))
    near(G.mean(eta), p @ x)
    near(G.entropy(eta), -(p * p.log()).sum())
    slopes = torch.autograd.grad(G.value(eta), (eta, T))
    near(slopes[0], p @ x)
    near(slopes[1], -(p * p.log()).sum())
    near(G.covariance(eta.detach()), (x - p @ x).T @ (p[:, None] * (x - p @ x)))
    assert G.kl(eta, eta) == 0
    assert G.kl(chain.eta(torch.zeros(4, 3).double(), torch.zeros(3, 3).double()), eta) == torch.inf
    near(G.log_prob(x, eta), p.log())
    assert G.log_prob(chain.statistics(SEQUENCES[-1]).double(), eta) == -torch.inf
    drawn = G.sample(eta.detach(), 200, torch.Generator().manual_seed(0))
    assert G.log_prob(drawn, eta).isfinite().all()


@given(seed=st.integers(0, 2**31))
@law
def test_shorter_sequences_are_those_of_shorter_chains(seed: int) -> None:
    labels, neighbors = randn(3, 4, 2, seed=seed), randn(2, 2, seed=seed + 1)
    lengths, y = torch.tensor([4, 1, 3]), torch.randint(2, (3, 4))
    chain = Chain(4, 2)
    eta = chain.eta(labels, neighbors, lengths)
    log_p = LogNormalizer(chain).log_prob(chain.statistics(y, lengths).double(), eta)
    for i, n in enumerate(lengths.tolist()):
        alone = Chain(n, 2)
        own = alone.eta(labels[i, :n], neighbors)
        near(chain.log_normalizer(eta[i]), alone.log_normalizer(own))
        near(chain.marginals(eta[i])[:n], alone.marginals(own))
        near(log_p[i], LogNormalizer(alone).log_prob(alone.statistics(y[i, :n]).double(), own))


# --- composed measures ------------------------------------------------------------------------


def test_pushforward_of_a_gaussian_is_the_gaussian_of_the_image() -> None:
    b, eta, x = tensor(1, -1), randn(4, 2, seed=1), randn(4, 2, seed=2)
    image = Pushforward(Gaussian(tensor(0, 0)), SQUARE, b)
    gaussian = Gaussian(b, SQUARE @ SQUARE.T)
    near(image.log_normalizer(eta), gaussian.log_normalizer(eta))
    near(image.covariance(eta), gaussian.covariance(eta))
    near(image.log_base(x), gaussian.log_base(x))


def test_mixture_of_points_is_the_empirical_measure() -> None:
    points = randn(5, 2)
    tight = Mixture(Gaussian(points, 1e-12 * torch.eye(2, dtype=F64).expand(5, 2, 2)))
    eta = randn(3, 2, seed=1)
    near(tight.mean(eta), Empirical(points).mean(eta), 1e-9)
    near(tight.log_normalizer(eta), Empirical(points).log_normalizer(eta) - math.log(5), 1e-9)


def test_product_of_bits_is_the_hypercube() -> None:
    product = Product(Hypercube(1), Hypercube(2))
    eta = randn(4, 3)
    for name in ("log_normalizer", "mean", "covariance", "natural", "conjugate"):
        argument = eta.sigmoid() if name in ("natural", "conjugate") else eta
        near(getattr(product, name)(argument), getattr(Hypercube(3), name)(argument))


CLOSED: dict[str, tuple[Callable[[Tensor], Tensor], list[float], list[float], Measure]] = {
    "gaussian": (
        lambda x: torch.exp(-x.square().sum(-1) / 2) / (2 * math.pi),
        [-math.inf] * 2,
        [math.inf] * 2,
        Gaussian(tensor(0, 0)),
    ),
    "box": (lambda x: torch.ones(len(x)), [0.0, -2.0], [1.0, 5.0], MEASURES["interval"]),
    "mixture": (
        lambda x: (
            sum(torch.exp(-((x[:, 0] - m) ** 2) / 2) for m in (-1, 2)) / math.sqrt(8 * math.pi)
        ),
        [-math.inf],
        [math.inf],
        Mixture(Gaussian(tensor(-1, 2).unsqueeze(-1))),
    ),
}


@pytest.mark.parametrize("name", CLOSED)
def test_numerical_laplace_transform_agrees_with_closed_forms(name: str) -> None:
    density, low, high, measure = CLOSED[name]
    laplace = Laplace(density, low, high, nodes=160)
    eta = parameters(measure, 12, 5)
    near(laplace.log_normalizer(eta), measure.log_normalizer(eta), 1e-9)
    near(laplace.mean(eta), measure.mean(eta), 1e-9)
    near(laplace.covariance(eta), measure.covariance(eta), 1e-8)
    assert (laplace.error(eta) < 1e-4).all()


@pytest.mark.parametrize("upward", [True, False])
def test_laplace_of_half_a_line(upward: bool) -> None:
    sign = 1 if upward else -1
    bounds = ([0.0], [math.inf]) if upward else ([-math.inf], [0.0])
    laplace = Laplace(lambda x: torch.exp(-5 * sign * x[:, 0]), *bounds)
    eta = sign * tensor(-1, 0, 2).unsqueeze(-1)
    near(laplace.log_normalizer(eta), -(5 - sign * eta[:, 0]).log(), 1e-10)


def test_laplace_with_a_statistic_of_ones_own() -> None:
    """u = (x, x²) under Lebesgue's measure: the Gaussian with both parameters free."""
    laplace = Laplace(
        lambda x: torch.ones(len(x)),
        [-40.0],
        [40.0],
        nodes=400,
        statistic=lambda x: torch.cat([x, x**2], dim=-1),
    )
    eta = tensor(1.0, -0.5)
    expected = -(eta[0] ** 2) / (4 * eta[1]) + 0.5 * torch.log(-math.pi / eta[1])
    near(laplace.log_normalizer(eta), expected)
    near(laplace.mean(eta), tensor(1.0, 2.0))
