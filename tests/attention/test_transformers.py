"""Small random GPT-2, Llama and ViT by transformers, with the layers: training and generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from dualform.attention.transformers import register
from dualform.errors import AttentionError

NAMES = register()
CAUSAL = [name for name in NAMES if name != "dualform_ridge"]


def gpt2(attention: str) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=17,
        n_positions=64,
        n_embd=16,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    return GPT2LMHeadModel._from_config(config, attn_implementation=attention)


def llama(attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=17,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation=attention)


def vit(attention: str) -> ViTForImageClassification:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        image_size=16,
        patch_size=4,
        num_channels=1,
        num_labels=3,
    )
    return ViTForImageClassification._from_config(config, attn_implementation=attention)


def losses(model: nn.Module, steps: int = 12, **batch: Tensor) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    found = []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("make", [gpt2, llama])
def test_softmax_is_their_own(make: Any) -> None:
    tokens = torch.randint(1, 17, (2, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    ours, theirs = make("dualform_softmax").eval(), make("sdpa").eval()
    with torch.no_grad():
        for padding in (None, mask):
            seen = slice(None) if padding is None else padding.bool()
            pair = [m(tokens, attention_mask=padding).logits[seen] for m in (ours, theirs)]
            torch.testing.assert_close(*pair)


@pytest.mark.parametrize("attention", CAUSAL)
@pytest.mark.parametrize("make", [gpt2, llama])
def test_language_models_learn_and_generate(attention: str, make: Any) -> None:
    model = make(attention)
    tokens = torch.randint(1, 17, (4, 24), generator=torch.Generator().manual_seed(1))
    found = losses(model, input_ids=tokens, labels=tokens)
    assert found[-1] < 0.9 * found[0]
    model.eval()
    with_cache, without = (
        model.generate(tokens[:, :9], max_new_tokens=10, do_sample=False, use_cache=cached)
        for cached in (True, False)
    )
    assert torch.equal(with_cache, without)
    with torch.no_grad():
        logits = model(tokens).logits
        changed = tokens.clone()
        changed[:, 15:] = 3
        assert torch.equal(model(changed).logits[:, :15], logits[:, :15])


@pytest.mark.parametrize("attention", ["dualform_batch_norm", "dualform_linear", "dualform_local"])
def test_left_padding_changes_nothing(attention: str) -> None:
    model = llama(attention).eval()
    tokens = torch.randint(1, 17, (1, 9), generator=torch.Generator().manual_seed(2))
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), tokens], 1)
    mask = (torch.arange(13) >= 4).long()[None]
    places = torch.arange(-4, 9).clamp(min=0)[None]
    with torch.no_grad():
        plain = model(tokens).logits
        shifted = model(padded, attention_mask=mask, position_ids=places).logits[:, 4:]
    torch.testing.assert_close(shifted, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", NAMES)
def test_vision_transformers_learn(attention: str) -> None:
    pixels = torch.randn(6, 1, 16, 16, generator=torch.Generator().manual_seed(3))
    model = vit(attention)
    found = losses(model, pixel_values=pixels, labels=torch.tensor([0, 1, 2, 0, 1, 2]))
    assert found[-1] < 0.8 * found[0]


def test_a_name_is_that_of_one_kind() -> None:
    with pytest.raises(AttentionError) as caught:
        register(name="mine")
    assert str(caught.value) == (
        "name='mine' and options {} belong to one kind; name it too: "
        "register('local', name='narrow', window=8)."
    )
