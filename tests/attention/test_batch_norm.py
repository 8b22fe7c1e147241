"""Statistics are those of the keys a query sees, however they were hidden and wherever they lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.attention.cases import CASES, Case, draw, near
from torch import Tensor, nn

from dualform import attention
from dualform.attention.batch_norm import statistics

NUMBERS = {
    "-1e4": -1e4,
    "-1e9": -1e9,
    "the least number": torch.finfo(torch.float64).min,
    "-inf": -torch.inf,
}
PASSES: dict[str, dict[str, Any]] = {
    "whole": {},
    "causal": {"is_causal": True},
    "masked": {"attn_mask": torch.arange(64) < 60},
    "causal and masked": {"attn_mask": torch.arange(64) > 3, "is_causal": True},
    "by query": {"attn_mask": torch.ones(64, 64, dtype=torch.bool).tril(2)},
}


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_key_is_hidden_by_any_number_that_hides_it(case: Case, causal: bool, number: str) -> None:
    q, k, v = draw(1, 9, 9)
    k[..., 5:7, :] = 50
    keep = (torch.arange(9) < 5) | (torch.arange(9) > 6)
    mask = torch.zeros(1, 9).double().masked_fill(~keep, NUMBERS[number])
    expected = case.layer(q, k, v, keep[None], is_causal=causal)
    near(case.layer(q, k, v, mask, is_causal=causal), expected)
    if case.masks:
        near(case.layer(q, k, v, mask.expand(9, 9), is_causal=causal), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [1, 9])
def test_a_constant_added_to_a_mask_changes_nothing(causal: bool, rows: int) -> None:
    q, k, v = draw(2, 9, 9)
    mask = torch.randn(rows, 9, generator=torch.Generator().manual_seed(0)).double()
    mask[:, 4] = -1e9
    y = attention.batch_norm(q, k, v, mask, is_causal=causal)
    near(attention.batch_norm(q, k, v, mask - 2e4, is_causal=causal), y, 1e-9)


@pytest.mark.parametrize("size", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("hidden", [1, 2])
def test_hidden_first_keys_are_no_origin(size: float, hidden: int) -> None:
    q, k, v = (x.float() for x in draw(3, 64, 64, D=16))
    k[..., :hidden, :] = size
    keep = (torch.arange(64) >= hidden).expand(2, 1, 1, 64)
    y = attention.batch_norm(q, k, v, keep, is_causal=True)[..., hidden:, :]
    shown = (x[..., hidden:, :].double() for x in (q, k, v))
    error = (y - attention.batch_norm(*shown, is_causal=True)).abs().max()
    assert error < 5e-6


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("first", [0.0, -100.0], ids=["", "first key far off"])
def test_where_the_keys_lie_costs_no_digits(name: str, first: float) -> None:
    """Queries and keys at 100 in float32 read as those at 0 do, a first key far off or not."""
    errors = []
    for place in (0.0, 100.0):
        q, k, v = (x.float() for x in draw(4, 64, 64, D=16))
        q, k = q + place, k + place
        k[..., 0, :] += first
        y = attention.batch_norm(q, k, v, **PASSES[name])
        exact = attention.batch_norm(q.double(), k.double(), v.double(), **PASSES[name])
        errors.append(float((y - exact).abs().max()))
    assert max(errors) < 8e-6


FAR = (100, 100, 0)


def test_decoding_far_keys_costs_no_digits() -> None:
    q, k, v = (x.float() + place for x, place in zip(draw(5, 64, 64, D=16), FAR, strict=True))
    cache = attention.Cache("batch_norm")
    steps = [cache(*(x[..., t : t + 1, :] for x in (q, k, v))) for t in range(64)]
    exact = attention.batch_norm(q.double(), k.double(), v.double(), is_causal=True)
    assert (torch.cat(steps, -2) - exact).abs().max() < 8e-6


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_no_more_than_their_queries(
    dtype: torch.dtype, causal: bool
) -> None:
    """As near to float64 as attention of the rewritten queries to the keys as they were given."""
    for place in (0, 100):
        q, k, v = (x.to(dtype) for x in draw(8, 128, 128, D=32, M=32))
        q, k = q + place, k + place
        given = {"is_causal": causal, "eps": 0.1}
        exact = attention.batch_norm(q.double(), k.double(), v.double(), **given)
        rewritten = statistics(q, k, is_causal=causal).rewrite(q.float(), 1.0, 0.1).to(dtype)
        least = attention.softmax(rewritten, k, v, is_causal=causal)
        found = attention.batch_norm(q, k, v, **given)
        assert (found - exact).norm() <= 1.02 * (least - exact).norm()


def test_an_origin_shows_no_query_its_future() -> None:
    from dualform.attention.batch_norm import origin_of

    keys = torch.tensor([[9.0], [5.0], [-3.0], [1.0]])
    keep = torch.tensor([[False], [True], [True], [True]])
    assert origin_of(keys, keep).item() == -3.0
    assert origin_of(keys).item() == 5.0
    assert origin_of(keys[:1]).item() == 9.0
    q, k, v = draw(6, 12, 12)
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    mask[6:, :6] = False  # two packed documents
    y = attention.batch_norm(q, k, v, mask)
    for position in (1, 2, 5, 7, 9):
        later = k.clone()
        later[..., position:, :] = 99
        changed = attention.batch_norm(q, later, v, mask)
        assert torch.equal(changed[..., :position, :], y[..., :position, :])


def test_packed_documents_have_statistics_of_their_own() -> None:
    q, k, v = draw(7, 12, 12)
    k[..., 6:, :] += 30
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    mask[6:, :6] = False
    alone = [
        attention.batch_norm(*(x[..., part, :] for x in (q, k, v)), is_causal=True)
        for part in (slice(6), slice(6, 12))
    ]
    near(attention.batch_norm(q, k, v, mask), torch.cat(alone, -2), 1e-9)


def betas(kind: str, **options: Any) -> tuple[attention.MultiheadAttention, Tensor]:
    torch.manual_seed(0)
    beta = nn.Parameter(torch.linspace(0.5, 1, 4).view(4, 1, 1))
    return attention.MultiheadAttention(16, 4, kind=kind, beta=beta, **options), beta


@pytest.mark.parametrize("kind", ["batch_norm", "batch_norm_scaled_heads"])
def test_a_learnable_beta_is_a_parameter_and_one_for_each_head(kind: str) -> None:
    module, beta = betas(kind, batch_first=True, eps=0.1)
    assert any(p is beta for p in module.parameters())
    assert torch.equal(module.state_dict()["beta"], beta)
    x = torch.randn(2, 9, 16)
    y = module.double()(x.double(), x.double(), x.double(), is_causal=True)[0]
    heads = module.heads(*[x.double()] * 3)
    own = [
        attention.kind(kind, beta=float(b), eps=0.1)(*heads, is_causal=True)[:, h]
        for h, b in enumerate(beta.detach().flatten())
    ]
    near(y, module.out_proj(torch.stack(own, 1).transpose(1, 2).flatten(2)))
    y.square().sum().backward()
    assert (module.beta.grad != 0).all()


def test_a_learnable_beta_is_trained_saved_and_copied() -> None:
    module, beta = betas("batch_norm")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = beta.detach().clone()
    x = torch.randn(5, 3, 16)
    module(x, x, x)[0].square().sum().backward()
    optimizer.step()
    assert not torch.equal(module.beta, before)
    other, _ = betas("batch_norm")
    assert not torch.equal(other(x, x, x)[0], module(x, x, x)[0])
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x, x, x)[0], module(x, x, x)[0])
