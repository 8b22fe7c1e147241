"""Tokens from block to block: the measures, the models they are read from, and known collapses."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from tests.diagnose.test_mask_graph import window
from torch import Tensor, nn

from dualform import attention
from dualform.diagnose import collapse, dobrushin, spread
from dualform.diagnose.blocks import BlockState, find_blocks, watched
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


def layer_norm(x: Tensor) -> Tensor:
    """Onto the unit sphere, token by token."""
    return nn.functional.normalize(x, dim=-1)


def test_layer_norm_with_some_values_keeps_rank_two() -> None:
    """The counterexample: N = d = 2, causal uniform attention, W_V = [[.5, 2], [0, 1]]."""
    W = torch.tensor([[0.5, 2.0], [0.0, 1.0]], dtype=torch.float64)
    A = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    angles = 2 * math.pi * torch.arange(720, dtype=torch.float64) / 720
    second = torch.stack([angles.cos(), angles.sin()], -1)
    x = torch.stack([torch.tensor([[0.6, 0.8]], dtype=torch.float64).expand(720, 2), second], 1)
    for _ in range(2000):
        x = layer_norm(A @ x @ W.T)
    apart = (x[:, 0] * x[:, 1]).sum(-1).abs() < 1 - 1e-6
    orthogonal = torch.linalg.qr(W).Q
    y = torch.stack([torch.tensor([[0.6, 0.8]], dtype=torch.float64).expand(720, 2), second], 1)
    for _ in range(2000):
        y = layer_norm(A @ y @ orthogonal.T)
    assert int(apart.sum()) > 0
    assert float(((y[:, 0] * y[:, 1]).sum(-1).abs() < 1 - 1e-6).double().mean()) < 0.01
    end = x[apart]
    assert torch.linalg.matrix_rank(end, atol=1e-3).eq(2).all()


def encoder(batch_first: bool = True, layers: int = 3, **options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=batch_first, **options)
    return nn.TransformerEncoder(block, layers, enable_nested_tensor=False)


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


def test_our_own_layers_are_seen() -> None:
    model = attention.replace(encoder(), "batch_norm")
    found = collapse(model, torch.randn(2, 6, 16))
    assert all(one.contraction is not None for one in found.layers)


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_transformers_are_seen(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(n_layer=3, n_embd=32, n_head=4, vocab_size=50)
        model, x = transformers.GPT2LMHeadModel(config), torch.randint(50, (2, 9))
    else:
        config = transformers.ViTConfig(
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=16,
            patch_size=4,
        )
        model, x = transformers.ViTModel(config), torch.randn(2, 3, 16, 16)
    found = collapse(model.eval(), x)
    assert len(found.layers) == 3
    plain = model(x, output_hidden_states=True).hidden_states[1]
    assert found.layers[0].spread.distance == pytest.approx(spread(plain).distance, rel=1e-4)
    assert all(one.contraction is not None and one.contraction < 1 for one in found.layers)


def test_a_result_prints_plots_and_becomes_a_frame() -> None:
    found = collapse(encoder(), torch.randn(2, 6, 16))
    assert "Differences between tokens" in repr(found)
    assert found.to_pandas().shape == (3, 5)
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
