"""Points: attention is ∇G, with values, weights, biases, masks, and at every temperature."""

from __future__ import annotations

import math
from collections.abc import Callable

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from dualform.errors import DualformError, FamilyError
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
    Pushforward,
    Sphere,
    Tsallis,
    entmax,
    reference,
)
from dualform.memory import Exponential, Memory

law = settings(deadline=None, max_examples=10)
F64 = torch.float64
seeds = st.integers(0, 2**31)
sizes = st.integers(1, 6)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def near(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def draw(seed: int, n: int, d: int, *batch: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        randn(*batch, n, d, seed=seed),
        randn(*batch, n, 3, seed=seed + 1),
        randn(*batch, 4, d, seed=seed + 2),
    )


# --- attention --------------------------------------------------------------------------------


@given(seed=seeds, n=sizes, d=sizes, batch=st.sampled_from([(), (2,), (2, 3)]))
@law
def test_gradient_of_G_is_attention(seed: int, n: int, d: int, batch: tuple[int, ...]) -> None:
    k, v, q = draw(seed, n, d, *batch)
    G = LogNormalizer(Empirical(k), temperature=math.sqrt(d))
    expected = F.scaled_dot_product_attention(q, k, k)
    q.requires_grad_()
    by_autograd = torch.autograd.grad(G.value(q).sum(), q)[0]
    near(by_autograd, expected.detach())
    near(G.mean(q).detach(), expected.detach())  # composed
    near(G.mean(q.detach()), expected.detach())  # fused
    near(G.mean(q.detach(), v), F.scaled_dot_product_attention(q.detach(), k, v))
    near(G.mean(q, v).detach(), F.scaled_dot_product_attention(q.detach(), k, v))


@given(seed=seeds, n=sizes, d=sizes, T=st.sampled_from([0.3, 1.0, 4.0]))
@law
def test_jacobian_with_values_is_the_cross_covariance(seed: int, n: int, d: int, T: float) -> None:
    k, v, q = draw(seed, n, d)
    G = LogNormalizer(Empirical(k, randn(n, seed=seed + 3).exp()), T)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda one: G.mean(one, v)))(q)
    near(G.jacobian(q, v), jacobian)
    near(G.covariance(q, v), T * jacobian)


@given(seed=seeds, n=sizes)
@law
def test_an_empirical_measure_is_a_memory(seed: int, n: int) -> None:
    k, _, q = draw(seed, n, 3)
    empirical = Empirical(k)
    assert isinstance(empirical, Memory)
    near(empirical.read(q), Memory(k, k, Exponential(scale=1.0)).read(q))
    near(empirical.scores(q), Exponential(scale=1.0)(q, k))
    with pytest.raises(DualformError, match="has no finite features"):
        empirical.primal()


@given(seed=seeds, cut=st.integers(1, 4))
@law
def test_measures_add(seed: int, cut: int) -> None:
    k, _, q = draw(seed, 5, 3)
    w = randn(5, seed=seed).exp()
    joined = Empirical(k[:cut], w[:cut]) + Empirical(k[cut:], w[cut:])
    near(joined.log_normalizer(q), Empirical(k, w).log_normalizer(q))
    near((Empirical(k[:cut]) + Empirical(k[cut:])).mean(q), Empirical(k).mean(q))
    mixed = Empirical(k[:cut]) + Empirical(k[cut:], w[cut:])
    near(mixed.mean(q), Empirical(k, torch.cat([torch.ones(cut), w[cut:]]).double()).mean(q))


@given(seed=seeds)
@law
def test_weights_are_repetitions(seed: int) -> None:
    k, _, q = draw(seed, 3, 2)
    repeated = Empirical(k[[0, 1, 1, 2, 2, 2]])
    weighted = Empirical(k, torch.tensor([1.0, 2.0, 3.0], dtype=F64))
    biased = Empirical(k, bias=torch.tensor([1.0, 2.0, 3.0], dtype=F64).log())
    for measure in (weighted, biased):
        for name in ("log_normalizer", "mean", "covariance", "conjugate"):
            x = repeated.mean(q) if name == "conjugate" else q
            near(getattr(measure, name)(x), getattr(repeated, name)(x), 1e-9)
    G = LogNormalizer(repeated)
    near(G.log_prob(k[1], q[0]).exp(), weighted.scores(q[0])[1])


