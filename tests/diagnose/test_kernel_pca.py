"""Kernel principal components of attention: against plain features, in any range of keys."""

from __future__ import annotations

import itertools
import math

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dualform import attention
from dualform.diagnose import audit_layer, audit_values, kernel_pca, kpca_values
from dualform.errors import AttentionError


def plain_gram(x: Tensor, k: Tensor, scale: float) -> Tensor:
    """`k(x, k_j) / (g(x) g(k_j))`, as it is written."""
    K, own = torch.exp(scale * x @ k.T), torch.exp(scale * k @ k.T)
    return K / (K.sum(1, keepdim=True) * own.sum(1))


@given(st.integers(0, 10_000), st.sampled_from([None, 0.3, 1.0]))
def test_attention_with_these_values_is_the_projection(seed: int, scale: float | None) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 12, 4, generator=generator, dtype=torch.float64).unbind()
    factor = 0.5 if scale is None else scale
    G = plain_gram(k, k, factor)
    center = torch.eye(12, dtype=torch.float64) - 1 / 12
    eigenvalues, vectors = torch.linalg.eigh(center @ G @ center)
    a = vectors.flip(1)[:, :3] / eigenvalues.flip(0)[:3].sqrt()
    expected = plain_gram(q, k, factor) @ (a - a.mean(0))
    found = torch.softmax(factor * q @ k.T, -1) @ kpca_values(k, 3, scale)
    sign = (found * expected).sum(0).sign()
    torch.testing.assert_close(found * sign, expected, rtol=1e-6, atol=1e-9)


def test_a_projection_is_never_longer_than_what_it_projects() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 20, 5, generator=generator, dtype=torch.float64).unbind()
    shares = []
    for count in (1, 5, 10, 19):
        found = audit_values(q, k, kpca_values(k, count))
        assert found.cosine == pytest.approx(1)
        assert found.cka == pytest.approx(1)
        assert found.gamma_spread < 1e-6
        shares.append(found.projected)
    assert shares == sorted(shares)
    assert shares[-1] <= 1


def test_axes_are_those_of_the_projection_of_the_keys_themselves() -> None:
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(15, 4, generator=generator, dtype=torch.float64)
    found = kernel_pca(k, 4)
    projected = found.gram @ found.duals
    torch.testing.assert_close(
        projected.T @ projected, torch.diag(found.eigenvalues), rtol=1e-8, atol=1e-12
    )
    torch.testing.assert_close(
        found.duals.T @ projected, torch.eye(4).double(), rtol=1e-8, atol=1e-10
    )


def test_long_keys_do_not_overflow() -> None:
    k = 40 * torch.nn.functional.normalize(
        torch.randn(10, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64), dim=1
    )
    assert math.isinf(float(torch.exp(k @ k.T).sum()))
    found = kernel_pca(k, 3)
    assert found.values.isfinite().all()
    assert math.isfinite(found.log_scale)
    assert audit_values(k, k, found.values).cosine == pytest.approx(1)


def keys_of(length: float, alike: bool) -> Tensor:
    """Twelve keys of one length, or of lengths up to it; alike, they differ by 1/length only."""
    k = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    return length * one + k / length if alike else length * k / k.norm(dim=1).max()


@pytest.mark.parametrize("length", [1e2, 3e2, 1e3])
@pytest.mark.parametrize("alike", [False, True])
def test_the_gram_matrix_of_long_keys_is_that_of_exact_arithmetic(
    length: float, alike: bool
) -> None:
    """Whose exponentials reach exp(500,000)."""
    k = keys_of(length, alike)
    with mpmath.workdps(60):
        x = mpmath.matrix(k.tolist())
        K = (x * x.T / 2).apply(mpmath.exp)
        g = [mpmath.fsum(K[i, :]) for i in range(12)]
        G = mpmath.matrix(12, 12)
        for i, j in itertools.product(range(12), repeat=2):
            G[i, j] = K[i, j] / (g[i] * g[j])
        largest = max(G)
        exact = torch.tensor([[float(G[i, j] / largest) for j in range(12)] for i in range(12)])
    center = torch.eye(12, dtype=torch.float64) - 1 / 12
    expected = center @ exact.double() @ center
    found = kernel_pca(k)
    torch.testing.assert_close(found.gram, expected, rtol=0, atol=1e-7)
    assert found.values.isfinite().all()
    assert found.values.abs().max() > 0


@pytest.mark.parametrize("length", [1e2, 1e3, 1e4])
@pytest.mark.parametrize("alike", [False, True])
def test_every_number_about_long_keys_is_finite(length: float, alike: bool) -> None:
    k = keys_of(length, alike)
    generator = torch.Generator().manual_seed(1)
    for v in (kernel_pca(k).values, torch.randn(12, 3, generator=generator), torch.ones(12, 1)):
        found = audit_values(k, k, v)
        assert found.null is not None
        for audit in (found, found.null):
            for name in ("cosine", "cka", "gamma_spread", "kernel_cka", "projected"):
                assert math.isfinite(getattr(audit, name))
    assert audit_values(k, k, kernel_pca(k).values).cosine > 0.99


def test_values_that_are_nothing_have_no_spread() -> None:
    k = keys_of(1.0, False)
    found = audit_values(k, k, torch.zeros(12, 2))
    assert math.isnan(found.gamma_spread)
    assert (found.cosine, found.cka, found.kernel_cka) == (0, 0, 0)


