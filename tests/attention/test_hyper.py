"""Attention as a hypernetwork, against loops over queries, keys and heads in float64."""

from __future__ import annotations

import math
import weakref
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention.cases import draw, near
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dualform import attention
from dualform.attention.hyper import hyper, latent_codes
from dualform.errors import AttentionError

module = import_module("dualform.attention.hyper")  # the package has the function by its name
law = settings(deadline=None, max_examples=10)
seeds = st.integers(0, 2**31)


def plain(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, activation: str, scores: str) -> Tensor:
    """(heads, L, M), pair by pair."""
    heads, L, S, M = len(q), q.shape[1], k.shape[1], v.shape[2]
    s = (q @ k.mT / math.sqrt(q.shape[2])).tolist()
    y = torch.zeros(heads, L, M, dtype=torch.float64)
    for i in range(L):
        for j in (j for j in range(S) if sees[i, j]):
            if scores == "rms":
                size = math.sqrt(sum(s[h][i][j] ** 2 for h in range(heads)) / heads + 1e-6)
                a = [s[h][i][j] / size for h in range(heads)]
            elif scores == "dot":
                a = [s[h][i][j] for h in range(heads)]
            else:
                a = [
                    math.exp(s[h][i][j]) / sum(math.exp(s[h][i][n]) for n in range(S) if sees[i, n])
                    for h in range(heads)
                ]
            value = sum(a[h] * v[h, j] for h in range(heads))
            assert isinstance(value, Tensor)
            value = value.clamp(min=0) if activation == "relu" else value
            for h in range(heads):
                y[h, i] += a[h] * value
    return y


@pytest.mark.parametrize("activation", ["relu", "linear"])
@pytest.mark.parametrize("scores", ["rms", "dot", "softmax"])
@law
@given(seed=seeds, L=st.integers(1, 5), S=st.integers(1, 6), causal=st.booleans())
def test_definition(activation: str, scores: str, seed: int, L: int, S: int, causal: bool) -> None:
    q, k, v = draw(seed, L, S, batch=(3,))
    sees = torch.rand(L, S, generator=torch.Generator().manual_seed(seed)) < 0.7
    full = sees.tril() if causal else sees
    found = hyper(q, k, v, sees, is_causal=causal, activation=activation, scores=scores)
    near(found, plain(q, k, v, full, activation, scores), 1e-12)
    numbers = torch.zeros(L, S).double().masked_fill(~sees, -torch.inf)
    again = hyper(q, k, v, numbers, is_causal=causal, activation=activation, scores=scores)
    assert torch.equal(found, again)


def test_some_keys_at_a_time_make_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.requires_grad_() for x in draw(0, 7, 9, batch=(2, 4)))
    whole = hyper(q, k, v, is_causal=True)
    weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(0)).double()
    expected = torch.autograd.grad((whole * weights).sum(), (q, k, v))
    monkeypatch.setitem(module.PAIRS, "cpu", 2 * 7 * 2 * 4)
    parts = hyper(q, k, v, is_causal=True)
    near(parts, whole, 1e-13)
    for one, other in zip(
        torch.autograd.grad((parts * weights).sum(), (q, k, v)), expected, strict=True
    ):
        near(one, other, 1e-12)


@pytest.mark.parametrize("scores", ["rms", "softmax"])
def test_gradients(scores: str) -> None:
    q, k, v = (x.requires_grad_() for x in draw(1, 3, 4, batch=(2,)))
    assert gradcheck(lambda *x: hyper(*x, scores=scores), (q, k, v))


def test_values_of_all_pairs_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the forward pass keeps grows with L × S, not with L × S × M."""
    monkeypatch.setitem(module.PAIRS, "cpu", 1 << 12)
    kept = {}
    for width in (8, 64):
        q, k = torch.randn(2, 2, 40, 8).requires_grad_().unbind()
        v = torch.randn(2, 40, width, requires_grad=True)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, sizes=sizes: (sizes.append(x.untyped_storage().nbytes()), x)[1], lambda x: x
        ):
            y = hyper(q, k, v)
        assert y.requires_grad
        kept[width] = max(sizes)
    assert max(kept.values()) <= 4 * 2 * 40 * 64 * 2


class Peak(TorchDispatchMode):
    """The most bytes that the results of torch's operations take at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._made += [weakref.ref(x) for x in tree_leaves(out) if isinstance(x, Tensor)]
        alive = [x for x in (made() for made in self._made) if x is not None]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in alive}
        self.bytes = max(self.bytes, sum(one.nbytes() for one in storages.values()))
        return out


