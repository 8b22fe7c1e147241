"""Layers as memories, and what an inspection says of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.attention.cases import CASES, Case, draw, near
from torch import nn

from dualform import attention
from dualform.attention import Primal
from dualform.errors import AttentionError
from dualform.memory import Dot, EluPlusOne, Exponential, Memory, Relu


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_memory_of_the_context_is_the_layer(case: Case) -> None:
    q, k, v = draw(1, 6, 8)
    memory = attention.memory(case.name, k, v, **case.options)
    near(memory.read(q), case.layer(q, k, v))
    near(memory.scores(q) @ v, memory.read(q))
    ones = torch.ones_like(v[..., :1])
    if memory.kernel.normalized and case.options.get("features") != Relu():  # which may not answer
        near(Memory(k, ones, memory.kernel).read(q), torch.ones_like(q[..., :1]))


def test_a_memory_says_whether_it_averages() -> None:
    _, k, v = draw(1, 6, 8)
    for options in ({"normalized": False}, {"normalized": False, "scale": 2.0}):
        assert not attention.memory("linear", k, v, **options).kernel.normalized
    assert not attention.memory("ridge", k, v).kernel.normalized


@pytest.mark.parametrize("options", [{}, {"features": Relu()}, {"normalized": False}])
def test_linear_attentions_recurrent_state_is_the_primal_form(options: dict[str, object]) -> None:
    q, k, v = draw(2, 1, 9, batch=(4,))
    cache = attention.Cache("linear", **options)
    read = cache(q, k[..., :1, :], v[..., :1, :])
    for t in range(1, 9):
        read = cache(q, k[..., t : t + 1, :], v[..., t : t + 1, :])
    primal = attention.memory("linear", k, v, **options).primal()
    near(primal.read(q), read)
    state = cache._context.tensors()
    near(primal.W, state[0].mT)


def test_joined_memories_are_the_layer_of_the_joined_context() -> None:
    q, k, v = draw(3, 4, 8)
    parts = [
        attention.memory("batch_norm", k[..., s, :], v[..., s, :]) for s in (slice(5), slice(5, 8))
    ]
    near((parts[0] + parts[1]).read(q), attention.batch_norm(q, k, v))


REGRESSIONS: dict[str, tuple[dict[str, Any], list[Primal]]] = {
    "softmax": ({"scale": 0.3}, [Primal(kernel=Exponential(0.3))] * 2),
    "linear": ({}, [Primal(kernel=EluPlusOne())] * 2),
    "linear, not divided": (
        {"features": Relu(), "normalized": False},
        [Primal(kernel=Relu(), normalizer="one")] * 2,
    ),
    "linear, of either sign": ({"features": Dot()}, [Primal(kernel=Dot())] * 2),
    "batch_norm": ({"eps": 0.1}, [Primal(keys=(attention.BatchNorm(eps=0.1),))] * 2),
    "scaled_heads": ({"factors": (1, 2)}, [Primal(), Primal(keys=(attention.Shorten(2),))]),
}


@pytest.mark.parametrize("name", REGRESSIONS)
def test_duals_of_a_layer_are_those_of_its_regression(name: str) -> None:
    torch.manual_seed(0)
    options, primals = REGRESSIONS[name]
    kind = name.split(",")[0]
    module = attention.MultiheadAttention(6, 2, batch_first=True, kind=kind, **options).double()
    x = torch.randn(1, 12, 6).double()
    seen = attention.inspect(module, x)
    _, k, v = (t[0] for t in module.heads(x, x, x))
    for head, primal in enumerate(primals):
        solution = primal.solve(k[head], v[head])
        pooled = any(isinstance(step, attention.Shorten) for step in primal.keys)
        values = v[head].unflatten(0, (-1, 2)).mean(1) if pooled else v[head]
        near(seen.alpha[head][0] * solution.features.per_dual(), values)  # in the same units
    joined = seen.outputs.transpose(1, 2).flatten(2)
    near(module.out_proj(joined), module(x, x, x)[0])


@pytest.mark.parametrize("kind", ["softmax", "local", "ridge", "batch_norm", "scaled_heads"])
def test_duals_read_at_the_keys_what_the_layer_reads_there(kind: str) -> None:
    """f(k_i) = Σ_j α_j Φ(k_i)·Φ(k_j)/(h(k_i) h(k_j)): with queries and keys the same."""
    torch.manual_seed(0)
    own = {"local": {"window": 2}, "scaled_heads": {"factors": (2,), "lead": 1}}
    module = attention.MultiheadAttention(4, 1, batch_first=True, kind=kind, **own.get(kind, {}))
    x = torch.randn(1, 7, 4)
    with torch.no_grad():
        module.in_proj_weight[:4] = module.in_proj_weight[4:8]  # queries are keys
    seen = attention.inspect(module, x)
    _, k, _ = (t[0, 0] for t in module.double().heads(*[x.double()] * 3))
    queries = k
    if kind == "scaled_heads":
        k = torch.cat([k[:1], k[1:].unflatten(0, (3, 2)).mean(1)])
    if kind == "batch_norm":
        k = queries = attention.BatchNorm().apply(k, k)
    i, j = torch.arange(len(queries))[:, None], torch.arange(len(k))
    sees = (i - j).abs() <= 2 if kind == "local" else torch.ones(len(queries), len(k))
    products = sees * (queries @ k.T / 2).exp()
    h = ((k @ k.T / 2).exp() * (sees if kind == "local" else 1)).sum(-1, keepdim=True)
    unit = (k.square().sum(-1) / 2 - 2 * h.squeeze(-1).log()).mean().exp()
    read = products / products.sum(-1, keepdim=True) @ (seen.alpha[0][0] / h / unit)
    near(read, seen.outputs[0, 0])


def test_head_distance_by_hand() -> None:
    outputs = torch.tensor([[[[3.0, 4.0]], [[0.0, 0.0]], [[3.0, 4.0]]]])
    seen = attention.Inspection((), outputs)
    assert seen.distance() == pytest.approx((5 + 0 + 5) / 3)
    assert seen.distance(relative=True) == pytest.approx(1.0)
    with pytest.raises(AttentionError, match="one head has no others to be compared with"):
        attention.Inspection((), outputs[:, :1]).distance()


def test_support_against_a_box() -> None:
    seen = attention.Inspection(
        (torch.tensor([[[0.0, 0.5], [-1.0, 2.0]]]),), torch.zeros(1, 1, 1, 1)
    )
    assert seen.support(C=1.0) == [attention.Support(1.0, zero=1, inside=1, bound=2)]


def test_duals_of_long_keys_are_counted() -> None:
    """h(k) leaves float64 here; where a dual stands to C does not."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(64, 1, batch_first=True)
    with torch.no_grad():
        module.in_proj_weight[64:128] *= 20
        module.in_proj_bias[64:128] = 40
    seen = attention.inspect(module, torch.randn(1, 8, 64))
    assert all(size.isfinite().all() for size in seen.sizes)
    (found,) = seen.support(C=1.0)
    k_norms = seen.sizes[0][0].amax(-1)
    assert found.zero + found.inside + found.bound == 8 * 64
    assert found.bound == int((seen.sizes[0] >= 0).sum()) > 0
    assert k_norms.max() > 1000


