"""Entmax attention, with α given and learned; its values are tested with those of all kinds."""

from __future__ import annotations

import pytest
import torch
from tests.attention.cases import draw, near
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.nn.utils import parametrize

from dualform import attention
from dualform.errors import DualformError


def test_softmax_at_one_and_sparse_above() -> None:
    q, k, v = draw(1, 6, 8)
    near(attention.entmax(q, k, v, alpha=1.0), attention.softmax(q, k, v))
    one = torch.ones(()).double()
    near(attention.entmax(q, k, v, alpha=one), attention.softmax(q, k, v))
    _, weights = attention.with_weights(attention.kind("entmax", alpha=2.0), q, k, v)
    assert (weights == 0).any()
    near(weights.sum(-1), torch.ones(2, 4, 6).double())


@pytest.mark.parametrize("alpha", [1.0, 1.0 + 1e-9, 1.2, 1.5, 2.0, 3.0])
def test_the_gradient_of_alpha(alpha: float) -> None:
    q, k, v = draw(2, 3, 5, batch=(2,))

    def read(q: Tensor, alpha: Tensor) -> Tensor:
        return attention.entmax(q, k, v, alpha=alpha, is_causal=True)

    given = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
    if alpha > 1.1:
        assert gradcheck(read, (q.requires_grad_(), given), atol=1e-6)
    y = read(q, given)
    slope = torch.autograd.grad(y.sum(), given)[0]
    h = 1e-5
    ahead, here = (attention.entmax(q, k, v, alpha=a, is_causal=True) for a in (alpha + h, alpha))
    near(slope, (ahead - here).sum() / h, 1e-3)


def test_every_head_learns_its_own() -> None:
    torch.manual_seed(0)
    alpha = nn.Parameter(torch.tensor([1.0, 1.25, 1.5, 2.0]).view(4, 1, 1))
    module = attention.MultiheadAttention(16, 4, batch_first=True, kind="entmax", alpha=alpha)
    x = torch.randn(2, 6, 16)
    y = module(x, x, x, is_causal=True)[0]
    heads = module.heads(x, x, x)
    own = [
        attention.entmax(*heads, alpha=a, is_causal=True)[:, h]
        for h, a in enumerate((1.0, 1.25, 1.5, 2.0))
    ]
    near(y, module.out_proj(torch.stack(own, 1).transpose(1, 2).flatten(2)), 1e-5)
    y.square().sum().backward()
    assert (alpha.grad != 0).all()
    assert "alpha" in module.state_dict()


class Between(nn.Module):
    """From all numbers to those from 1 to 2."""

    def forward(self, x: Tensor) -> Tensor:
        return 1 + x.sigmoid()


def test_a_parametrized_alpha_stays_in_its_range() -> None:
    torch.manual_seed(0)
    module = attention.MultiheadAttention(16, 4, kind="entmax", alpha=nn.Parameter(torch.zeros(())))
    parametrize.register_parametrization(module, "alpha", Between())
    optimizer = torch.optim.SGD(module.parametrizations.parameters(), lr=50.0)
    x = torch.randn(5, 3, 16)
    for _ in range(5):
        module(x, x, x)[0].square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert 1 <= float(module.alpha.detach()) <= 2
    assert float(module.alpha.detach()) != 1.5


def test_errors() -> None:
    q, k, v = draw(1, 3, 4)
    with pytest.raises(DualformError, match=r"is no entmax; 1 is softmax, 1.5 usual, 2 sparsemax"):
        attention.entmax(q, k, v, alpha=torch.tensor(0.9))
    with pytest.raises(DualformError) as caught:
        attention.entmax(q, k, v, alpha=torch.ones(3, 1, 1))
    assert str(caught.value) == (
        "alpha of shape (3, 1, 1) does not fit logits of shape (2, 4, 3, 4); give one element, or "
        "one for each head: (heads, 1, 1)."
    )
    twice = attention.entmax(q.requires_grad_(), k, v, alpha=torch.tensor(1.5).double())
    first = torch.autograd.grad(twice.square().sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
