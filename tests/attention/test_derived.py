"""Layers derived from primals of one's own, as usable as any other kind.

The law of all of them: a query reads as it would if there were no keys but those it sees.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.attention.cases import draw, near
from torch import Tensor, nn

from dualform import attention
from dualform.attention import BatchNorm, Primal, RmsNorm, Shorten, Transform
from dualform.attention.kinds import KINDS
from dualform.errors import AttentionError
from dualform.memory import Dot, EluPlusOne, Exponential, FeatureMap, Kernel


@dataclass(frozen=True)
class Whiten(Transform):
    """Σ^{-1/2} (x − μ) of the keys that are seen."""

    formula = r"\Sigma^{-1/2}(x - \mu)"
    depends_on_keys = True

    def apply(self, x: Tensor, keys: Tensor) -> Tensor:
        mean = keys.mean(-2, keepdim=True)
        apart = keys - mean
        eye = torch.eye(keys.shape[-1], dtype=keys.dtype)
        values, vectors = torch.linalg.eigh(apart.mT @ apart / keys.shape[-2] + 0.1 * eye)
        return (x - mean) @ vectors @ torch.diag_embed(values**-0.5) @ vectors.mT


@dataclass(frozen=True)
class Doubled(BatchNorm):
    """More than what it is made from."""

    def apply(self, x: Tensor, keys: Tensor) -> Tensor:
        return 2 * super().apply(x, keys)


@dataclass(frozen=True)
class Sharp(Exponential):
    """Not what it is made from."""

    def _weights(self, queries: Tensor, keys: Tensor) -> Tensor:
        return super()._weights(queries, keys) ** 2


@dataclass(frozen=True)
class Hedgehog(FeatureMap):
    """Features of one's own."""

    def features(self, x: Tensor) -> Tensor:
        return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)


