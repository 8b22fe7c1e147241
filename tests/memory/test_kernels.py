"""What is particular to one kernel; the laws that all share are in test_memory.py."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualform.memory import (
    Cosine,
    EluPlusOne,
    Exponential,
    FeatureMap,
    Memory,
    Polynomial,
    Relu,
    reference,
)


@given(d=st.integers(1, 4), degree=st.integers(1, 4), offset=st.sampled_from([0.0, 0.5, 2.0]))
@settings(deadline=None, max_examples=30)
def test_polynomial_features_are_the_monomials(d: int, degree: int, offset: float) -> None:
    kernel = Polynomial(degree, offset)
    q, k = torch.randn(2, 3, d, dtype=torch.float64, generator=torch.Generator().manual_seed(d))
    phi_q, phi_k = kernel.features(q), kernel.features(k)
    torch.testing.assert_close(phi_q @ phi_k.T, kernel(q, k), rtol=1e-9, atol=1e-9)
    assert phi_q.shape[-1] == math.comb(d + degree - (offset == 0), degree)


def test_exponential_defaults_to_one_over_root_d() -> None:
    q, k = torch.randn(2, 5, 16)
    torch.testing.assert_close(Exponential()(q, k), Exponential(scale=0.25)(q, k))


def test_elu_plus_one_is_elu_plus_one_and_keeps_small_numbers() -> None:
    x = torch.linspace(-5, 5, 101, requires_grad=True)
    y, expected = EluPlusOne().features(x), torch.nn.functional.elu(x) + 1
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(
        torch.autograd.grad(y.sum(), x), torch.autograd.grad(expected.sum(), x)
    )
    tiny = EluPlusOne().features(torch.tensor([-50.0])).item()
    assert tiny == pytest.approx(math.exp(-50), rel=1e-6, abs=0)


def test_zero_vectors_have_cosine_zero_and_finite_gradients() -> None:
    q = torch.zeros(1, 3, requires_grad=True)
    weights = Cosine()(q, torch.ones(2, 3))
    assert weights.tolist() == [[0.0, 0.0]]
    assert torch.autograd.grad(weights.sum(), q)[0].isfinite().all()


def test_query_that_no_key_answers_reads_zero_in_both_forms() -> None:
    memory = Memory(-torch.ones(3, 2), torch.ones(3, 1), Relu(normalized=True))
    q = torch.ones(4, 2)
    for read in (memory.read, memory.primal().read, lambda q: reference.read(memory, q).float()):
        assert read(q).equal(torch.zeros(4, 1))


def test_kernels_compare_by_value_and_print_their_settings() -> None:
    assert Polynomial(degree=3) == Polynomial(degree=3) != Polynomial(degree=2)
    assert str(Relu(normalized=True)) == "Relu(normalized=True)"
    assert len({Exponential(), Exponential(), Exponential(scale=1.0)}) == 2


def test_a_kernel_of_ones_own_needs_features_only() -> None:
    class Halves(FeatureMap):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x.relu(), (-x).relu()], dim=-1)

    k, v, q = torch.randn(6, 3), torch.randn(6, 2), torch.randn(4, 3)
    memory = Memory(k, v, Halves())
    torch.testing.assert_close(memory.primal().read(q), memory.read(q))
    with pytest.raises(NotImplementedError, match=r"kappa\.register"):
        reference.read(memory, q)
