"""Tokens from block to block: the measures, the models they are read from, and known collapses."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from tests.diagnose.models import encoder, gpt2, vit
from tests.diagnose.test_mask_graph import window
from torch import Tensor, nn

from dualform import attention
from dualform.diagnose import Collapse, LayerSpread, collapse, dobrushin, spread
from dualform.diagnose.blocks import find_blocks, watched
from dualform.diagnose.calls import BlockState
from dualform.errors import AttentionError


def test_measures_are_those_of_plain_linear_algebra() -> None:
    x = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    found, count = spread(x), 7
    center = torch.eye(count).double() - 1 / count
    apart = [float(torch.linalg.norm(center @ one)) for one in x]
    sizes = [float(torch.linalg.norm(one)) for one in x]
    sigmas = [float(torch.linalg.svdvals(one)[0]) for one in x]
    cosines = [
        abs(float(torch.dot(one[i], one[j]) / one[i].norm() / one[j].norm()))
        for one in x
        for i in range(count)
        for j in range(i)
    ]
    assert found.distance == pytest.approx(sum(apart) / 3, rel=1e-12)
    assert found.relative == pytest.approx(
        sum(a / b for a, b in zip(apart, sizes, strict=True)) / 3
    )
    ranks = [(a / b) ** 2 for a, b in zip(sizes, sigmas, strict=True)]
    assert found.stable_rank == pytest.approx(sum(ranks) / 3, rel=1e-3)
    assert found.cosine == pytest.approx(sum(cosines) / len(cosines), rel=1e-12)


@pytest.mark.parametrize("mask", ["complete", "causal"])
def test_attention_alone_collapses_and_a_narrow_window_does_not(mask: str) -> None:
    """Wu et al.: the tokens' distance vanishes at a rate that the mask decides."""
    generator = torch.Generator().manual_seed(0)
    masks = {"complete": window(32, 32, 32), "causal": window(32, 32, 0), "near": window(32, 1, 1)}
    ends = {}
    for name in (mask, "near"):
        x = torch.randn(1, 32, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        for _ in range(20):
            W = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64)).Q
            weights = torch.softmax(torch.zeros(32, 32).masked_fill(~masks[name], -torch.inf), -1)
            x = weights.double() @ x @ W
        ends[name] = spread(x).relative
    assert ends[mask] < 1e-3 if mask == "causal" else ends[mask] < 1e-12
    assert ends["near"] > 0.3


@pytest.mark.parametrize(("count", "width"), [(30, 40), (197, 300), (520, 700), (700, 520)])
def test_stable_rank_of_flat_spectra_is_exact(count: int, width: int) -> None:
    """Where many singular values are close to the largest, it is slow to find."""
    x = torch.randn(2, count, width, generator=torch.Generator().manual_seed(0))
    exact = [float((one.norm() / torch.linalg.svdvals(one)[0]) ** 2) for one in x.double()]
    assert spread(x).stable_rank == pytest.approx(sum(exact) / 2, rel=1e-3)


def ends(W: Tensor, starts: Tensor) -> Tensor:
    """Two tokens under causal uniform attention, values `x @ W` and norms of 1, after 2000 layers.

    The second starts at each of some angles, the first at (0.3, 1) / ‖·‖.
    """
    A = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    second = torch.stack([starts.cos(), starts.sin()], -1)
    first = nn.functional.normalize(torch.tensor([0.3, 1.0], dtype=torch.float64), dim=0)
    x = torch.stack([first.expand_as(second), second], 1)
    for _ in range(2000):
        x = nn.functional.normalize(A @ x @ W, dim=-1)
    return x


