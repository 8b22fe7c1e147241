"""Attention equals the solved regression, for every kind; and what the solver says of itself."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.svm import SVR
from tests.attention.cases import draw, near

from dualform import attention
from dualform.attention import BatchNorm, Primal, RmsNorm, Shorten, UnitLength, svr
from dualform.errors import AttentionError
from dualform.memory import Cosine, Dot, EluPlusOne, Exponential, Polynomial, Relu

PRIMALS = {
    "softmax": Primal(),
    "softmax, scaled": Primal(kernel=Exponential(scale=0.3), epsilon=0.01, C=10.0),
    "linear, elu": Primal(kernel=EluPlusOne()),
    "linear, relu": Primal(kernel=Relu(), C=0.5),
    "polynomial": Primal(kernel=Polynomial(2)),
    "dot": Primal(kernel=Dot(), normalizer="one"),
    "cosine": Primal(keys=(UnitLength(),), kernel=Exponential(scale=2.0)),
    "cosine, linear": Primal(kernel=Cosine(), normalizer="one"),
    "batch_norm": Primal(keys=(BatchNorm(),)),
    "batch_norm, beta": Primal(keys=(BatchNorm(beta=0.5, eps=0.1),)),
    "batch_norm, centered": Primal(keys=(BatchNorm(beta=0.5, variance=False),)),
    "batch_norm, linear": Primal(keys=(BatchNorm(),), kernel=EluPlusOne()),
    "scaled_heads": Primal(keys=(Shorten(3),)),
    "scaled_heads, stride": Primal(keys=(Shorten(2, "stride"),)),
    "scaled_heads, linear": Primal(keys=(Shorten(3),), kernel=EluPlusOne()),
    "batch_norm_scaled_heads": Primal(keys=(Shorten(2), BatchNorm(eps=0.1))),
    "rms": Primal(keys=(RmsNorm(),)),
}
SEEING = {
    "causal": Primal(sees="causal"),
    "local": Primal(sees=3),
    "linear, causal": Primal(kernel=EluPlusOne(), sees="causal"),
    "linear, local": Primal(kernel=EluPlusOne(), sees=3),
    "rms, causal": Primal(keys=(RmsNorm(),), sees="causal"),
    "batch_norm, causal": Primal(keys=(BatchNorm(eps=0.1),), sees="causal"),
    "scaled_heads, causal": Primal(keys=(Shorten(3),), sees="causal"),
    "batch_norm_scaled_heads, causal": Primal(keys=(Shorten(3), BatchNorm(eps=0.1)), sees="causal"),
}


@pytest.mark.parametrize("name", PRIMALS)
@settings(deadline=None, max_examples=4)
@given(seed=st.integers(0, 2**31), n=st.sampled_from([12, 48]))
def test_attention_is_the_solved_regression(name: str, seed: int, n: int) -> None:
    primal = PRIMALS[name]
    q, k, y = (x[0] for x in draw(seed, 5, n, batch=(1,)))
    solution = primal.solve(k, y)
    assert solution.gap <= 1e-6
    layer = primal.attention()
    read = layer(*(x[None] for x in (q, k, solution.values)))[0] + solution.b
    near(read, solution.predict(q), 1e-10)


@pytest.mark.parametrize("name", SEEING)
@pytest.mark.parametrize("at", [0, 4, 11])
def test_a_query_that_sees_some_keys_has_its_own_regression(name: str, at: int) -> None:
    primal = SEEING[name]
    q, k, y = (x[0] for x in draw(7, 12, 12, batch=(1,)))
    solution = primal.solve(k, y, at=at)
    assert solution.gap <= 1e-6
    read = primal.attention()(*(x[None] for x in (q, k, solution.values)))[0] + solution.b
    near(read[at], solution.predict(q[at : at + 1])[0], 1e-10)


@pytest.mark.parametrize("kernel", [EluPlusOne(), Polynomial(2)])
def test_finite_features_give_the_same_by_weights(kernel: EluPlusOne | Polynomial) -> None:
    q, k, y = (x[0] for x in draw(1, 5, 12, batch=(1,)))
    solution = Primal(kernel=kernel).solve(k, y)
    phi, phi_k = kernel.features(q), kernel.features(k)
    h, h_k = phi @ phi_k.sum(0), phi_k @ phi_k.sum(0)
    own = phi_k.square().sum(-1) / h_k**2  # G_jj; duals are in units of 1 over its mean
    W = solution.beta.T / own.log().mean().exp() @ (phi_k / h_k[:, None])
    near(phi @ W.T / h[:, None] + solution.b, solution.predict(q), 1e-10)


def test_heads_are_a_sum_of_regressions() -> None:
    """Multi-head attention: each head its own regression, added up by the output projection."""
    q, k, y = draw(2, 5, 12, batch=(4,))
    solutions = [Primal().solve(*pair) for pair in zip(k, y, strict=True)]
    values = torch.stack([s.values for s in solutions])
    sums = sum(s.predict(x) for s, x in zip(solutions, q, strict=True))
    b = sum(s.b for s in solutions)
    near(attention.softmax(q, k, values).sum(0) + b, sums, 1e-10)


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**31), C=st.sampled_from([0.1, 1.0, 10.0]))
def test_solver_agrees_with_libsvm(seed: int, C: float) -> None:
    generator = np.random.default_rng(seed)
    x, y = generator.normal(size=(15, 3)), generator.normal(size=15)
    G = np.exp(x @ x.T / 3**0.5)
    ours = svr.solve(G, y, epsilon=0.1, C=C)
    theirs = SVR(kernel="precomputed", C=C, epsilon=0.1, tol=1e-10).fit(G, y)
    dual = np.zeros(15)
    dual[theirs.support_] = theirs.dual_coef_[0]
    np.testing.assert_allclose(ours.beta, dual, atol=1e-5 * C)
    assert 0 <= ours.gap + 1e-12 < 1e-8


def test_transforms_by_hand() -> None:
    x, keys = torch.tensor([[1.0, 7.0]]), torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    near(RmsNorm(eps=11.0).apply(x, keys), x / 6, 1e-6)  # √(25 + 11)
    near(BatchNorm(beta=0.5, eps=3.0).apply(x, keys), torch.tensor([[0.0, 6 / 7**0.5]]), 1e-6)
    near(UnitLength().apply(x, keys), x / 50**0.5, 1e-6)


@pytest.mark.parametrize("length", [50.0, 1000.0])
def test_keys_of_any_length_can_be_solved_for(length: float) -> None:
    """exp(k·k/√d) leaves float64 here; what a regression needs of it does not."""
    q, k, y = (x[0] for x in draw(4, 5, 12, batch=(1,)))
    k = length * torch.nn.functional.normalize(k, dim=-1)
    solution = Primal(C=10.0).solve(k, y)
    assert solution.C == 10.0
    assert solution.gap <= 1e-6
    near(attention.softmax(q, k, solution.values) + solution.b, solution.predict(q), 1e-10)
    assert solution.predict(k).sub(y).abs().max() <= 0.1 + 1e-5  # C is dear enough to fit all


@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_a_price_means_the_same_at_every_scale_of_features(seed: int, scale: float) -> None:
    _, k, y = (x[0] for x in draw(seed, 5, 12, batch=(1,)))
    plain, scaled = (
        Primal(kernel=Dot(), normalizer="one", C=0.3).solve(x, y) for x in (k, scale * k)
    )
    near(plain.predict(k), scaled.predict(scale * k), 1e-5)
    near(plain.beta, scaled.beta, 1e-4)


def test_duals_lie_in_the_box_and_ties_are_free() -> None:
    q, k, y = (x[0] for x in draw(3, 5, 12, batch=(1,)))
    tight = Primal(C=1e-3).solve(k, y)
    assert float(tight.beta.abs().max()) == pytest.approx(tight.C)
    assert tight.support.float().mean() > 0.8
    wide = Primal(epsilon=100.0).solve(k, y)
    assert not wide.support.any()
    near(wide.predict(q) - wide.b, torch.zeros(5, 2).double(), 1e-7)


def test_explanations_carry_the_choices() -> None:
    text = Primal(keys=(Shorten(4), BatchNorm(beta=0.5)), sees="causal", epsilon=0.2).explain()
    assert text.splitlines() == [
        "Model     f(x) = W Φ(Tx)/h(x) + b with h(x) = Σ_j Φ(Tx)·Φ(Tk_j), over keys up to the "
        "query's position, mean of every 4",
        "Features  Φ(x)·Φ(y) = exp(x·y/√D)",
        "Inputs    Shorten(factor=4, pool='mean')",
        "Inputs    BatchNorm(beta=0.5, eps=1e-05, variance=True)",
        "Primal    min ½‖W‖² + C Σ_j (ξ_j + ξ̃_j), |y_j − f(k_j)| ≤ ε + ξ_j, ε = 0.2, C = 1/ḡ, "
        "ḡ the geometric mean of G_jj",
        "KKT       W = Σ_j (α_j − α̃_j) Φ(Tk_j)/h(k_j), 0 ≤ α, α̃ ≤ C",
        "Dual      max y·(α − α̃) − ε Σ(α + α̃) − ½ (α − α̃)ᵀG(α − α̃), G_ij = "
        "Φ(Tk_i)·Φ(Tk_j)/(h(k_i) h(k_j)), Σ(α − α̃) = 0",
        "Values    v_j = (α_j − α̃_j)/h(k_j); in a network v_j = W_V x_j stands in for them",
        "y(q) = Σ_j exp(Tq·Tk_j/√D) v_j / Σ_j exp(Tq·Tk_j/√D) + b, over keys up to the query's "
        "position, mean of every 4",
    ]
    latex = Primal(kernel=Dot(), normalizer="one", keys=(UnitLength(),)).explain(latex=True)
    assert r"T x &= x / \lVert x \rVert \\" in latex
    assert r"y(q) &= \sum_j \varphi(Tq)^\top\varphi(Tk_j)\, v_j + b" in latex
    assert latex.count("{") == latex.count("}")


@pytest.mark.parametrize("name", [*PRIMALS, *SEEING])
def test_latex_says_all_that_the_text_does(name: str) -> None:
    primal = (PRIMALS | SEEING)[name]
    text, latex = primal.explain(), primal.explain(latex=True)
    assert latex.count("{") == latex.count("}")
    assert latex.count("&") == latex.count("\\\\") + 1  # one in each line
    (seen,) = {line.split(", over ")[1] for line in text.splitlines() if ", over " in line}
    assert rf"\text{{over {seen}}}" in latex
    for said in (
        rf"\varepsilon = {primal.epsilon:g},\ C = {primal.C:g}/\bar g",
        r"\max_{\alpha,\tilde\alpha}",
        r"\sum_j(\alpha_j - \tilde\alpha_j) = 0",
        r"W_V x_j",
        r"G_{ij} &= \Phi(",
    ):
        assert said in latex
    for step in primal.keys:
        assert (step.pool if isinstance(step, Shorten) else step.formula) in latex


WRONG = {
    "sees": (
        lambda: Primal(sees="past"),
        "sees='past' says nothing; give 'all', 'causal', or how many keys on each side.",
    ),
    "window": (
        lambda: Primal(sees=-1),
        "sees=-1 says nothing; give 'all', 'causal', or how many keys on each side.",
    ),
    "unknown normalizer": (
        lambda: Primal(kernel=Dot(), normalizer="max"),
        "normalizer='max' is unknown; give 'sum', 'one', or a function of the products with the "
        "keys (…, n, keys) that gives (…, n, 1).",
    ),
    "price": (
        lambda: Primal(C=0.0),
        "C=0.0 and epsilon=0.1 make no regression; C must be positive, and epsilon not negative.",
    ),
    "normalizer": (
        lambda: Primal(normalizer="one"),
        "Exponential with normalizer='one' would be a sum of unbounded exponentials; use "
        "normalizer='sum', or a kernel with finite features.",
    ),
    "order": (
        lambda: Primal(keys=(BatchNorm(), Shorten(2))),
        "Shorten must come first in keys: it is about the data.",
    ),
    "position": (
        lambda: Primal(sees="causal").solve(torch.ones(3, 2), torch.ones(3, 1)),
        "sees='causal' and at=None: a query that sees all keys needs no position, any other "
        "does; its regression is fitted to the keys it sees.",
    ),
    "unpaired": (
        lambda: Primal().solve(torch.ones(3, 2), torch.ones(4, 1)),
        "keys of shape (3, 2) and targets of shape (4, 1) are no data of one regression; give keys "
        "(n, d) and targets (n, m), a head at a time.",
    ),
    "lengths": (
        lambda: Primal().solve(torch.tensor([[30.0, 0.0], [1.0, 0.0]]), torch.ones(2, 1)),
        "keys of very different lengths make no regression: their features Φ(k)/h(k) have squared "
        "lengths from 1e-276 to 1e-18, and float64 cannot weigh them against each other. Bring "
        "keys to one length (keys=(RmsNorm(),) or (UnitLength(),)), or take a smaller scale "
        "(kernel=Exponential(scale=…)).",
    ),
    "too long": (
        lambda: Primal(normalizer=lambda p: 1 + p.sum(-1, keepdim=True)).solve(
            50 * torch.eye(3), torch.ones(3, 1)
        ),
        "Φ(k_i)·Φ(k_j)/(h(k_i) h(k_j)) is not finite for all keys: the keys are not, or their "
        "products or h leave float64. Bring keys to a smaller length (keys=(RmsNorm(),) or "
        "(UnitLength(),)), or take a smaller scale.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    act, message = WRONG[name]
    with pytest.raises(AttentionError) as caught:
        act()
    assert str(caught.value) == message


@pytest.mark.parametrize("length", [1e2, 1e3, 1e4])
def test_long_keys_make_a_regression(length: float) -> None:
    """Whose exponentials are never formed: they would be exp(length²/√D)."""
    k, y = (x[0, 0] for x in draw(0, 12, 12, batch=(1, 1))[1:])
    k = length * torch.nn.functional.normalize(k, dim=1)
    primal = Primal(C=10.0)
    solution = primal.solve(k, y)
    assert solution.gap <= 1e-6
    for found in (solution.values, solution.beta, solution.predict(k)):
        assert found.isfinite().all()
    near(primal.attention()(k, k, solution.values) + solution.b, solution.predict(k), 1e-9)
    assert (solution.predict(k) - y).abs().max() <= primal.epsilon + 1e-6


def test_a_gap_that_stays_open_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svr, "_minimum", lambda G, y, epsilon, C: (np.zeros(len(y)), 0.0))
    with pytest.raises(AttentionError, match=r"to a duality gap of 1.0e\+00 only, and 1e-06 is"):
        svr.solve(np.eye(2), np.array([1.0, -1.0]), 0.1, 1.0)


def test_without_the_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "clarabel", None)
    with pytest.raises(ImportError, match=r"pip install 'dualform\[attention\]'"):
        Primal().solve(torch.ones(3, 2), torch.ones(3, 1))