@pytest.mark.parametrize("learns", [False, True])
def test_some_keys_at_a_time_take_less_memory_than_all(
    monkeypatch: pytest.MonkeyPatch, learns: bool
) -> None:
    """One key at a time: the outputs of all parts would be as many as heads times all pairs."""
    heads, L, S, M = 4, 32, 128, 64
    q, k, v = (torch.randn(heads, n, M, requires_grad=learns) for n in (L, S, S))
    peaks = {}
    for pairs in (module.PAIRS["cpu"], L * M):
        monkeypatch.setitem(module.PAIRS, "cpu", pairs)
        with Peak() as peak:
            y = hyper(q, k, v)
            if learns:
                torch.autograd.grad(y.sum(), (q, k, v))
        peaks[pairs] = peak.bytes
    whole, parts = peaks.values()
    of_all_pairs = 4 * L * S * M
    assert whole > of_all_pairs > parts


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scores", ["rms", "softmax"])
def test_large_scores_do_not_overflow_in_half_precision(dtype: torch.dtype, scores: str) -> None:
    """Scores beyond 256 have squares that float16 cannot hold."""
    q, k, v = (x.to(dtype) for x in draw(0, 5, 6, batch=(4,)))
    q, k = q * 40, k * 40
    assert float((q.double() @ k.double().mT).abs().max()) / math.sqrt(q.shape[-1]) > 1000
    found = hyper(q, k, v, scores=scores)
    exact = hyper(q.double(), k.double(), v.double(), scores=scores)
    assert found.dtype == latent_codes(q, k, scores=scores).dtype == dtype
    near(found.double(), exact, 60 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("scores", ["rms", "softmax"])
@pytest.mark.parametrize("shape", [(5, 0), (0, 4), (0, 0)])
def test_no_keys_read_zero(scores: str, shape: tuple[int, int]) -> None:
    q, k, v = draw(0, *shape, batch=(2, 3))
    expected = torch.zeros(2, 3, shape[0], v.shape[-1], dtype=v.dtype)
    assert torch.equal(hyper(q, k, v, scores=scores), expected)


@law
@given(seed=seeds, L=st.integers(1, 5), S=st.integers(1, 6), causal=st.booleans())
def test_a_softmax_takes_a_bias(seed: int, L: int, S: int, causal: bool) -> None:
    """Against loops over heads, queries and keys; -1e9 hides a key."""
    q, k, v = draw(seed, L, S, batch=(3,))
    bias = torch.randn(L, S, generator=torch.Generator().manual_seed(seed)).double()
    bias[:, 1:] = bias[:, 1:].masked_fill(bias[:, 1:] < -0.7, -1e9)
    sees = (bias > -1e8).tril() if causal else bias > -1e8
    a = torch.zeros(3, L, S).double()
    for h, i in ((h, i) for h in range(3) for i in range(L)):
        keys = [j for j in range(S) if sees[i, j]]
        e = {
            j: math.exp(float(q[h, i] @ k[h, j]) / math.sqrt(q.shape[2]) + bias[i, j]) for j in keys
        }
        for j in keys:
            a[h, i, j] = e[j] / sum(e.values())
    expected = torch.einsum("hqk,qkm->hqm", a, torch.einsum("hqk,hkm->qkm", a, v).relu())
    near(hyper(q, k, v, bias, is_causal=causal, scores="softmax"), expected, 1e-12)
    near(latent_codes(q, k, bias, is_causal=causal, scores="softmax"), a, 1e-12)


def test_queries_at_an_offset_are_the_last_of_all() -> None:
    q, k, v = draw(3, 12, 12)
    y = hyper(q, k, v, is_causal=True)
    near(hyper(q[..., 9:, :], k, v, is_causal=True, offset=9), y[..., 9:, :])


def test_grouped_queries_share_keys() -> None:
    q, k, v = draw(6, 5, 5, batch=(2, 8))
    few_k, few_v = k[:, ::4], v[:, ::4]
    repeated = (x.repeat_interleave(4, 1) for x in (few_k, few_v))
    near(hyper(q, few_k, few_v), hyper(q, *repeated), 1e-13)


def test_a_query_that_sees_nothing_reads_zero() -> None:
    for scores in ("rms", "dot", "softmax"):
        q, k, v = (x.requires_grad_() for x in draw(4, 5, 6))
        mask = torch.ones(5, 6, dtype=torch.bool)
        mask[2] = False
        y = hyper(q, k, v, mask, scores=scores)
        assert (y[..., 2, :] == 0).all()
        assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), (q, k, v)))


def test_codes_are_the_scores_of_a_pair() -> None:
    q, k, v = draw(0, 4, 6, batch=(3,))
    codes = latent_codes(q, k)
    mixed = torch.einsum("hqk,hkm->qkm", codes, v).relu()
    near(torch.einsum("hqk,qkm->hqm", codes, mixed), hyper(q, k, v), 1e-12)
    near(codes.square().mean(0), torch.ones(4, 6).double(), 1e-3)


def test_it_is_a_kind_of_module_and_its_weights_are_codes() -> None:
    torch.manual_seed(0)
    layer = attention.MultiheadAttention(16, 4, batch_first=True, kind="hyper").double()
    x = torch.randn(2, 6, 16).double()
    y, weights = layer(x, x, x, average_attn_weights=False)
    q, k, v = layer.heads(x, x, x)
    assert weights is not None
    near(weights, latent_codes(q, k), 1e-12)
    near(y, layer.out_proj(hyper(q, k, v).transpose(1, 2).flatten(2)), 1e-12)
    causal, _ = layer(x, x, x, is_causal=True, need_weights=False)
    cache = attention.Cache("hyper")
    steps = [layer(t, t, t, need_weights=False, cache=cache)[0] for t in x.split(1, 1)]
    near(torch.cat(steps, 1), causal, 1e-12)


def test_what_it_cannot_do_is_refused() -> None:
    q, k, v = draw(0, 3, 3, batch=(2,))
    with pytest.raises(AttentionError, match="activation='gelu' is unknown; choose one of 'relu'"):
        hyper(q, k, v, activation="gelu")
    with pytest.raises(AttentionError, match="scores='max' is unknown; choose one of 'rms'"):
        hyper(q, k, v, scores="max")
    for scores in ("rms", "dot"):
        words = f"scores='{scores}' only hides keys; .* or take scores='softmax'"
        with pytest.raises(AttentionError, match=words):
            hyper(q, k, v, torch.tensor([[0.0, 1.0, 0.0]]).double(), scores=scores)
    with pytest.raises(AttentionError, match="kind='hyper' is not linear in its values"):
        attention.memory("hyper", k, v)
