"""Latent codes of a model's pairs of tokens, and what a ridge probe tells of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dualform import attention, diagnose
from dualform.attention.hyper import latent_codes
from dualform.errors import AttentionError

law = settings(deadline=None, max_examples=15)


def encoder(kind: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return attention.replace(model, kind, **options)


@pytest.mark.parametrize("scores", ["rms", "dot", "softmax"])
def test_codes_of_a_model_are_those_of_its_queries_and_keys(scores: str) -> None:
    model, x = encoder("hyper", scores=scores), torch.randn(3, 7, 16)
    inputs: list[Tensor] = []
    second = model.layers[1].self_attn
    second.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    codes = diagnose.pair_codes(model, x, queries=[-1, 2], keys=slice(1, None))
    assert [*codes] == ["layers.0.self_attn", "layers.1.self_attn"]
    q, k, _ = second.heads(*inputs * 3)
    expected = latent_codes(q, k, scores=scores)[:, :, [6, 2]][..., 1:].permute(0, 2, 3, 1)
    assert torch.allclose(codes["layers.1.self_attn"], expected, atol=1e-6)
    assert model.training  # and its dropout was off


def test_codes_of_other_kinds_are_the_weights_of_their_heads() -> None:
    for kind in ("softmax", "linear", "ridge"):
        codes = diagnose.pair_codes(encoder(kind), torch.randn(2, 5, 16))
        weights = codes["layers.0.self_attn"]
        assert weights.shape == (2, 5, 5, 4)
        if kind != "ridge":
            assert torch.allclose(weights.sum(2), torch.ones(2, 5, 4), atol=1e-5)


class Bare(nn.Module):
    """A block that calls torch's fused attention twice, 2 heads of 4 each."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
            y = nn.functional.scaled_dot_product_attention(heads, heads, heads)
            x = x + y.transpose(1, 2).flatten(2) + self.bias
        return x


def test_blocks_without_modules_of_attention_have_codes_too() -> None:
    model, x = nn.Sequential(Bare(), Bare()), torch.randn(3, 5, 8)
    codes = diagnose.pair_codes(model, x)
    assert [*codes] == ["0", "0 #2", "1", "1 #2"]
    heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
    weights = torch.softmax(heads @ heads.mT / 2, -1)
    assert torch.allclose(codes["0"], weights.permute(0, 2, 3, 1), atol=1e-6)
    assert [*diagnose.pair_codes(model, x, layers="1")] == ["1", "1 #2"]


@pytest.mark.long
def test_transformers_that_read_by_hyper_have_codes() -> None:
    transformers = pytest.importorskip("transformers")
    from dualform.attention.transformers import register

    register()
    config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=16, vocab_size=50)
    model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="dualform_hyper")
    codes = diagnose.pair_codes(model, input_ids=torch.randint(50, (2, 6)))
    assert [*codes] == ["transformer.h.0", "transformer.h.1"]
    found = codes["transformer.h.0"]
    assert found.shape == (2, 6, 6, 4)
    assert (found[:, 0, 1:] == 0).all()  # which the mask hides
    assert (found[:, -1].square().mean(-1) > 0).all()


def test_pairs_that_do_not_exist_are_refused() -> None:
    with pytest.raises(AttentionError, match=r"no token 7: sequences have 7 tokens, 0 to 6"):
        diagnose.pair_codes(encoder("hyper"), torch.randn(3, 7, 16), queries=[7])
    with pytest.raises(AttentionError, match=r"no row of 2 or more modules"):
        diagnose.pair_codes(nn.Linear(3, 3), torch.randn(3))


def draw(seed: int, rows: int, features: int, classes: int) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (rows,), generator=stream)
    labels[:classes] = torch.arange(classes)
    return torch.randn(rows, features, generator=stream).double(), labels


