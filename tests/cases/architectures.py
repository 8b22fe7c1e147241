"""Architectures as they are used, small by default; the benchmarks make them larger."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch
from tests.cases.case import Case, output
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

os.environ["HF_HUB_OFFLINE"] = "1"

SAMPLES, WORDS, TIME, CLASSES = 12, 11, 7, 4
IGNORED = -100
"""The target where a sequence has ended."""

Batch: TypeAlias = dict[str, Tensor]
"""What a model is called with, by name; and the targets."""


class LanguageModel(nn.Module):
    """Words, recurrent layers with dropout in between, a head."""

    def __init__(
        self,
        batch_first: bool = True,
        dropout: float = 0.2,
        words: int = WORDS,
        sizes: tuple[int, int] = (6, 5),
        layers: int = 2,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, sizes[0])
        self.lstm = nn.LSTM(*sizes, layers, dropout=dropout, batch_first=batch_first)
        self.head = nn.Linear(sizes[1], words)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(words))[0])


class Packed(LanguageModel):
    """The same over sequences of different lengths, or over all they are filled up with."""

    def __init__(self, pack: bool = True) -> None:
        super().__init__(dropout=0.0)
        self.pack = pack

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        read = self.embed(words)
        if not self.pack:
            return self.head(self.lstm(read)[0])
        packed = pack_padded_sequence(read, lengths, batch_first=True, enforce_sorted=False)
        out, _ = self.lstm(packed)
        return self.head(pad_packed_sequence(out, batch_first=True, total_length=TIME)[0])


class ViT(nn.Module):
    """Patches by convolution, a class token, positions, an encoder, a head on the class token."""

    def __init__(
        self,
        width: int = 8,
        heads: int = 2,
        layers: int = 2,
        places: int = 5,
        classes: int = CLASSES,
        spread: float = 0.5,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, width) * spread)
        self.positions = nn.Parameter(torch.randn(1, places, width) * spread)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.encoder(x))[:, 0])


class Residual(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        around = (nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.around = nn.Sequential(*around) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(y)) + self.around(x), inplace=True)


class ResNet(nn.Module):
    """The first convolution has a bias, which its normalization takes out again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.blocks = nn.Sequential(Residual(4, 4, 1), Residual(4, 8, 2))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(8, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(image)), inplace=True))
        return self.head(self.drop(x.mean((2, 3))))


class Classifier(nn.Module):
    """What is fine-tuned: an encoder that gets an adapter, and a head that is trained whole."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(torch.tanh(self.encoder(features)))


def gpt2(
    words: int = WORDS,
    places: int = TIME,
    width: int = 8,
    layers: int = 2,
    heads: int = 2,
    spread: float = 0.3,
) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": words, "n_positions": places, "n_embd": width}
    depth = {"n_layer": layers, "n_head": heads, "initializer_range": spread}
    return GPT2LMHeadModel(GPT2Config(**sizes, **depth, bos_token_id=0, eos_token_id=0))


def lora_gpt2() -> nn.Module:
    return _adapted(gpt2(), target_modules=["c_attn"], fan_in_fan_out=True)


def lora_linear() -> nn.Module:
    return _adapted(Classifier(), target_modules=["encoder"], modules_to_save=["head"])


def _adapted(model: nn.Module, **options: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, lora_alpha=8, lora_dropout=0.1, **options))


# What they are trained on


def words(number: int) -> Batch:
    drawn = torch.randint(0, WORDS, (SAMPLES, TIME + 1))
    return {"words": drawn[:, :-1], "targets": drawn[:, 1:]}


def words_over_time(number: int) -> Batch:
    return {name: x.T for name, x in words(number).items()}


def unequal_words(number: int) -> Batch:
    batch, lengths = words(number), torch.tensor([3, 7, 1, 5, 2, 6, 4, 7, 3, 1, 5, 2])
    ended = torch.arange(TIME) >= lengths[:, None]
    return {**batch, "lengths": lengths, "targets": batch["targets"].masked_fill(ended, IGNORED)}


def masked_words(number: int) -> Batch:
    batch = unequal_words(number)
    words, targets = batch["words"], batch["targets"]
    return {"input_ids": words, "attention_mask": (targets != IGNORED).long(), "targets": targets}


def images(number: int) -> Batch:
    image = torch.randn(SAMPLES, 3, 8, 8)
    return {"image": image, "targets": torch.randint(0, CLASSES, (SAMPLES,))}


def features(number: int) -> Batch:
    drawn = torch.randn(SAMPLES, 6)
    return {"features": drawn, "targets": torch.randint(0, CLASSES, (SAMPLES,))}


def cross_entropy(axis: int) -> Callable[[nn.Module, Batch], Tensor]:
    """The loss of each sample, a sum over its words."""

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        out = output(model, {name: x for name, x in batch.items() if name != "targets"})
        logits, targets = getattr(out, "logits", out), batch["targets"]
        each = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
        by_sample = each.view(targets.shape).movedim(axis, 0).reshape(targets.shape[axis], -1)
        return by_sample.sum(1) / 16

    return losses


def architecture(
    make: Callable[[], nn.Module], inputs: Callable[[int], Batch], noise: str = "", axis: int = 0
) -> Case:
    return Case(make, inputs, cross_entropy(axis), noise=noise, axis=axis)


CASES = {
    "LSTM": architecture(LanguageModel, words),
    "LSTM, time first": architecture(
        lambda: LanguageModel(batch_first=False), words_over_time, axis=1
    ),
    "LSTM, packed": architecture(Packed, unequal_words),
    "ViT": architecture(ViT, images, noise=r"self_attn\.in_proj_bias$"),
    "ResNet": architecture(ResNet, images, noise=r"^stem\.bias$"),
    "GPT-2": architecture(gpt2, masked_words, noise=r"attn\.c_attn\.bias$"),
    "LoRA on GPT-2": architecture(lora_gpt2, masked_words),
    "LoRA on Linear": architecture(lora_linear, features),
}

if find_spec("transformers") is None:
    del CASES["GPT-2"], CASES["LoRA on GPT-2"]
if find_spec("peft") is None:
    CASES.pop("LoRA on GPT-2", None)
    del CASES["LoRA on Linear"]