def test_layer_norm_with_some_values_keeps_rank_two() -> None:
    """Wu et al.'s counterexample: N = d = 2, W_V = [[.5, 2], [0, 1]] for rows as vectors."""
    W = torch.tensor([[0.5, 2.0], [0.0, 1.0]], dtype=torch.float64)
    angles = 2 * math.pi * torch.arange(720, dtype=torch.float64) / 720
    x = ends(W, angles)
    apart = torch.tensor([spread(one[None]).stable_rank > 1.01 for one in x])
    assert int(apart.sum()) == 204
    expected = torch.tensor([[0.0, 1.0], [-0.2585, -0.9660]], dtype=torch.float64)
    torch.testing.assert_close(x[apart], expected.expand(204, 2, 2), rtol=0, atol=1e-4)
    kept = spread(x[apart])
    assert kept.stable_rank == pytest.approx(2 / (1 + 0.9660), abs=1e-3)  # cos is -0.9660
    assert kept.relative > 0.9
    one = spread(x[~apart])
    assert one.stable_rank == pytest.approx(1, abs=1e-9)
    orthogonal = spread(ends(torch.linalg.qr(W).Q, angles[1:]))
    assert orthogonal.stable_rank == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("training", [True, False])
@torch.no_grad()
def test_torch_encoders_are_seen_block_by_block_and_left_as_they_were(training: bool) -> None:
    model, x = encoder().train(training), torch.randn(2, 6, 16)
    before = copy.deepcopy(model)(x)
    found = collapse(model, x)
    assert [one.name for one in found.layers] == ["layers.0", "layers.1", "layers.2"]
    hidden = x
    for one, block in zip(found.layers, model.layers, strict=True):
        assert isinstance(block, nn.TransformerEncoderLayer)
        _, weights = block.self_attn(hidden, hidden, hidden, average_attn_weights=False)
        assert one.contraction == pytest.approx(float(dobrushin(weights).mean()), rel=1e-4)
        assert one.least_weight == pytest.approx(float(weights.min()), rel=1e-4)
        hidden = block(hidden)
        assert one.spread.distance == pytest.approx(spread(hidden).distance, rel=1e-4)
    assert torch.equal(model(x), before)
    assert not any(module._forward_hooks for module in model.modules())


def test_tokens_may_come_first() -> None:
    model, x = encoder(batch_first=False), torch.randn(6, 2, 16)
    twin = encoder(batch_first=True)
    twin.load_state_dict(model.state_dict())
    first, other = collapse(model, x), collapse(twin, x.transpose(0, 1))
    for a, b in zip(first.layers, other.layers, strict=True):
        assert a.spread.relative == pytest.approx(b.spread.relative, rel=1e-4)
        assert a.contraction == pytest.approx(b.contraction, rel=1e-4)


def test_masks_are_seen() -> None:
    model, x = encoder().eval(), torch.randn(2, 6, 16)
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    weights: list[Tensor] = []

    def see(seen: BlockState) -> None:
        weights.extend(seen.weights)

    with watched(model, find_blocks(model), see, with_weights=True):
        model(x, mask=causal, is_causal=True)
    assert len(weights) == 3
    for one in weights:
        assert one.shape == (2, 4, 6, 6)
        assert torch.equal(one.triu(1), torch.zeros_like(one))
        torch.testing.assert_close(one.sum(-1), torch.ones(2, 4, 6))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("softmax", {}),
        ("batch_norm", {}),
        ("scaled_heads", {"factors": (1, 2)}),
        ("local", {"window": 2}),
        ("linear", {}),
    ],
)
@torch.no_grad()
def test_our_own_layers_are_seen_once(kind: str, options: dict[str, Any]) -> None:
    """By their own weights, whatever calls their layers make inside."""
    model, x = attention.replace(encoder(), kind, **options), torch.randn(2, 6, 16)
    found = collapse(model, x)
    block: Any = next(model.children())[0]
    _, weights = block.self_attn(x, x, x, average_attn_weights=False)
    assert found.layers[0].contraction == pytest.approx(float(dobrushin(weights).mean()), rel=1e-4)
    assert found.layers[0].least_weight == pytest.approx(float(weights[weights > 0].min()))


@pytest.mark.parametrize(
    ("kind", "options"), [("hyper", {}), ("ridge", {}), ("linear", {"normalized": False})]
)
def test_weights_that_are_no_averages_have_no_contraction(
    kind: str, options: dict[str, Any]
) -> None:
    found = collapse(attention.replace(encoder(), kind, **options), torch.randn(2, 6, 16))
    assert [one.contraction for one in found.layers] == [None] * 3