@given(seed=seeds)
@law
def test_masks_are_those_of_sdpa(seed: int) -> None:
    k, v, q = draw(seed, 5, 3, 2)
    mask = torch.rand(2, 4, 5, generator=torch.Generator().manual_seed(seed)) > 0.5
    mask[0, 0] = False  # a query without points
    bias = randn(4, 5, seed=seed)
    expected = F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias.masked_fill(~mask, -torch.inf), scale=1.0
    )
    G = LogNormalizer(Empirical(k, bias=bias, mask=mask))
    near(G.mean(q, v), expected)
    near(G.mean(q.requires_grad_(), v).detach(), expected)


def test_no_queries_read_nothing() -> None:
    k, v, q = draw(0, 5, 3)
    G = LogNormalizer(Empirical(k))
    assert G.mean(q[:0], v).shape == (0, 3)
    assert G.value(q[:0]).shape == (0,)


def test_a_query_without_points_reads_zero_in_every_derivative() -> None:
    k, v, q = draw(0, 5, 3)
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[1] = False
    G = LogNormalizer(Empirical(k, mask=mask))
    q.requires_grad_()
    assert G.value(q)[1] == -torch.inf
    assert G.value(q)[0].isfinite()
    for function in (G.mean, G.covariance, lambda q: G.mean(q, v)):
        result = function(q)
        assert (result[1] == 0).all()
        (gradient,) = torch.autograd.grad(result.sum(), q, create_graph=True)
        assert (gradient[1] == 0).all()
        assert torch.autograd.grad(gradient.sum(), q)[0].isfinite().all()
    (gradient,) = torch.autograd.grad(G.value(q)[[0, 2, 3]].sum(), q)
    assert gradient.isfinite().all()


