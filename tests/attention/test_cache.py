"""Decoding token by token equals the whole causal pass."""

from __future__ import annotations

import pytest
import torch
from tests.attention.cases import CASES, Case, draw, near

from dualform import attention
from dualform.errors import AttentionError


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("steps", [(1,) * 17, (9, 1, 1, 4, 2)], ids=["one by one", "in parts"])
def test_decoding_equals_the_whole_pass(case: Case, steps: tuple[int, ...]) -> None:
    q, k, v = draw(1, 17, 17)
    cache = attention.Cache(case.name, **case.options)
    parts = zip(*(x.split(steps, -2) for x in (q, k, v)), strict=True)
    read = torch.cat([cache(*part) for part in parts], -2)
    near(read, case.layer(q, k, v, is_causal=True), 1e-9)
    assert len(cache) == 17


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("trained", ["qkv", "q", "v"])
def test_gradients_through_a_cache_are_those_of_the_whole_pass(case: Case, trained: str) -> None:
    gradients = []
    for decoded in (True, False):
        q, k, v = given = draw(1, 9, 9)
        asked = [
            x.requires_grad_() for name, x in zip("qkv", given, strict=True) if name in trained
        ]
        if decoded:
            cache = attention.Cache(case.name, **case.options)
            parts = zip(*(x.split((2, *[1] * 7), -2) for x in (q, k, v)), strict=True)
            y = torch.cat([cache(*part) for part in parts], -2)
        else:
            y = case.layer(q, k, v, is_causal=True)
        gradients.append(torch.autograd.grad(y.square().sum(), asked))
    for one, whole in zip(*gradients, strict=True):
        near(one, whole, 1e-8)


def test_shared_heads_and_long_windows() -> None:
    q, k, v = draw(2, 300, 300, batch=(1, 4))
    k, v = k[:, :2], v[:, :2]
    for name, options in {"local": {"window": 3}, "batch_norm": {}, "linear": {}}.items():
        cache = attention.Cache(name, **options)
        parts = zip(*(x.split(1, -2) for x in (q, k, v)), strict=True)
        read = torch.cat([cache(*part) for part in parts], -2)
        near(read, attention.kind(name, **options)(q, k, v, is_causal=True), 1e-8)


@pytest.mark.parametrize("steps", [(2, 3, 1, 9), (1, 2, 12), (15,)])
def test_blocks_that_open_with_the_first_tokens(steps: tuple[int, ...]) -> None:
    q, k, v = draw(4, 15, 15)
    options = {"factors": (4,), "lead": 1}
    cache = attention.Cache("scaled_heads", **options)
    parts = zip(*(x.split(steps, -2) for x in (q, k, v)), strict=True)
    read = torch.cat([cache(*part) for part in parts], -2)
    near(read, attention.scaled_heads(q, k, v, is_causal=True, **options))


def test_what_a_context_takes() -> None:
    q, k, v = (x.float() for x in draw(3, 512, 512, batch=(1, 4), D=8, M=8))
    sizes = {}
    for name, options in {
        "softmax": {},
        "linear": {},
        "local": {"window": 16},
        "batch_norm": {},
        "scaled_heads": {"factors": (1, 2, 4, 8)},
    }.items():
        cache = attention.Cache(name, **options)
        cache(q, k, v)
        sizes[name] = cache.nbytes
    pairs = 2 * 4 * 512 * 8 * 4
    assert sizes == {
        "softmax": pairs,
        "linear": 4 * (8 * 8 + 8) * 4,
        "local": pairs // 32,
        "batch_norm": pairs + 4 * (3 * 8 + 1) * 4,
        "scaled_heads": pairs * 15 // 32,
    }


def test_kinds_without_a_past() -> None:
    with pytest.raises(AttentionError) as caught:
        attention.Cache("ridge")
    assert str(caught.value) == (
        "kind='ridge' cannot be read token by token; these can: softmax, linear, local, "
        "batch_norm, scaled_heads, batch_norm_scaled_heads, entmax, hyper, robust."
    )