@dataclass(frozen=True)
class Rbf(Kernel):
    """exp(−‖q − k‖²/2): features without end."""

    def _weights(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (-(queries[..., :, None, :] - keys[..., None, :, :]).square().sum(-1) / 2).exp()


def one_more(products: Tensor) -> Tensor:
    """h(x) = 1 + Σ_j Φ(x)·Φ(k_j): a query may attend to nothing."""
    return 1 + products.sum(-1, keepdim=True)


def greatest(products: Tensor) -> Tensor:
    return products.amax(-1, keepdim=True)


PRIMALS = {
    "softmax": Primal(),
    "linear": Primal(kernel=EluPlusOne()),
    "row by row": Primal(keys=(RmsNorm(),)),
    "own transformation": Primal(keys=(Whiten(),)),
    "made from batch_norm": Primal(keys=(Doubled(eps=0.1),)),
    "two transformations": Primal(keys=(RmsNorm(), Whiten()), kernel=Exponential(scale=0.8)),
    "own features": Primal(kernel=Hedgehog()),
    "own features, transformed": Primal(kernel=Hedgehog(), keys=(Whiten(),)),
    "own features, not divided": Primal(kernel=Hedgehog(), normalizer="one"),
    "own kernel": Primal(kernel=Rbf()),
    "own normalizer": Primal(normalizer=one_more),
    "own kernel and normalizer": Primal(kernel=Rbf(), normalizer=greatest, keys=(Whiten(),)),
    "batch_norm": Primal(keys=(BatchNorm(eps=0.1),)),
    "batch_norm, linear": Primal(keys=(BatchNorm(eps=0.1),), kernel=EluPlusOne()),
    "window": Primal(sees=2),
    "window, transformed": Primal(sees=2, keys=(Whiten(),)),
    "window, own features": Primal(sees=2, kernel=Hedgehog()),
}
CAUSAL = {
    **{name: primal for name, primal in PRIMALS.items() if primal.sees == "all"},
    "shortened": Primal(keys=(Shorten(2), RmsNorm())),
    "shortened and normalized": Primal(keys=(Shorten(3), BatchNorm(eps=0.1))),
}
MASKS: dict[str, Tensor | None] = {
    "none": None,
    "keys": torch.arange(9) != 3,
    "by sample": (torch.arange(9) < torch.tensor([[9], [6]]))[:, None, None],
    "by query": torch.rand(9, 9, generator=torch.Generator().manual_seed(0)) < 0.6,
    "by head": torch.rand(2, 4, 9, 9, generator=torch.Generator().manual_seed(1)) < 0.6,
}


def alone(primal: Primal, q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """Every query of every head by itself, with the keys it sees."""
    layer = Primal(**{**vars(primal), "sees": "all"}).attention()
    y = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        own = sees[b, h, i]
        if own.any():
            y[b, h, i] = layer(q[b, h, i : i + 1], k[b, h, own], v[b, h, own])[0]
    return y


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", PRIMALS)
def test_a_query_reads_as_if_there_were_only_keys_it_sees(
    name: str, mask: str, causal: bool
) -> None:
    primal, given = PRIMALS[name], MASKS[mask]
    q, k, v = draw(1, 9, 9)
    sees = torch.ones(2, 4, 9, 9, dtype=torch.bool)
    sees = sees if given is None else sees & given
    sees = sees.tril() if causal else sees
    if isinstance(primal.sees, int):
        i = torch.arange(9)
        sees = sees & ((i[:, None] - i).abs() <= primal.sees)
    expected = alone(primal, q, k, v, sees)
    near(primal.attention()(q, k, v, given, is_causal=causal), expected, 1e-8)
    if given is not None:
        numbers = torch.zeros(given.shape).double().masked_fill(~given, -1e9)
        some = sees.any(-1)  # a softmax of nothing but hidden keys is torch's: their mean
        y = primal.attention()(q, k, v, numbers, is_causal=causal)
        near(y[some], expected[some], 1e-8)


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_problems_are_causal_calls_and_never_look_ahead(name: str) -> None:
    primal = CAUSAL[name]
    q, k, v = draw(2, 12, 12)
    y = primal.attention()(q, k, v, is_causal=True)
    assert torch.equal(Primal(**{**vars(primal), "sees": "causal"}).attention()(q, k, v), y)
    near(primal.attention()(q[..., 7:, :], k, v, is_causal=True, offset=7), y[..., 7:, :])
    for position in (1, 5, 9):
        later = k.clone()
        later[..., position:, :] = 50
        changed = primal.attention()(q, later, v, is_causal=True)
        assert torch.equal(changed[..., :position, :], y[..., :position, :])


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("steps", [(1,) * 11, (6, 1, 4)], ids=["one by one", "in parts"])
def test_caches_decode_derived_layers(name: str, steps: tuple[int, ...]) -> None:
    q, k, v = draw(3, 11, 11)
    cache = attention.Cache(CAUSAL[name])
    parts = zip(*(x.split(steps, -2) for x in (q, k, v)), strict=True)
    read = torch.cat([cache(*part) for part in parts], -2)
    near(read, CAUSAL[name].attention()(q, k, v, is_causal=True), 1e-9)


@pytest.mark.parametrize("name", {**PRIMALS, **CAUSAL})
def test_grouped_heads_and_dropout(name: str) -> None:
    layer = {**PRIMALS, **CAUSAL}[name].attention()
    q, k, v = draw(4, 7, 7)
    twice = [x[:, :2].repeat_interleave(2, 1) for x in (k, v)]
    near(layer(q, k[:, :2], v[:, :2], is_causal=True), layer(q, *twice, is_causal=True))
    torch.manual_seed(0)
    y, weights = attention.with_weights(layer, q, k, v, dropout_p=0.5)
    near(weights @ v, y)
    kept = attention.with_weights(layer, q, k, v)[1]
    pooled = any(isinstance(step, Shorten) for step in layer.problem.keys)
    assert ((weights == 0) & (kept != 0)).any()
    if not pooled:
        dropped = weights == 0
        near(weights[~dropped], 2 * kept[~dropped])


@pytest.mark.parametrize("name", {**PRIMALS, **CAUSAL})
def test_a_problem_is_a_kind_of_the_module(name: str) -> None:
    torch.manual_seed(0)
    primal = {**PRIMALS, **CAUSAL}[name]
    module = attention.MultiheadAttention(12, 4, batch_first=True, kind=primal).double()
    x = torch.randn(2, 9, 12).double()
    y = module(x, x, x, is_causal=True, need_weights=False)[0]
    heads = primal.attention()(*module.heads(x, x, x), is_causal=True)
    near(y, module.out_proj(heads.transpose(1, 2).flatten(2)))
    near(module(x, x, x, is_causal=True)[0], y)
    if primal.sees == "all":
        cache = attention.Cache(primal)
        steps = [
            module(*[x[:, t : t + 1]] * 3, need_weights=False, cache=cache)[0] for t in range(9)
        ]
        near(torch.cat(steps, 1), y, 1e-9)
    if primal.sees == "all" and "shortened" not in name:
        padding = torch.arange(9) >= torch.tensor([[9], [6]])
        near(module(x, x, x, padding)[0][1:, :6], module(x[1:, :6], *[x[1:, :6]] * 2)[0], 1e-9)
        joints = attention.inspect(module, x)
        assert joints.alpha[0].shape == (2, 9, 3)
    memory = attention.memory(primal, *module.heads(x, x, x)[1:])
    near(memory.read(module.heads(x, x, x)[0]), primal.attention()(*module.heads(x, x, x)))


def test_a_subclass_is_asked_for_what_it_does() -> None:
    q, k, v = draw(6, 5, 5)
    kept = [BatchNorm(eps=0.1).apply(x, k) for x in (q, k)]
    expected = attention.softmax(2 * kept[0], 2 * kept[1], v)
    near(PRIMALS["made from batch_norm"].attention()(q, k, v), expected)


SEEING = {
    "own transformation": Primal(keys=(Whiten(),), sees="causal"),
    "own transformation, window": Primal(keys=(Whiten(),), sees=3),
    "batch_norm, window": Primal(keys=(BatchNorm(eps=0.1),), sees=3),
    "shortened and transformed": Primal(keys=(Shorten(3), Whiten()), sees="causal"),
    "own kernel": Primal(kernel=Rbf(), sees="causal"),
    "own normalizer": Primal(normalizer=one_more, sees="causal"),
    "own features": Primal(kernel=Hedgehog(), sees="causal"),
}


@pytest.mark.parametrize("name", SEEING)
@pytest.mark.parametrize("at", [0, 4, 11])
def test_attention_is_the_solved_regression_of_what_is_seen(name: str, at: int) -> None:
    primal = SEEING[name]
    q, k, y = (x[0] for x in draw(7, 12, 12, batch=(1,)))
    solution = primal.solve(k, y, at=at)
    read = primal.attention()(*(x[None] for x in (q, k, solution.values)))[0] + solution.b
    near(read[at], solution.predict(q[at : at + 1])[0], 1e-10)


# --- what is learned --------------------------------------------------------------------------


class Stretched(Transform, nn.Module):
    """x ∘ w, w learned."""

    formula = "w x"

    def __init__(self, width: int) -> None:
        nn.Module.__init__(self)
        self.w = nn.Parameter(torch.ones(width))

    def apply(self, x: Tensor, keys: Tensor) -> Tensor:  # type: ignore[override]
        return x * self.w


@pytest.mark.parametrize(
    ("primal", "name"),
    [
        (lambda: Primal(keys=(Stretched(4),)), "keys_0.w"),
        (lambda: Primal(keys=(BatchNorm(nn.Parameter(torch.ones(4, 1, 1))),)), "keys_0_beta"),
    ],
)
def test_what_a_problem_learns_the_module_owns(primal: Any, name: str) -> None:
    torch.manual_seed(0)
    module = attention.MultiheadAttention(16, 4, kind=primal())
    assert name in dict(module.named_parameters())
    x = torch.randn(5, 3, 16)
    module(x, x, x)[0].square().sum().backward()
    assert dict(module.named_parameters())[name].grad.abs().sum() > 0
    twin = copy.deepcopy(module)
    with torch.no_grad():
        dict(twin.named_parameters())[name].mul_(1.5)
    assert not torch.allclose(twin(x, x, x)[0], module(x, x, x)[0])
    module.load_state_dict(twin.state_dict())
    assert torch.equal(twin(x, x, x)[0], module(x, x, x)[0])


# --- the registry -----------------------------------------------------------------------------


def halved(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    share: float = 0.5,
    offset: int = 0,
    dropout_p: float = 0.0,
) -> Tensor:
    given: dict[str, Any] = {"offset": offset, "dropout_p": dropout_p}
    return share * attention.softmax(q, k, v, attn_mask, is_causal, scale, **given)


def test_a_name_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualform.attention.kinds.KINDS", dict(KINDS))
    monkeypatch.setattr("dualform.attention.cache.KINDS", KINDS)
    assert attention.register_kind("halved", halved) == "halved"
    attention.register_kind("whitened", PRIMALS["own transformation"])
    q, k, v = draw(5, 7, 7)
    near(attention.kind("halved")(q, k, v), attention.softmax(q, k, v) / 2)
    expected = attention.softmax(q, k, v, is_causal=True)
    near(attention.Cache("halved", share=1.0)(q, k, v), expected)
    near(attention.kind("whitened")(q, k, v), PRIMALS["own transformation"].attention()(q, k, v))
    with pytest.raises(AttentionError) as caught:
        attention.MultiheadAttention(16, 4, kind="whitened", window=3)
    assert str(caught.value) == "kind='whitened' has no option 'window'; it has scale."
    near(attention.kind(halved, share=1.0)(q, k, v), attention.softmax(q, k, v))


WRONG: dict[str, tuple[Any, str]] = {
    "no layer": (
        lambda: attention.kind(3),
        "kind=3 is no layer; give a name (softmax, linear, local, batch_norm, scaled_heads, "
        "batch_norm_scaled_heads, entmax, ridge, hyper, robust), a Primal, or a function of q, k, "
        "v.",
    ),
    "arguments": (
        lambda: attention.MultiheadAttention(16, 4, kind=greatest),
        "kind=greatest takes products, but not attn_mask, is_causal, scale, offset, dropout_p; a "
        "layer takes q, k, v and the keywords attn_mask, is_causal, scale, offset, dropout_p. "
        "Refuse in it what it cannot do.",
    ),
    "normalized kernel": (
        lambda: Primal(kernel=attention.memories.LayerKernel("softmax")),
        "kernel=LayerKernel(kind='softmax', options={}) gives no products Φ(x)·Φ(y); give "
        "Exponential, a FeatureMap or a Kernel of your own that is not normalized: h is the "
        "problem's normalizer.",
    ),
    "made from exp": (
        lambda: Primal(kernel=Sharp()),
        "kernel=Sharp(scale=None) is made from Exponential, whose weights are known without asking "
        "it; make a Kernel of your own that gives the products instead.",
    ),
    "shape of h": (
        lambda: Primal(kernel=Dot(), normalizer=torch.sum).attention()(*draw(1, 3, 4)),
        "the normalizer made () of products (2, 4, 3, 4); it must give one number a row, "
        "(2, 4, 3, 1).",
    ),
    "mask of blocks": (
        lambda: Primal(keys=(Shorten(2), Whiten())).attention()(
            *draw(1, 4, 4), torch.ones(4, dtype=torch.bool)
        ),
        "attn_mask cannot be used with (Shorten(factor=2, pool='mean'), Whiten()), since the keys "
        "of a block have one weight; leave the mask out, or use kind='scaled_heads'.",
    ),
    "overflow": (
        lambda: Primal(normalizer=one_more).attention()(*(x.float() * 99 for x in draw(1, 4, 4))),
        "weights of Exponential(scale=None) left the range of torch.float32; normalize queries and "
        "keys (keys=(RmsNorm(),)), or choose a smaller scale.",
    ),
    "inspection": (
        lambda: attention.inspect(
            attention.MultiheadAttention(16, 4, kind="entmax"), torch.ones(3, 1, 16)
        ),
        "kind='entmax' is not known as a regression; inspect takes a Primal or one of softmax, "
        "linear, local, batch_norm, scaled_heads, batch_norm_scaled_heads, ridge.",
    ),
    "inspection of a window": (
        lambda: attention.inspect(
            attention.MultiheadAttention(16, 4, kind=Primal(sees=2)), torch.ones(3, 1, 16)
        ),
        "inspect asks what all keys together would be as one regression, but with sees=2 every "
        "query has its own; inspect the problem with sees='all'.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    act, message = WRONG[name]
    with pytest.raises(AttentionError) as caught:
        act()
    assert str(caught.value) == message


def test_a_transformation_that_hides_that_it_looks_at_keys_is_found_out() -> None:
    @dataclass(frozen=True)
    class Sly(Transform):
        formula = "x"

        def apply(self, x: Tensor, keys: Tensor) -> Tensor:
            return x - keys.mean(-2, keepdim=True)

    assert Primal(keys=(Sly(),)).attention()(*draw(1, 4, 4)).isnan().all()


def test_explanations_name_what_is_ones_own() -> None:
    lines = Primal(kernel=Rbf(), normalizer=one_more).explain().splitlines()
    assert lines[0] == "Model     f(x) = W Φ(x)/h(x) + b with h(x) = one_more, over all keys"
    assert lines[1] == "Features  Φ(x)·Φ(y) = κ(x, y) of Rbf()"
    assert lines[-1] == "y(q) = Σ_j κ(q, k_j) v_j / h(q) + b, over all keys"
    latex = Primal(kernel=Rbf(), normalizer=one_more).explain(latex=True)
    assert r"y(q) &= \frac{\sum_j \kappa(q, k_j)\, v_j}{h(q)} + b" in latex
    assert r"\Phi(x)^\top\Phi(y) &= \kappa(x, y) \text{ of Rbf()}" in latex