def test_gradcheck_of_everything_an_empirical_family_is_made_of() -> None:
    k, v, q = (x.requires_grad_() for x in draw(0, 4, 2))
    w, b = randn(4).exp().requires_grad_(), randn(4, 4, seed=1).requires_grad_()
    T = torch.tensor(0.7, dtype=F64, requires_grad=True)

    def family(k: Tensor, w: Tensor, b: Tensor, T: Tensor) -> LogNormalizer:
        return LogNormalizer(Empirical(k, w, bias=b), T)

    def value(k: Tensor, w: Tensor, b: Tensor, T: Tensor, q: Tensor) -> Tensor:
        return family(k, w, b, T).value(q)

    def mean(k: Tensor, w: Tensor, b: Tensor, T: Tensor, q: Tensor, v: Tensor) -> Tensor:
        return family(k, w, b, T).mean(q, v)

    assert gradcheck(value, (k, w, b, T, q))
    assert gradgradcheck(value, (k, w, b, T, q))
    assert gradcheck(mean, (k, w, b, T, q, v))
    assert gradgradcheck(mean, (k, w, b, T, q, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_reads_in_the_type_it_was_given(dtype: torch.dtype) -> None:
    k, v, q = draw(0, 5, 3)
    G, exact = LogNormalizer(Empirical(k.to(dtype)), 2.0), LogNormalizer(Empirical(k), 2.0)
    assert G.mean(q.to(dtype), v.to(dtype)).dtype == dtype
    near(G.mean(q.to(dtype), v.to(dtype)).double(), exact.mean(q, v), 10 * torch.finfo(dtype).eps)
    near(G.value(q.to(dtype)).double(), exact.value(q), 20 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("masked", [False, True])
def test_what_is_not_finite_is_refused_though_the_kernel_reads_it(bad: float, masked: bool) -> None:
    """−∞ along keys of one sign weighs none of them, as a mask does: kernels read 0."""
    k, _, q = (x.abs() for x in draw(0, 5, 3))
    mask = (torch.arange(4).unsqueeze(-1) > 1).expand(4, 5) if masked else None
    q[1, 2] = bad
    G = LogNormalizer(Empirical(k, mask=mask))
    with pytest.raises(FamilyError, match=r"^eta has 1 of 12 numbers that are not finite; "):
        G.mean(q)


def test_values_that_are_not_finite_are_read_as_they_are() -> None:
    k, v, q = draw(0, 5, 3)
    v[0, 0] = math.inf
    read = LogNormalizer(Empirical(k)).mean(q, v)
    assert (read[:, 0] == math.inf).all()
    near(read[:, 1:], F.scaled_dot_product_attention(q, k, v[:, 1:], scale=1.0))


# --- temperature ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("T", [1e-300, 1e-38, 1e-12, 1e-3, 1e3, 1e12, 1e30])
def test_every_temperature_is_defined(dtype: torch.dtype, T: float) -> None:
    k, _, q = (x.to(dtype) for x in draw(0, 5, 3))
    q.requires_grad_()
    measures = [Empirical(k), Gaussian(k[0]), Sphere(3), Hypercube(3), Interval(k[0], k[0] + 1)]
    for measure in measures:
        G = LogNormalizer(measure, T)
        assert not G.value(q).isnan().any()
        assert G.entropy(q).isnan().logical_not().all() or isinstance(measure, Gaussian)
        mean = G.mean(q)
        assert not mean.isnan().any()
        assert not torch.autograd.grad(mean.sum(), q, allow_unused=True)[0].isnan().any()


def test_cold_is_the_maximum_and_hot_the_average() -> None:
    k, v, q = draw(0, 5, 3)
    cold, hot = LogNormalizer(Empirical(k), 1e-200), LogNormalizer(Empirical(k), 1e12)
    best, at = (q @ k.T).max(-1)
    near(cold.value(q), best)
    near(cold.mean(q, v), v[at])
    near(hot.mean(q, v), v.mean(0).expand(4, 3), 1e-10)
    near(cold.covariance(q), torch.zeros(4, 3, 3, dtype=F64))


@pytest.mark.parametrize("T", [1e-30, 1e-39, 1e-300, 1e-320])
def test_cold_scores_that_all_leave_the_range_below_have_a_maximum_too(T: float) -> None:
    k, q = (
        torch.tensor([[1.0, 2.0], [3.0, 2.0]]) * 1e15,
        torch.tensor([[1.0, -3.0], [-1.0, -2.0]]),
    )
    near(LogNormalizer(Empirical(k), T).mean(q), k[[1, 0]])


@given(seed=seeds, T=st.sampled_from([0.2, 3.0]))
@law
def test_temperature_is_a_scale(seed: int, T: float) -> None:
    k, _, q = draw(seed, 5, 3)
    G, plain = LogNormalizer(Empirical(k), T), LogNormalizer(Empirical(k))
    near(G.value(q), T * plain.value(q / T))
    mu = G.mean(q)
    near(G.conjugate(mu), T * plain.conjugate(mu))
    rows = torch.tensor([[0.5], [T], [1.0], [2.0]], dtype=F64)
    each = LogNormalizer(Empirical(k), rows)
    alone = [LogNormalizer(Empirical(k), float(row)) for row in rows]
    for name in ("value", "mean", "covariance", "jacobian", "entropy", "conjugate"):
        x = mu if name == "conjugate" else q
        expected = torch.stack([getattr(one, name)(y) for one, y in zip(alone, x, strict=True)])
        near(getattr(each, name)(x), expected)
    near(each.mean(each.natural(mu)), mu)


def test_temperature_keeps_the_digits_of_what_it_scales() -> None:
    """0.1 has more digits in float64 than torch's own default gives it."""
    G = LogNormalizer(Gaussian(torch.zeros(2, dtype=F64)), 0.1)
    ones = torch.ones(2, dtype=F64)
    near(G.conjugate(ones), torch.tensor(0.1, dtype=F64))
    near(G.natural(ones), 0.1 * ones)


# --- entmax -----------------------------------------------------------------------------------

ALPHAS = [1.0001, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 4.0]
alphas = pytest.mark.parametrize("alpha", ALPHAS)


@alphas
@given(seed=seeds, n=sizes, scale=st.sampled_from([0.1, 1.0, 30.0]))
@law
def test_entmax_equals_the_reference(alpha: float, seed: int, n: int, scale: float) -> None:
    theta = scale * randn(n, seed=seed)
    expected = torch.tensor(reference.entmax(theta.tolist(), alpha), dtype=F64)
    near(entmax(theta, alpha), expected, 1e-11 if alpha > 1.01 else 1e-9)


def precise_entmax(theta: list[float], alpha: float) -> list[float]:
    """With forty digits: where weight begins its slope is infinite, and float64 does not do."""
    import mpmath

    with mpmath.workdps(60):
        e = mpmath.mpf(alpha) - 1
        scores = [e * mpmath.mpf(t) for t in theta]
        low, high = max(scores) - 1, max(scores)
        for _ in range(190):
            tau = (low + high) / 2
            total = sum((s - tau) ** (1 / e) for s in scores if s > tau)
            low, high = (tau, high) if total >= 1 else (low, tau)
        p = [(s - low) ** (1 / e) if s > low else mpmath.mpf(0) for s in scores]
        return [float(x / sum(p)) for x in p]


@pytest.mark.parametrize("alpha", [2.0001, 2.5, 3.0, 5.0, 10.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_very_sparse_entmax_has_its_digits(alpha: float, dtype: torch.dtype, seed: int) -> None:
    theta = randn(20, seed=seed).to(dtype)
    for scale in (0.01, 1.0):
        expected = precise_entmax((scale * theta).tolist(), alpha)
        p = entmax(scale * theta, alpha)
        near(p.double(), torch.tensor(expected, dtype=F64), 20 * torch.finfo(dtype).eps)
        (slope,) = torch.autograd.grad(
            (entmax(x := (scale * theta).requires_grad_(), alpha) * randn(20).to(dtype)).sum(), x
        )
        assert not slope.isnan().any()


@pytest.mark.parametrize("alpha", [1.1, 1.5, 2.0])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_entmax_of_long_rows_of_which_few_can_have_weight(alpha: float, scale: float) -> None:
    theta = scale * randn(3, 400)
    expected = [reference.entmax(row, alpha) for row in theta.tolist()]
    near(entmax(theta, alpha), torch.tensor(expected, dtype=F64), 1e-11)


@alphas
@given(seed=seeds, scale=st.sampled_from([0.1, 1.0, 30.0]))
@law
def test_entmax_agrees_with_the_entmax_package(alpha: float, seed: int, scale: float) -> None:
    """`entmax_bisect` is right where it has had enough halvings, in float64."""
    import entmax as package

    theta = scale * randn(7, 20, seed=seed)
    if alpha > 1.01:  # below, its powers lose the digits
        near(entmax(theta, alpha), package.entmax_bisect(theta, alpha, n_iter=80), 1e-6)
    if alpha == 1.5:
        near(entmax(theta, alpha), package.entmax15(theta), 1e-6)
    if alpha == 2:
        near(entmax(theta, alpha), package.sparsemax(theta), 1e-6)


@given(seed=seeds)
@law
def test_entmax_tends_to_softmax(seed: int) -> None:
    theta = randn(3, 8, seed=seed)
    for epsilon in (1e-3, 1e-6, 1e-9, 1e-13):
        near(entmax(theta, 1 + epsilon), theta.softmax(-1), 20 * epsilon + 1e-12)
    assert entmax(theta, 1.0).equal(theta.softmax(-1))


@alphas
@given(seed=seeds)
@law
def test_fenchel_young(alpha: float, seed: int) -> None:
    omega, theta = Tsallis(alpha), randn(3, 5, seed=seed)
    p, y = omega.prediction(theta), randn(3, 5, seed=seed + 1).softmax(-1)
    near(p.sum(-1), torch.ones(3, dtype=F64))
    near(omega.conjugate(theta) + omega.omega(p), (theta * p).sum(-1))
    assert (omega.loss(theta, y) >= -1e-12).all()
    near(omega.loss(theta, p), torch.zeros(3, dtype=F64))
    gradient = torch.func.vmap(torch.func.grad(omega.conjugate))
    near(gradient(theta), p, 1e-8)
    jacobian = torch.func.vmap(torch.func.jacrev(omega.prediction))(theta)
    largest = float(p[p > 0].pow(2 - alpha).max())  # s in diag(s) − ssᵀ/Σs, which cancels
    near(omega.jacobian(theta), jacobian, max(1e-12, 1e-14 * largest))
    assert (torch.linalg.eigvalsh(jacobian) >= -max(1e-12, 1e-14 * largest)).all()


@alphas
def test_entmax_gradcheck_once_and_twice(alpha: float) -> None:
    theta = (randn(2, 5) / 3).requires_grad_()
    assert (entmax(theta, alpha) > 1e-3).sum() >= 4
    assert gradcheck(lambda x: entmax(x, alpha), theta)
    assert gradgradcheck(lambda x: entmax(x, alpha), theta)
    assert gradgradcheck(Tsallis(alpha).conjugate, theta)


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0, 3.0])
def test_entmax_of_masked_huge_and_tiny_scores(alpha: float) -> None:
    theta = torch.tensor([[-torch.inf] * 3, [0.0, -torch.inf, 1.0], [1e30, -1e30, 1e30]])
    theta.requires_grad_()
    p = entmax(theta, alpha)
    assert p[0].tolist() == [0, 0, 0]
    assert p[1, 1] == 0
    assert p[2].tolist() == [0.5, 0, 0.5]
    assert torch.autograd.grad(p[:, 0].sum(), theta)[0].isfinite().all()
    omega, (one, other) = Tsallis(alpha), torch.eye(3)[[0, 1]]
    seen = torch.tensor([True, False, True])
    near(omega.conjugate(theta[1]), omega.conjugate(theta[1, seen]), 1e-6)
    near(omega.loss(theta[1], one), omega.loss(theta[1, seen], one[seen]), 1e-6)
    assert torch.autograd.grad(omega.loss(theta[1], one), theta)[0].isfinite().all()
    assert omega.loss(theta[1], other) == torch.inf  # what takes no part cannot be the answer


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_entmax_along_any_dimension(dim: int) -> None:
    theta = randn(4, 3, 5)
    near(entmax(theta, 1.5, dim).sum(dim), torch.ones(1, dtype=F64).expand_as(theta.sum(dim)))
    half = entmax(theta.bfloat16(), 1.5, dim)
    assert half.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_entmax_in_forward_mode() -> None:
    theta = randn(5)
    near(torch.func.jacfwd(lambda x: entmax(x, 1.5))(theta), Tsallis(1.5).jacobian(theta))


# --- words ------------------------------------------------------------------------------------

NAN = torch.tensor([1.0, float("nan")])
K = torch.ones(3, 2)
G = LogNormalizer(Empirical(K))
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "eta": (
        lambda: G.mean(NAN),
        "eta has 1 of 2 numbers that are not finite; a family needs finite parameters: look for "
        "NaN or infinity in what computed them.",
    ),
    "mu": (lambda: G.conjugate(NAN), "mu has 1 of 2 numbers that are not finite; "),
    "points": (lambda: Empirical(NAN[None]), "points has 1 of 2 numbers that are not finite; "),
    "temperature": (
        lambda: LogNormalizer(Empirical(K), 0.0),
        "temperature=0.0 is not a positive, finite number; a small one such as 1e-6 gives the hard "
        "maximum, a large one the plain average.",
    ),
    "temperatures": (
        lambda: LogNormalizer(Empirical(K), torch.tensor([1.0, -1.0])),
        "temperature=[1.0, -1.0] is not a positive, finite number; ",
    ),
    "empty": (
        lambda: Empirical(torch.empty(0, 2)),
        "points of shape (0, 2) are an empty support, on which there is no distribution; give at "
        "least one point.",
    ),
    "width": (
        lambda: G.value(torch.ones(5, 3)),
        "eta of shape (5, 3) has 3 columns, but this family has 2; give eta of shape (…, 2).",
    ),
    "weights": (
        lambda: Empirical(K, torch.ones(2)),
        "weights of shape (2,) do not fit points of shape (3, 2); give one for each point: shape "
        "(3,).",
    ),
    "negative weights": (
        lambda: Empirical(K, torch.tensor([1.0, -1.0, 1.0])),
        "weights must not be negative, and not all 0; to leave points out give them weight 0, to "
        "weigh them by logarithms use bias.",
    ),
    "bias": (
        lambda: Empirical(K, bias=torch.ones(2)),
        "bias of shape (2,) does not fit 3 points; it must broadcast with scores of shape "
        "(…, q, 3).",
    ),
    "nan bias": (
        lambda: Empirical(K, bias=torch.full((3,), torch.inf)),
        "bias has NaN or +∞; finite numbers and −∞ (no part) are meant.",
    ),
    "sum": (
        lambda: Empirical(K) + Memory(K, K),
        "an empirical measure cannot be added to Memory(keys=(3, 2), values=(3, 2), "
        "kernel=Dot()); give Empirical(points).",
    ),
    "values": (
        lambda: LogNormalizer(Hypercube(2)).mean(torch.zeros(2), torch.ones(4, 3)),
        "values={one row for each point} need a measure of points, and Hypercube(2) has none; "
        "leave values out, or use Empirical(points).",
    ),
    "rows of values": (
        lambda: G.mean(torch.ones(5, 2), torch.ones(4, 1)),
        "values of shape (4, 1) do not belong to 3 points; give one row for each: shape (…, 3, m).",
    ),
    "one query for many measures": (
        lambda: LogNormalizer(Empirical(torch.ones(4, 3, 2))).mean(torch.ones(2)),
        "eta of shape (2,) is one query, but points of shape (4, 3, 2) are a batch of measures; "
        "give eta of shape (…, q, 2).",
    ),
    "types": (
        lambda: LogNormalizer(Laplace(lambda x: x[:, 0], [0.0], [1.0])).value(torch.ones(5, 1)),
        "eta is torch.float32, but the points are torch.float64; give eta as "
        "eta.to(torch.float64).",
    ),
    "nothing to draw": (
        lambda: Empirical(K, mask=torch.tensor([[True] * 3, [False] * 3])).sample(torch.ones(2, 2)),
        "nothing can be drawn where every point is masked; leave such η out.",
    ),
    "outside": (
        lambda: LogNormalizer(Empirical(torch.eye(2))).natural(torch.tensor([2.0, 2.0])),
        "no natural parameter was found whose mean is mu, after 100 Newton steps; mu must lie "
        "inside the convex hull of the support, not on its edge or beyond.",
    ),
    "bits": (
        lambda: Hypercube(2).natural(torch.tensor([0.5, 1.5])),
        "mu has numbers from 0.5 to 1.5, but means of bits lie between 0 and 1.",
    ),
    "counts": (
        lambda: Poisson(1).conjugate(torch.tensor([-1.0])),
        "mu is -1 somewhere, but means of counts are ≥ 0.",
    ),
    "sphere": (
        lambda: Sphere(2).natural(torch.tensor([1.0, 1.0])),
        "mu has length 1.414 somewhere, but means of points of the sphere lie inside it: ‖mu‖ < 1.",
    ),
    "no sphere": (lambda: Sphere(0), "Sphere(0) has no width; it must be 1 or more."),
    "chain": (
        lambda: Chain(0, 2),
        "length=0 and labels=2 leave nothing to choose; both must be 1 or more.",
    ),
    "lengths": (
        lambda: Chain(3, 2).statistics(torch.zeros(2, 3, dtype=torch.long), torch.tensor([0, 4])),
        "lengths from 0 to 4 do not fit Chain(length=3, labels=2); each must lie between 1 and 3.",
    ),
    "nothing left": (
        lambda: Chain(2, 1).log_normalizer(torch.full((3,), -torch.inf)),
        "every sequence of Chain(length=2, labels=1) is excluded by scores of −∞; leave at least "
        "one.",
    ),
    "box": (
        lambda: Interval(torch.ones(1), torch.zeros(1)),
        "low=[1.0] must lie below high=[0.0] throughout.",
    ),
    "out of the box": (
        lambda: Interval(torch.zeros(1), torch.ones(1)).natural(torch.tensor([2.0])),
        "mu must lie inside the box from [0.0] to [1.0].",
    ),
    "flat": (
        lambda: Gaussian(torch.zeros(2), torch.ones(2, 2)),
        "the covariance is not positive definite; a flat Gaussian is "
        "Pushforward(Gaussian(mean), matrix).",
    ),
    "map": (
        lambda: Pushforward(Hypercube(2), torch.ones(3, 3)),
        "A of shape (3, 3) does not map Hypercube(2), whose points have 2 coordinates; give a "
        "matrix of shape (d, 2).",
    ),
    "no density": (
        lambda: Pushforward(Hypercube(2), torch.ones(1, 2)).log_base(torch.ones(1)),
        "A of shape (1, 2) cannot be undone, so the image has no density; use a square A of full "
        "rank.",
    ),
    "flat image": (
        lambda: Pushforward(Hypercube(2), torch.ones(2, 2)).log_base(torch.ones(2)),
        "A of shape (2, 2) cannot be undone, so the image has no density; use a square A of full "
        "rank.",
    ),
    "shift": (
        lambda: Pushforward(Hypercube(2), torch.ones(1, 2), torch.ones(2)),
        "b of shape (2,) cannot be added to A x; give 1 numbers, as many as A has rows.",
    ),
    "covariance": (
        lambda: Gaussian(torch.zeros(2), torch.eye(3)),
        "a covariance of shape (3, 3) does not belong to a mean of shape (2,); give one of shape "
        "(…, 2, 2).",
    ),
    "mixed points": (
        lambda: Mixture(Empirical(torch.ones(4, 3, 2))),
        "Empirical(points=(4, 3, 2)) is not a component; a mixture of points is one "
        "Empirical(points, weights), and two of them are added by +.",
    ),
    "weights of a mixture": (
        lambda: Mixture(Gaussian(K), torch.ones(2)).mean(torch.ones(2)),
        "2 weights do not weigh 3 components; give one for each.",
    ),
    "mixture": (
        lambda: Mixture(Gaussian(K), torch.tensor([1.0, -1.0, 1.0])),
        "weights=[1.0, -1.0, 1.0] do not weigh components; give a vector of numbers that are "
        "finite and not negative, one for each.",
    ),
    "alpha": (
        lambda: entmax(K, 0.5),
        "alpha=0.5 is no entmax; 1 is softmax, 1.5 usual, 2 sparsemax, and larger ones are sparser "
        "still.",
    ),
    "does not normalize": (
        lambda: Laplace(lambda x: 1 / (1 + x[:, 0].abs()), [-math.inf], [math.inf]),
        "the density does not normalize on this grid: its mass is ",
    ),
    "no mass": (
        lambda: Laplace(lambda x: 0 * x[:, 0], [0.0], [1.0]),
        "the density does not normalize on this grid: its mass is 0, and 0 on one half as fine. "
        "Give one that is integrable, narrower bounds or more nodes.",
    ),
    "negative density": (
        lambda: Laplace(lambda x: x[:, 0], [-1.0], [1.0]),
        "the density is negative or NaN somewhere; densities are ≥ 0.",
    ),
    "density's shape": (
        lambda: Laplace(lambda x: x, [0.0], [1.0]),
        "the density gave shape (200, 1) for points of shape (200, 1); it must give one number a "
        "point: shape (200,).",
    ),
    "bounds": (
        lambda: Laplace(lambda x: x[:, 0], [1.0], [0.0]),
        "low=[1.0] and high=[0.0] bound no box; give one low < high a dimension.",
    ),
    "nodes": (
        lambda: Laplace(lambda x: x[:, 0], [0.0] * 4, [1.0] * 4),
        "nodes=200 in 4 dimensions make 1,600,000,000 points; 4 or more a dimension, and 4,000,000 "
        "in all at most, are possible.",
    ),
    "statistic": (
        lambda: Laplace(
            lambda x: torch.ones(len(x)), [0.0], [1.0], statistic=lambda x: x**2
        ).log_base(torch.ones(1)),
        "the density of a statistic u(x) is not known; ask without one.",
    ),
}


class Silent(Measure):
    """A measure that says no more than it must."""

    width = 1

    def __repr__(self) -> str:
        return "Silent"

    def log_normalizer(self, eta: Tensor) -> Tensor:
        return eta.square().sum(-1) / 2


WRONG |= {
    "no base": (
        lambda: LogNormalizer(Silent()).log_prob(torch.ones(1), torch.ones(1)),
        "Silent does not say its density log h(x); define `log_base`.",
    ),
    "no draws": (
        lambda: LogNormalizer(Silent()).sample(torch.ones(1)),
        "Silent does not say how to draw from it; define `sample`.",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_say_what_was_given_what_was_expected_and_what_to_do(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    act, message = WRONG[case]
    with pytest.raises(FamilyError) as caught:
        act()
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value, ValueError)


def test_a_measure_of_ones_own_needs_G_only() -> None:
    G, eta = LogNormalizer(Silent()), randn(4, 1)
    near(G.mean(eta), eta)
    near(G.covariance(eta), torch.ones(4, 1, 1, dtype=F64))
    near(G.conjugate(eta), eta.square().sum(-1) / 2)


def test_prints() -> None:
    G = LogNormalizer(Empirical(K), temperature=2.0)
    assert repr(G) == "LogNormalizer(measure=Empirical(points=(3, 2)), temperature=2.0)"
