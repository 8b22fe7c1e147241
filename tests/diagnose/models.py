"""Small transformers with random weights, of torch and of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn


def encoder(batch_first: bool = True, layers: int = 3, **options: Any) -> nn.TransformerEncoder:
    """16 wide, with 4 heads a block."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=batch_first, **options)
    return nn.TransformerEncoder(block, layers, enable_nested_tensor=False)


def gpt2() -> tuple[Any, Tensor]:
    """Three blocks of four heads, and tokens."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(n_layer=3, n_embd=32, n_head=4, vocab_size=50, **ends)
    return transformers.GPT2LMHeadModel(config).eval(), torch.randint(50, (2, 9))


def vit() -> tuple[Any, Tensor]:
    """Three blocks of four heads, and images."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
    )
    return transformers.ViTModel(config).eval(), torch.randn(2, 3, 16, 16)
