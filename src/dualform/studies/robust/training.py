"""One training: a vision transformer with one layer, on clean or contaminated images, attacked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dualform.attention import MultiheadAttention, clean_keys, replace
from dualform.attention.shapes import for_each_query_head
from dualform.errors import ReadingError
from dualform.studies.data import load_images
from dualform.studies.encoders import fitting, measure_costs
from dualform.studies.image_attention.training import VisionTransformer
from dualform.studies.parts import Found
from dualform.studies.robust.contamination import (
    add_noise,
    corrupt_tokens,
    fast_gradient,
    projected_gradient,
)
from dualform.studies.robust.setting import ATTACKS, LAYERS, RobustSetting

CHUNK = 500
"""How many test images are read at a time."""


@dataclass(frozen=True)
class PixelImages:
    """Images (n, side, side) with pixels from 0 to 1, and their classes."""

    x: Tensor
    y: Tensor

    def first(self, count: int) -> PixelImages:
        """The first of them."""
        return PixelImages(self.x[:count], self.y[:count])


class PixelClassifier(nn.Module):
    """A vision transformer that is given pixels from 0 to 1, and standardizes them itself."""

    def __init__(self, train: PixelImages, layer: str, setting: RobustSetting) -> None:
        super().__init__()
        kind, options = LAYERS[layer]
        model = VisionTransformer(train.x.shape[1], setting.patch, "softmax", setting.shape)
        self.network = replace(model, kind, **options)
        self.mean, self.deviation = float(train.x.mean()), float(train.x.std())

    def forward(self, x: Tensor) -> Tensor:
        """Logits (images, classes)."""
        logits: Tensor = self.network((x - self.mean) / self.deviation)
        return logits

    def first_attention(self) -> MultiheadAttention:
        """The attention of the first layer."""
        return next(m for m in self.modules() if isinstance(m, MultiheadAttention))


def load_pixels(data: Path, setting: RobustSetting) -> tuple[PixelImages, PixelImages]:
    """The first images of both parts."""
    parts = load_images(data, setting.dataset)
    side = parts[0].pixels.shape[1]
    if side % setting.patch:
        raise ReadingError(f"images of {side} pixels are no whole patches of {setting.patch}.")
    train, test = (
        PixelImages(part.pixels[:count].float() / 255, part.y[:count])
        for part, count in zip(parts, (setting.images, setting.tests), strict=True)
    )
    return train, test


def measure_training(
    train: PixelImages,
    test: PixelImages,
    layer: str,
    contaminated: bool,
    seed: int,
    setting: RobustSetting,
    device: str,
) -> Found:
    """Trains for all epochs; what share of test images is right then, however they are treated."""
    train, test = (PixelImages(part.x.to(device), part.y.to(device)) for part in (train, test))
    torch.manual_seed(seed)
    if contaminated:
        draws = torch.Generator().manual_seed(seed)
        x, _ = corrupt_tokens(train.x, setting.contaminated, setting.patch, draws)
        train = PixelImages(x, train.y)
    model = PixelClassifier(train, layer, setting).to(device)
    step = fitting(model, setting.rate, setting.half)
    for _ in range(setting.epochs):
        model.train()
        for rows in torch.split(torch.randperm(len(train.y)), setting.batch):
            step((train.x[rows],), train.y[rows])
    model.eval().requires_grad_(False)
    return {
        "right": attacked(model, test, seed, setting),
        "sparse": sparse_shares(model, test.first(CHUNK), seed, setting),
    }


def attacked(
    model: nn.Module, test: PixelImages, seed: int, setting: RobustSetting
) -> dict[str, float]:
    """The share of right answers in each of the setting's conditions.

    What is drawn is the same for every layer that has this seed.
    """
    found = {"clean": _right(model, test.x, test.y)}
    for attack in ATTACKS:
        for strength in setting.strengths(attack):
            draws = torch.Generator().manual_seed(seed)
            known = attack in ("FGSM", "PGD")
            some = test.first(setting.attacked) if known else test
            parts = zip(torch.split(some.x, CHUNK), torch.split(some.y, CHUNK), strict=True)
            moved = [_treated(attack, model, x, y, strength, draws, setting) for x, y in parts]
            found[f"{attack} {strength:g}"] = _right(model, torch.cat(moved), some.y)
    return found


def sparse_shares(
    model: PixelClassifier, test: PixelImages, seed: int, setting: RobustSetting
) -> dict[str, float] | None:
    """What share of Σ|S| and of Σ|K| of the first layer lies in keys of corrupted tokens.

    A quarter of the tokens is corrupted, so that 0.25 says that nothing was found. None for a layer
    without rounds; a share of S is NaN where S is 0.
    """
    module, found = model.first_attention(), dict[str, float]()
    if not module.options.get("rounds", 1) or module.kind != "robust":
        return None
    draws = torch.Generator().manual_seed(seed)
    x, where = corrupt_tokens(test.x, 0.25, setting.patch, draws)
    options: dict[str, Any] = {n: o for n, o in module.options.items() if n != "symmetric"}

    def measure(_: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        q, k, v = module.heads(*inputs[:3])
        k, v = for_each_query_head(k, q), for_each_query_head(v, q)
        for name, part in (("S", clean_keys(k, v, **options).sparse), ("K", k)):
            sizes = part.abs().sum((1, 3))
            total = float(sizes.sum())
            found[name] = float(sizes[where].sum()) / total if total else float("nan")

    hook = module.register_forward_hook(measure)
    try:
        with torch.no_grad():
            model(x)
    finally:
        hook.remove()
    return found


def layer_costs(train: PixelImages, setting: RobustSetting, device: str) -> Found:
    """What each layer costs."""
    batch = PixelImages(train.x[: setting.batch].to(device), train.y[: setting.batch].to(device))
    models = {name: PixelClassifier(batch, name, setting).to(device) for name in setting.layers}
    return measure_costs(models, (batch.x,), batch.y)


def _treated(
    attack: str,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    strength: float,
    draws: torch.Generator,
    setting: RobustSetting,
) -> Tensor:
    """Images after one of `ATTACKS`."""
    if attack == "tokens":
        return corrupt_tokens(x, strength, setting.patch, draws)[0]
    if attack == "noise":
        return add_noise(x, strength, draws)
    if attack == "FGSM":
        return fast_gradient(model, x, y, strength)
    return projected_gradient(model, x, y, strength, setting.pgd_steps, draws)


@torch.no_grad()
def _right(model: nn.Module, x: Tensor, y: Tensor) -> float:
    logits = torch.cat([model(part) for part in torch.split(x, CHUNK)])
    return float((logits.argmax(-1) == y).double().mean())