def test_the_projection_loss_is_that_of_its_formula() -> None:
    """J = mean(‖φ(q)‖² − ‖h‖²), with the 1/√D in k(q, q) that the published code leaves out."""
    q, k, v = torch.randn(3, 12, 4, generator=torch.Generator().manual_seed(0)).double().unbind()
    v = v / 100
    kernel = lambda x, y: (x @ y.T / 4**0.5).exp()  # noqa: E731
    features = kernel(q, q).diagonal() / kernel(q, k).sum(1).square()
    h = torch.softmax(q @ k.T / 4**0.5, 1) @ v
    found = audit_values(q, k, v)
    assert found.log_features == pytest.approx(float(features.mean().log()))
    loss = float((features - h.square().sum(1)).mean().log())
    assert found.log_loss == pytest.approx(loss)
    assert "log loss" in repr(found)
    assert math.isnan(audit_values(q, k, 100 * v).log_loss)  # longer than features: J < 0
    assert math.isfinite(audit_values(q, 1e3 * k, 0 * v).log_loss)  # too small for a float


def test_shuffled_values_are_no_principal_components() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 60, 8, generator=generator).unbind()
    found = audit_values(q, k, kpca_values(k, 4))
    assert found.null is not None
    assert found.null.cosine < 0.5 < found.cosine
    assert found.null.gamma_spread > 0.5
    other = audit_values(q, k, torch.randn(60, 4, generator=generator))
    assert "no kernel principal components" in other.finding
    assert "about as shuffled values have" in other.finding
    assert "kernel PCA has" in repr(other)


def test_every_head_of_a_layer_is_audited() -> None:
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(12, 3), torch.randn(20, 2, 12)
    heads = audit_layer(layer, x, sample=1)
    ours = attention.MultiheadAttention(12, 3)
    ours.load_state_dict(layer.state_dict())
    assert [head.cosine for head in heads] == [h.cosine for h in audit_layer(ours, x, sample=1)]
    assert len(heads) == 3


def test_a_layer_s_own_scale_and_shared_keys_are_taken() -> None:
    """Against the audit of heads that are projected by hand."""
    torch.manual_seed(0)
    x = torch.randn(2, 15, 12)
    for options in ({"scale": 0.9}, {"num_kv_heads": 1}, {}):
        layer = attention.MultiheadAttention(12, 3, batch_first=True, **options).double()
        W, biases = layer._projections()
        q, k, v = (x[1].double() @ w.T + b for w, b in zip(W, biases, strict=True))
        q, k, v = (t.view(15, -1, 4).transpose(0, 1) for t in (q, k, v))
        for head, found in enumerate(audit_layer(layer, x, sample=1)):
            at = head if len(k) == 3 else 0
            expected = audit_values(q[head], k[at], v[at], options.get("scale"))
            for name in ("cosine", "cka", "gamma_spread", "kernel_cka", "projected"):
                assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-6)


@pytest.mark.parametrize(
    "kind", ["linear", "local", "batch_norm", "scaled_heads", "entmax", "ridge", "hyper", "robust"]
)
def test_other_kinds_are_refused(kind: str) -> None:
    layer = attention.MultiheadAttention(16, 4, batch_first=True, kind=kind)
    with pytest.raises(AttentionError, match=rf"kind='{kind}' has other weights than the softmax"):
        audit_layer(layer, torch.randn(1, 9, 16))


def test_what_needs_gradients_is_audited_without() -> None:
    q, k, v = torch.randn(3, 12, 4, generator=torch.Generator().manual_seed(0)).unbind()
    learned = [x.clone().requires_grad_() for x in (q, k, v)]
    assert audit_values(*learned) == audit_values(q, k, v)
    assert not kernel_pca(learned[1], 2).values.requires_grad
    assert torch.equal(kpca_values(learned[1], 2), kpca_values(k, 2))


def test_leading_axes_are_the_first_of_all() -> None:
    k = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    every = kernel_pca(k)
    assert every.values.shape == (9, 8)
    for count in (1, 3, 8, 20):
        few, given = every.leading(count), kernel_pca(k, min(count, 8))
        for name in ("values", "duals", "eigenvalues", "gram", "log_g"):
            assert torch.equal(getattr(few, name), getattr(given, name))


def test_values_beyond_float64_are_refused() -> None:
    k = torch.nn.functional.normalize(
        torch.randn(10, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64), dim=1
    )
    with pytest.raises(AttentionError, match=r"so long that .* exp\(-\d+\), which float64 cannot"):
        kpca_values(60 * k, 3)
    found = kpca_values(30 * k, 3)
    assert found.isfinite().all()
    assert found.abs().amax(0).min() > 0
    assert audit_values(k, 60 * k, kernel_pca(60 * k, 3).values).cosine == pytest.approx(1)


@pytest.mark.parametrize("key", [0.0, 1.0, 0.1, 50.0])
@pytest.mark.parametrize("count", [1, 3, 20, 33])
def test_keys_that_are_alike_have_no_axes(key: float, count: int) -> None:
    x = torch.full((count, 3), key)
    for call in (lambda: kernel_pca(x, 1), lambda: audit_values(x, x, x)):
        with pytest.raises(AttentionError, match=f"these {count} keys have no principal axes"):
            call()


def test_bad_shapes_are_refused() -> None:
    x = torch.randn(6, 3)
    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    with pytest.raises(AttentionError, match="sample=3: x has 1 samples; give 0 to 0"):
        audit_layer(layer, torch.randn(1, 6, 4), sample=3)
    with pytest.raises(AttentionError, match=r"x has shape \(6, 4\); give tokens of samples"):
        audit_layer(layer, torch.randn(6, 4))
    with pytest.raises(
        AttentionError, match=r"keys have shape \(1, 6, 3\); give those of one head"
    ):
        kernel_pca(x[None], 2)
    with pytest.raises(AttentionError, match="count=6: the features of these 6 keys have 5 "):
        kernel_pca(x, 6)
    with pytest.raises(AttentionError, match="each key has a value"):
        audit_values(x, x, x[:5])
