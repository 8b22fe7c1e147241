"""Small models of transformers, and the kinds they are tried with."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import BartConfig, BertConfig, LlamaConfig, MistralConfig, T5Config

from dualform.attention import Primal, Transform
from dualform.attention.transformers import register


@dataclass(frozen=True)
class Centered(Transform):
    """A transformation of one's own that depends on the keys that are seen."""

    formula = r"x - \bar k"
    depends_on_keys = True

    def apply(self, x: Tensor, keys: Tensor) -> Tensor:
        return x - keys.mean(-2, keepdim=True)


NAMES = register()
register(Primal(keys=(Centered(),)), name="dualform_derived")
register("local", name="dualform_local", window=4)
NAMES.append("dualform_derived")
CAUSAL = [name for name in NAMES if name != "dualform_ridge"]
POOLED = [name for name in NAMES if "scaled_heads" in name or name == "dualform_robust"]
BY_QUERY = [name for name in CAUSAL if name not in POOLED]
LAST = torch.finfo(torch.float64).min


def build(cls: Any, config: Any, attention: str) -> Any:
    torch.manual_seed(0)
    model = cls._from_config(copy.deepcopy(config), attn_implementation=attention)
    return model.double().eval()


COMMON = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
LLAMA = LlamaConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    initializer_range=0.3,
    **COMMON,
)
BERT = BertConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    initializer_range=0.3,
)
T5 = T5Config(
    vocab_size=50,
    d_model=32,
    d_kv=8,
    d_ff=32,
    num_layers=2,
    num_heads=4,
    decoder_start_token_id=1,
    **{**COMMON, "eos_token_id": 49},
)
BART = BartConfig(
    vocab_size=50,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=32,
    decoder_ffn_dim=32,
    decoder_start_token_id=1,
    forced_eos_token_id=None,
    init_std=0.3,
    **{**COMMON, "eos_token_id": 49},
)


def mistral(window: int | None) -> MistralConfig:
    return MistralConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        sliding_window=window,
        initializer_range=0.3,
        **COMMON,
    )


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 49, shape, generator=torch.Generator().manual_seed(seed))


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