@law
@given(st.integers(0, 1000), st.integers(20, 40), st.integers(1, 8), st.floats(0.01, 10))
def test_the_probe_is_ridge_regression(seed: int, rows: int, features: int, damping: float) -> None:
    """Its weights minimize squared errors and λ times their squares, in scaled features."""
    x, labels = draw(seed, 2 * rows, features, 3)
    probe = diagnose.ridge_probe(x, labels, damping=damping)
    order = torch.randperm(2 * rows, generator=torch.Generator().manual_seed(0))
    fitted = order[rows:]
    scaled = (x[fitted] - x[fitted].mean(0)) / x[fitted].std(0, unbiased=False)
    told = torch.stack([labels[fitted] == one for one in probe.classes], 1).double()
    W = probe.weights * x[fitted].std(0, unbiased=False)[:, None]
    slope = scaled.T @ (scaled @ W + probe.intercept - told) + damping * features * W
    assert float(slope.abs().max()) < 1e-8 * rows
    assert torch.allclose(told.mean(0), probe.intercept)
    tested = order[:rows]
    assert probe.accuracy == float((probe.predict(x[tested]) == labels[tested]).double().mean())


def test_what_is_held_out_is_not_fitted_to() -> None:
    """Labels without any relation to x are told as by chance, however many features there are."""
    x, labels = draw(0, 4000, 200, 4)
    probe = diagnose.ridge_probe(x, labels)
    low, high = probe.interval
    assert low < 0.25 < high
    assert "no better than chance" in probe.finding


def test_rows_of_a_group_are_held_out_together() -> None:
    """Else a probe that knows groups by heart would tell labels that belong to groups alone."""
    stream = torch.Generator().manual_seed(0)
    groups = torch.arange(60).repeat_interleave(20)
    labels = torch.randint(2, (60,), generator=stream)[groups]
    x = torch.eye(60)[groups] + 0.02 * torch.randn(1200, 60, generator=stream)
    by_heart = diagnose.ridge_probe(x, labels, damping=0.01)
    apart = diagnose.ridge_probe(x, labels, groups, damping=0.01)
    assert by_heart.accuracy > 0.95
    assert apart.interval[0] < 0.5 < apart.interval[1]
    assert apart.interval[1] - apart.interval[0] > 0.3  # 30 groups are 30 draws


def test_the_interval_has_the_right_share_as_often_as_it_says() -> None:
    """Labels that are told right by chance, with 0.9: 95 % of intervals have it inside."""
    inside = 0
    for seed in range(200):
        _, labels = draw(seed, 200, 1, 2)
        stream = torch.Generator().manual_seed(seed)
        shown = torch.where(torch.rand(200, generator=stream) < 0.9, labels, 1 - labels)
        probe = diagnose.ridge_probe(torch.eye(2)[shown], labels, seed=seed)
        inside += probe.interval[0] <= 0.9 <= probe.interval[1]
    assert 178 <= inside <= 200


def test_vectors_that_are_all_one_tell_nothing() -> None:
    _, labels = draw(0, 100, 1, 3)
    probe = diagnose.ridge_probe(torch.ones(100, 4), labels)
    assert probe.accuracy == probe.chance
    assert torch.isfinite(probe.weights).all()


def test_a_probe_prints_a_line_for_each_label() -> None:
    text = str(diagnose.ridge_probe(torch.eye(3).repeat(20, 1), torch.arange(3).repeat(20) + 5))
    assert "│ 7     │" in text
    assert "The probe tells 100.0% of 30 held-out labels" in text


def test_what_cannot_be_probed_is_refused() -> None:
    x, labels = draw(0, 10, 2, 2)
    with pytest.raises(
        AttentionError, match=r"x has shape \(10, 2, 1\), labels \(10,\) .* \.flatten"
    ):
        diagnose.ridge_probe(x[..., None], labels)
    with pytest.raises(AttentionError, match=r"labels are of type torch.float32"):
        diagnose.ridge_probe(x, labels.float())
    with pytest.raises(AttentionError, match=r"all labels are the same"):
        diagnose.ridge_probe(x, torch.zeros(10).long())
    with pytest.raises(AttentionError, match=r"held_out=1.0 of 10 groups leaves none to fit to"):
        diagnose.ridge_probe(x, labels, held_out=1.0)
    with pytest.raises(AttentionError, match=r"numbers that are not finite"):
        diagnose.ridge_probe(x * torch.inf, labels)