def test_half_precision_is_seen() -> None:
    x = torch.randn(2, 6, 16)
    found, exact = collapse(encoder().bfloat16(), x.bfloat16()), collapse(encoder(), x)
    for one, other in zip(found.layers, exact.layers, strict=True):
        assert one.contraction == pytest.approx(other.contraction, rel=0.1)
        assert one.spread.distance == pytest.approx(other.spread.distance, rel=0.1)


class UsesWeights(nn.Module):
    """A block that reads what its attention returns for weights."""

    def __init__(self, average: bool) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 4, batch_first=True)
        self.average = average

    def forward(self, x: Tensor) -> Tensor:
        _, none = self.attn(x, x, x, None, False)
        assert none is None
        y, weights = self.attn(x, x, x, None, True, None, self.average)
        assert weights.shape == (2, 6, 6) if self.average else (2, 4, 6, 6)
        seen = weights if self.average else weights.mean(1)
        return y + seen @ x  # type: ignore[no-any-return]


@pytest.mark.parametrize("average", [True, False])
@torch.no_grad()
def test_models_get_the_weights_they_ask_for(average: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(UsesWeights(average), UsesWeights(average)), torch.randn(2, 6, 16)
    found = collapse(model, x)
    assert found.layers[1].spread.distance == pytest.approx(spread(model(x)).distance, rel=1e-5)
    block: Any = model[0]
    _, weights = block.attn(x, x, x, average_attn_weights=False)
    twice = float(dobrushin(weights).mean()) ** 2
    assert found.layers[0].contraction == pytest.approx(twice, rel=1e-5)


class Normed(nn.Module):
    """A block with all that differs in training: dropout of weights, and running statistics."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True)
        self.norm, self.fused = nn.BatchNorm1d(16), fused

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            p = 0.5 if self.training else 0.0
            y = nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=p)
        else:
            y = self.attn(x, x, x)[0]
        return self.norm(y.mT).mT  # type: ignore[no-any-return]


@pytest.mark.parametrize("fused", [False, True])
def test_training_mode_changes_neither_what_is_measured_nor_the_model(fused: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Normed(fused), Normed(fused)), torch.randn(2, 6, 16)
    expected = collapse(model.eval(), x).to_pandas()
    model.train()[1].eval()
    before = copy.deepcopy(model.state_dict())
    assert collapse(model, x).to_pandas().equals(expected)
    assert model[0].training
    assert not model[1].training
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@torch.no_grad()
def test_cross_attention_brings_no_tokens_together() -> None:
    torch.manual_seed(0)
    block = nn.TransformerDecoderLayer(16, 4, 32, 0.0, batch_first=True)
    model, x = nn.TransformerDecoder(block, 2), torch.randn(2, 6, 16)
    for other in (torch.randn(2, 9, 16), torch.randn(2, 6, 16)):
        found = collapse(model, x, other)
        own: Any = model.layers[0]
        _, weights = own.self_attn(x, x, x, average_attn_weights=False)
        tau = float(dobrushin(weights).mean())
        assert found.layers[0].contraction == pytest.approx(tau, rel=1e-5)


class Fused(nn.Module):
    """A block of one fused call."""

    def __init__(self, mask: Tensor | None = None, keys: int = 6) -> None:
        super().__init__()
        self.linear, self.mask, self.keys = nn.Linear(16, 16), mask, keys

    def forward(self, x: Tensor) -> Tensor:
        k = self.linear(x)[:, : self.keys]
        return x + nn.functional.scaled_dot_product_attention(x, k, k, self.mask)


def test_fused_calls_that_see_nothing_or_other_tokens_are_not_counted() -> None:
    x = torch.randn(2, 6, 16)
    for blocks in ([Fused(torch.zeros(6, 6).bool())] * 2, [Fused(keys=4)] * 2):
        found = collapse(nn.Sequential(*blocks), x)
        assert [one.contraction for one in found.layers] == [None, None]
        assert [one.least_weight for one in found.layers] == [None, None]
    assert collapse(nn.Sequential(Fused(), Fused()), x).layers[0].contraction is not None


def test_patterns_name_the_outermost_modules() -> None:
    model, x = encoder(), torch.randn(2, 6, 16)
    expected = collapse(model, x).to_pandas()
    for pattern in ("layers.*", "layers*", ["layers.?", "layers.2"]):
        assert collapse(model, x, layers=pattern).to_pandas().equals(expected)
    inner = collapse(model, x, layers="*self_attn*")
    assert [one.name for one in inner.layers] == [f"layers.{at}.self_attn" for at in range(3)]
    assert [one.contraction for one in inner.layers] == expected["contraction"].tolist()
    both = collapse(model, x, layers=["layers.0", "layers.0.self_attn"])
    assert [one.name for one in both.layers] == ["layers.0.self_attn", "layers.0"]
    assert {one.contraction for one in both.layers} == {expected["contraction"].iloc[0]}


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_transformers_are_seen(name: str) -> None:
    model, x = gpt2() if name == "gpt2" else vit()
    found = collapse(model, x)
    assert len(found.layers) == 3
    plain = model(x, output_hidden_states=True).hidden_states[1]
    assert found.layers[0].spread.distance == pytest.approx(spread(plain).distance, rel=1e-4)
    assert all(one.contraction is not None and one.contraction < 1 for one in found.layers)


@pytest.mark.parametrize("kind", ["softmax", "scaled_heads", "ridge", "hyper"])
@torch.no_grad()
def test_transformers_that_read_by_our_kinds_are_seen(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
    )
    model, x = transformers.ViTModel(config).eval(), torch.randn(2, 3, 16, 16)
    plain = collapse(model, x)
    found = collapse(attention.replace(model, kind), x)
    if kind in ("ridge", "hyper"):
        assert [one.contraction for one in found.layers] == [None, None]
        return
    asked = model(x, output_attentions=True).attentions
    for one, weights in zip(found.layers, asked, strict=True):
        assert one.contraction == pytest.approx(float(dobrushin(weights).mean()), rel=1e-4)
    assert (plain.layers[0].contraction == pytest.approx(found.layers[0].contraction)) == (
        kind == "softmax"
    )


def scaled(*sizes: float) -> Collapse:
    """What is found of tokens of which each block leaves that much, but for their mean."""
    x = torch.randn(1, 9, 4, generator=torch.Generator().manual_seed(0))
    x = x - x.mean(1, keepdim=True)
    layers = (torch.ones(4) + size * x for size in sizes)
    return Collapse(tuple(LayerSpread(f"h.{at}", spread(y)) for at, y in enumerate(layers)))


def test_findings_say_what_happens_to_differences() -> None:
    assert scaled(0.01, 0.005, 0.0025).finding.startswith(
        "Differences between tokens are multiplied by 0.500 from block to block: in the end they "
        "are 0."
    )
    assert "stay as they are: in the end" in scaled(0.1, 0.1).finding
    assert scaled(0.1).finding.startswith("Differences between tokens are, after 'h.0', ")
    for bad in (math.nan, math.inf):
        said = "Tokens after 'h.1' are not finite, so their differences are not known."
        assert scaled(0.1, bad, 0.1).finding == said
        assert said in repr(scaled(0.1, bad)).replace("\n", " ")


def test_a_result_prints_plots_and_becomes_a_frame() -> None:
    found = collapse(encoder(), torch.randn(2, 6, 16))
    assert "Differences between tokens" in repr(found)
    assert found.to_pandas().shape == (3, 6)
    assert found.to_pandas()["least_weight"].tolist() == [x.least_weight for x in found.layers]
    assert len(found.plot().lines) == 2
    same = collapse(encoder(), torch.zeros(2, 6, 16))
    assert same.collapsed == "layers.0"
    assert same.finding == "All tokens are one after 'layers.0'."


def test_models_without_blocks_are_refused() -> None:
    with pytest.raises(AttentionError, match="Linear has no row of 2 or more modules of one kind"):
        collapse(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(AttentionError, match=r"layers has 'block\*', and no module .* 'layers'"):
        collapse(encoder(), torch.ones(1, 3, 16), layers="block*")
    pictures = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))
    with pytest.raises(
        AttentionError, match=r"'0' returned \(1, 3, 4, 4\); a block of a transformer"
    ):
        collapse(pictures, torch.ones(1, 3, 4, 4))
