"""Regressions with smooth losses, solved by Newton's method; the layer is the same for all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention.cases import draw, near
from torch import Tensor

from dualform.attention import BatchNorm, Huber, Loss, Primal, Squared
from dualform.attention.losses import solve_smooth
from dualform.errors import AttentionError
from dualform.memory import EluPlusOne


@dataclass(frozen=True)
class LogCosh(Loss):
    """A loss of one's own."""

    formula = r"\log\cosh r"

    def value(self, r: Tensor) -> Tensor:
        return r.cosh().log()


@dataclass(frozen=True)
class Hollow(Loss):
    """Not convex: a residual of 0 costs most."""

    formula = r"\cos r"

    def value(self, r: Tensor) -> Tensor:
        return r.cos()


PRIMALS = {
    "squared": Primal(loss=Squared()),
    "huber": Primal(loss=Huber(0.3), C=5.0),
    "own": Primal(loss=LogCosh()),
    "own, transformed": Primal(loss=LogCosh(), keys=(BatchNorm(eps=0.1),)),
    "own, linear": Primal(loss=LogCosh(), kernel=EluPlusOne(), C=0.1),
}


@pytest.mark.parametrize("name", PRIMALS)
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**31), n=st.sampled_from([6, 24]))
def test_attention_is_the_solved_regression(name: str, seed: int, n: int) -> None:
    primal = PRIMALS[name]
    q, k, y = (x[0] for x in draw(seed, 5, n, batch=(1,)))
    solution = primal.solve(k, y)
    assert solution.gap <= 1e-6
    read = primal.attention()(*(x[None] for x in (q, k, solution.values)))[0] + solution.b
    near(read, solution.predict(q), 1e-10)
    # optimality: every dual is the slope of its residual's cost, and they add up to 0
    assert primal.loss is not None
    residuals = (y - solution.predict(k)).requires_grad_()
    slopes = torch.autograd.grad(primal.loss.value(residuals).sum(), residuals)[0]
    near(solution.beta / solution.C, slopes, 1e-6)
    near(solution.beta.sum(0) / solution.C, torch.zeros(2).double(), 1e-6)


def test_squared_errors_are_a_linear_system() -> None:
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(15, 3)), generator.normal(size=15)
    G = np.exp(x @ x.T / 3**0.5)
    system = np.block(
        [[G + np.eye(15) / 2.0, np.ones((15, 1))], [np.ones((1, 15)), np.zeros((1, 1))]]
    )
    expected = np.linalg.solve(system, np.append(y, 0))
    found = solve_smooth(G, y, Squared(), C=2.0)
    np.testing.assert_allclose(np.append(found.beta, found.b), expected, rtol=1e-8, atol=1e-10)


def test_a_loss_that_is_not_convex_is_refused() -> None:
    with pytest.raises(AttentionError, match=r"^Hollow\(\) is not convex: its second derivative"):
        solve_smooth(np.eye(4), np.array([3.0, -1.0, 0.5, 2.0]), Hollow(), C=10.0)


def test_explanations_carry_the_loss() -> None:
    lines = Primal(loss=LogCosh()).explain().splitlines()
    assert lines[2:6] == [
        "Primal    min ½‖W‖² + C Σ_j ℓ(y_j − f(k_j)), ℓ of LogCosh(), C = 1/ḡ, "
        "ḡ the geometric mean of G_jj",
        "KKT       W = Σ_j α_j Φ(k_j)/h(k_j), α_j = C ℓ'(y_j − f(k_j))",
        "Dual      max y·α − C Σ_j ℓ*(α_j/C) − ½ αᵀGα, G_ij = Φ(k_i)·Φ(k_j)/(h(k_i) h(k_j)), "
        "Σα = 0",
        "Values    v_j = α_j/h(k_j); in a network v_j = W_V x_j stands in for them",
    ]
    latex = Primal(loss=LogCosh()).explain(latex=True)
    assert r"\ell(r) = \log\cosh r,\ C = 1/\bar g" in latex
    assert r"\max_\alpha" in latex
    assert r"\bar g = \textstyle\prod_j G_{jj}^{1/n}" in latex
    assert latex.count("&") == latex.count("\\\\") + 1  # one in each line