PROBLEMS: dict[str, tuple[Primal, dict[str, float]]] = {
    "softmax": (Primal(), {}),
    "scaled by the layer": (Primal(), {"scale": 0.3}),
    "transformed": (Primal(keys=(attention.UnitLength(),)), {}),
    "own normalizer": (Primal(normalizer=lambda p: -1 - p.sum(-1, keepdim=True)), {}),
    "of either sign": (Primal(kernel=Dot()), {}),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_duals_of_a_problem_are_in_its_units(name: str) -> None:
    torch.manual_seed(0)
    primal, options = PROBLEMS[name]
    module = attention.MultiheadAttention(6, 2, batch_first=True, kind=primal, **options).double()
    x = torch.randn(1, 12, 6).double()
    seen = attention.inspect(module, x)
    _, k, v = (t[0] for t in module.heads(x, x, x))
    solved = Primal(kernel=Exponential(0.3)) if options else primal
    for head in range(2):
        features = solved.solve(k[head], v[head]).features
        near(seen.alpha[head][0] * features.per_dual(), v[head])
        near(seen.sizes[head], seen.alpha[head].abs().log())


def test_duals_of_long_keys_of_a_problem_are_counted() -> None:
    torch.manual_seed(0)
    module = attention.MultiheadAttention(64, 1, batch_first=True, kind=Primal())
    with torch.no_grad():
        module.in_proj_weight[64:128] *= 20
        module.in_proj_bias[64:128] = 40
    named = attention.MultiheadAttention(64, 1, batch_first=True)
    named.load_state_dict(module.state_dict())
    x = torch.randn(1, 8, 64)
    near(attention.inspect(module, x).sizes[0], attention.inspect(named, x).sizes[0])


def test_keys_that_no_token_has_are_no_data() -> None:
    with pytest.raises(AttentionError, match=r"^add_bias_kv and add_zero_attn add keys that no"):
        attention.inspect(nn.MultiheadAttention(6, 2, add_bias_kv=True), torch.ones(4, 2, 6))


def test_torchs_own_module_can_be_inspected() -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(6, 2, kdim=3, vdim=3)
    x, context = torch.randn(4, 2, 6), torch.randn(7, 2, 3)
    seen = attention.inspect(module, x, context)
    assert [a.shape for a in seen.alpha] == [(2, 7, 3)] * 2
    joined = module.out_proj(seen.outputs.float().transpose(1, 2).flatten(2)).transpose(0, 1)
    near(joined, module(x, context, context)[0], 1e-5)
