"""Attribution in models of transformers and timm, at sizes where batch and length are alike."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.cases.case import Case
from tests.cases.structures import B, numbers, tokens
from tests.laws.attribution import attribution_holds
from torch import Tensor, nn
from torch.nn import functional as F

from dualform.owners.patterns import NOBODY

SMALL = {
    "vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "num_labels": 3, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip


def words(model: nn.Module, x: Tensor) -> Tensor:
    """Each text's mean loss of its next words."""
    logits = model(input_ids=x, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.mT, x[:, 1:], reduction="none").mean(1)


def translations(model: nn.Module, x: Tensor) -> Tensor:
    """Each text's mean loss of its own words backwards."""
    logits = model(input_ids=x, labels=x.flip(1), use_cache=False).logits
    return F.cross_entropy(logits.mT, x.flip(1), reduction="none").mean(1)


def classes(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x).logits, torch.arange(len(x)) % 3, reduction="none")


TEXT, PICTURES = tokens(B, B), numbers(4, 3, 16, 16)
MODELS: dict[str, tuple[Any, Any, dict[str, str]]] = {
    "GPT2LMHeadModel": (words, TEXT, {}),
    "GPT2ForSequenceClassification": (classes, TEXT, {}),
    "BertForSequenceClassification": (classes, TEXT, {}),
    "LlamaForCausalLM": (words, TEXT, {}),
    "T5ForConditionalGeneration": (translations, TEXT, {"relative_attention_bias": NOBODY}),
    "BartForConditionalGeneration": (translations, TEXT, {}),
    "DebertaV2ForSequenceClassification": (
        classes,
        TEXT,
        {"pos_key_proj": NOBODY, "pos_query_proj": NOBODY, "rel_embeddings": "no call was seen"},
    ),
    "ViTForImageClassification": (classes, PICTURES, {}),
    "SwinForImageClassification": (classes, PICTURES, {"relative_position_bias_table": NOBODY}),
}

OTHER_NAMES = {
    "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "T5": {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
           "dropout_rate": 0.0, "decoder_start_token_id": 1},
    "Bart": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16,
             "encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 16,
             "max_position_embeddings": 16, "dropout": 0.0, "decoder_start_token_id": 1},
    "DebertaV2": {"max_position_embeddings": 16, "relative_attention": True,
                  "pos_att_type": ["p2c", "c2p"], "position_buckets": 3},
    "Llama": {"num_key_value_heads": 1},
    "Mixtral": {"num_key_value_heads": 1, "num_local_experts": 4},
    "Qwen3Moe": {"num_key_value_heads": 1, "head_dim": 8, "num_experts": 4,
                 "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "ViT": {"image_size": 16, "patch_size": 8},
    "Swin": {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2],
             "num_heads": [2, 2], "window_size": 2, "drop_path_rate": 0.0},
}  # fmt: skip


SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
NAMED_OTHERWISE = dict.fromkeys(("GPT2", "T5", "Bart", "Swin"), SIZES)


def configured(name: str) -> nn.Module:
    family = name.split("For")[0].removesuffix("LMHeadModel")
    own = OTHER_NAMES.get(family, {})
    shared = NAMED_OTHERWISE.get(family, ())
    options = {key: value for key, value in SMALL.items() if key not in shared} | own
    model: nn.Module = getattr(transformers, name)(
        getattr(transformers, f"{family}Config")(**options)
    )
    return model


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # of DeBERTa
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str, tmp_path: Path) -> None:
    losses, inputs, by_step = MODELS[name]
    case = Case(lambda: configured(name), inputs, losses, by_step)
    audit = attribution_holds(case, tmp_path / "run", reach=1e-8)
    assert audit.coverage > 0.8


MIXTURES = ["MixtralForCausalLM", "Qwen3MoeForCausalLM"]


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_mixtures_of_experts(name: str, implementation: str, tmp_path: Path) -> None:
    """A word's rows are in its experts' matrices, and belong to its text."""
    precise = implementation != "grouped_mm"  # which does not take float64

    def make() -> nn.Module:
        model = configured(name)
        model.set_experts_implementation(implementation)
        return model

    case = Case(make, TEXT, words)
    if precise:
        audit = attribution_holds(case, tmp_path / "run", reach=1e-8)
    else:  # one large step: small changes would be lost in the rounding of weights
        audit = attribution_holds(case, tmp_path / "run", 1e-5, 2000.0, 1, torch.float32)
    assert audit.coverage == 1


def test_models_of_timm(tmp_path: Path) -> None:
    """In a process of its own: timm is installed without the torchvision it would like to have."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.owners.timm_models", str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["swin", "vit", "convnext", "mixer"]
