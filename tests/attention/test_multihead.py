"""The module against torch's: arguments, weights, masks and outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.attention.cases import near
from torch import Tensor, nn

from dualform import attention
from dualform.errors import AttentionError

KINDS = ("softmax", "linear", "local", "batch_norm", "scaled_heads", "batch_norm_scaled_heads")
MODULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "own widths": {"kdim": 5, "vdim": 7},
    "bias_kv": {"add_bias_kv": True},
    "zero": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True},
}
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": {"key_padding_mask": torch.arange(6) >= torch.tensor([[6], [4], [5]])},
    "numbers": {"key_padding_mask": torch.randn(3, 6).double()},
    "by query": {"attn_mask": torch.ones(6, 6, dtype=torch.bool).triu(1)},
    "by head": {"attn_mask": torch.randn(12, 6, 6).double()},
    "by head and padding": {
        "attn_mask": torch.randn(12, 6, 6).double(),
        "key_padding_mask": torch.zeros(3, 6).double(),
    },
    "causal": {"attn_mask": torch.ones(6, 6, dtype=torch.bool).triu(1), "is_causal": True},
}


def inputs(module: nn.MultiheadAttention) -> list[Tensor]:
    torch.manual_seed(1)
    shape = (3, 6) if module.batch_first else (6, 3)
    widths = (module.embed_dim, module.kdim, module.vdim)
    return [torch.randn(*shape, width).double() for width in widths]


def twins(**options: Any) -> tuple[nn.MultiheadAttention, attention.MultiheadAttention]:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(16, 4, **options).double()
    ours = attention.MultiheadAttention(16, 4, **options).double()
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    return theirs, ours


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("averaged", [True, False])
def test_softmax_is_torchs_module(module: str, mask: str, averaged: bool) -> None:
    theirs, ours = twins(**MODULES[module])
    given = inputs(theirs)
    options = {**MASKS[mask], "average_attn_weights": averaged}
    for found, expected in zip(ours(*given, **options), theirs(*given, **options), strict=True):
        near(found, expected)
    near(ours(*given, need_weights=False, **options)[0], theirs(*given, **options)[0])


def test_without_a_batch() -> None:
    theirs, ours = twins()
    x = torch.randn(6, 16).double()
    mask = torch.arange(6) > 3
    for found, expected in zip(ours(x, x, x, mask), theirs(x, x, x, mask), strict=True):
        near(found, expected)


def test_first_weights_are_torchs() -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(16, 4)
    torch.manual_seed(0)
    ours = attention.MultiheadAttention(16, 4, kind="linear")
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)


def test_dropout_drops_the_same_weights_that_are_returned() -> None:
    _, ours = twins(dropout=0.5)
    x = torch.randn(6, 3, 16).double()
    torch.manual_seed(0)
    y, weights = ours(x, x, x, average_attn_weights=False)
    _, _, v = ours.heads(*(x.transpose(0, 1),) * 3)
    near(ours.out_proj((weights @ v).transpose(1, 2).flatten(2)).transpose(0, 1), y)
    assert (weights == 0).any()
    assert ours.eval()(x, x, x)[1].min() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_its_function_between_the_projections(kind: str) -> None:
    torch.manual_seed(0)
    module = attention.MultiheadAttention(16, 4, batch_first=True, kind=kind).double()
    x = torch.randn(3, 12, 16).double()
    padding = torch.arange(12) >= torch.tensor([[12], [7], [9]])
    y, weights = module(x, x, x, padding, average_attn_weights=False)
    heads = attention.kind(kind)(*module.heads(x, x, x), ~padding[:, None, None])
    near(y, module.out_proj(heads.transpose(1, 2).flatten(2)))
    assert (weights[1, ..., 7:] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_with_a_cache(kind: str) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"eps": 0.1} if "batch_norm" in kind else {}
    module = attention.MultiheadAttention(16, 4, batch_first=True, kind=kind, **options).double()
    x = torch.randn(2, 11, 16).double()
    cache = attention.Cache(kind, **options)
    steps = [module(*[x[:, t : t + 1]] * 3, need_weights=False, cache=cache)[0] for t in range(11)]
    near(torch.cat(steps, 1), module(x, x, x, need_weights=False, is_causal=True)[0], 1e-9)


def test_shared_heads() -> None:
    torch.manual_seed(0)
    module = attention.MultiheadAttention(16, 4, num_kv_heads=2, kind="batch_norm").double()
    assert module.k_proj_weight.shape == (8, 16)
    x = torch.randn(6, 3, 16).double()
    y, weights = module(x, x, x)
    assert y.shape == (6, 3, 16)
    assert weights.shape == (3, 6, 6)
    twin = attention.MultiheadAttention(16, 4, num_kv_heads=2, kind="batch_norm").double()
    twin.load_state_dict(module.state_dict())
    near(twin(x, x, x, need_weights=False)[0], y)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_torchs_encoder_does_not_take_its_shortcut_around_the_kind() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True).double()
    layer.self_attn = attention.MultiheadAttention(16, 4, batch_first=True, kind="linear").double()
    encoder = nn.TransformerEncoder(layer, 2).double()
    x = torch.randn(3, 6, 16).double()
    trained = encoder.train()(x).detach()
    with torch.no_grad():
        near(encoder.eval()(x), trained)


ONE = torch.ones(2, 3, 16)
WRONG = {
    "heads": (
        lambda: attention.MultiheadAttention(16, 4, num_kv_heads=3),
        "num_kv_heads=3 does not divide num_heads=4; every head of keys serves as many heads of "
        "queries.",
    ),
    "kind": (
        lambda: attention.MultiheadAttention(16, 4, kind="sparse"),
        "kind='sparse' is unknown; choose one of softmax, linear, local, batch_norm, "
        "scaled_heads, batch_norm_scaled_heads, entmax, ridge, hyper, robust.",
    ),
    "extra keys": (
        lambda: attention.MultiheadAttention(16, 4, add_bias_kv=True, kind="local"),
        "add_bias_kv and add_zero_attn add a key without a place in the sequence, which "
        "kind='local' or shared heads cannot use; leave them out.",
    ),
    "another's cache": (
        lambda: attention.MultiheadAttention(16, 4, kind="local")(
            ONE, ONE, ONE, need_weights=False, cache=attention.Cache("local", window=3)
        ),
        "the cache was made for kind='local' with {'scale': None, 'window': 3}, but this module "
        "reads kind='local' with {'scale': None, 'window': 64}; give Cache(kind, **options) the "
        "same.",
    ),
    "option": (
        lambda: attention.MultiheadAttention(16, 4, kind="batch_norm", epsilon=0.1),
        "kind='batch_norm' has no option 'epsilon'; it has scale, beta, eps, variance.",
    ),
    "weights of a cache": (
        lambda: attention.MultiheadAttention(16, 4)(ONE, ONE, ONE, cache=attention.Cache()),
        "with a cache every token sees all tokens before it; leave masks out and give "
        "need_weights=False.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    act, message = WRONG[name]
    with pytest.raises(AttentionError) as caught:
        act()
    assert str(caught.value) == message
