"""A vision transformer of small images: how it is built, trained and measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from dualform.errors import ReadingError
from dualform.studies.data import load_images
from dualform.studies.encoders import Encoder, EncoderShape, fitting, measure_costs
from dualform.studies.parts import Found

INSPECTED = 64
"""How many test images tell how far apart heads are."""


@dataclass(frozen=True)
class ImageSetting:
    """The model, its training, and on how many images."""

    shape: EncoderShape
    patch: int
    """Pixels on a side of a patch, which is a token."""
    images: int
    tests: int
    epochs: int
    rate: float
    seeds: int
    dataset: str = "fashion-mnist"
    batch: int = 64
    layers: tuple[str, ...] = (
        "softmax",
        "batch_norm",
        "centered",
        "scaled_heads",
        "batch_norm_scaled_heads",
    )


SETTINGS = {
    "small": ImageSetting(
        EncoderShape(width=48, heads=4, hidden=96, layers=2),
        patch=4,
        images=4000,
        tests=2000,
        epochs=6,
        rate=2e-3,
        seeds=3,
        batch=32,
    ),
    "middle": ImageSetting(
        EncoderShape(width=48, heads=4, hidden=96, layers=2),
        patch=4,
        images=60_000,
        tests=10_000,
        epochs=12,
        rate=2e-3,
        seeds=5,
        batch=64,
    ),
    "paper": ImageSetting(
        EncoderShape(width=192, heads=4, hidden=768, layers=12),
        patch=2,
        images=60_000,
        tests=10_000,
        epochs=20,
        rate=5e-4,
        seeds=5,
        batch=256,
    ),
}


class VisionTransformer(nn.Module):
    """Patches, positions, an encoder, and a linear map of the tokens' mean.

    >>> model = VisionTransformer(8, 4, "softmax", EncoderShape(16, 4, 32, layers=1))
    >>> model(torch.zeros(3, 8, 8)).shape
    torch.Size([3, 10])
    """

    def __init__(
        self, side: int, patch: int, attention: str, shape: EncoderShape, classes: int = 10
    ) -> None:
        super().__init__()
        tokens = (side // patch) ** 2
        self.patch = patch
        self.project = nn.Linear(patch * patch, shape.width)
        self.positions = nn.Parameter(torch.randn(tokens, shape.width) * 0.02)
        self.encoder = Encoder(shape, attention, norm_first=True)
        self.norm = nn.LayerNorm(shape.width)
        self.classify = nn.Linear(shape.width, classes)

    def embedded(self, x: Tensor) -> Tensor:
        """What the encoder is given: (images, tokens, width)."""
        size = self.patch
        patches = x.unfold(1, size, size).unfold(2, size, size).flatten(3).flatten(1, 2)
        found: Tensor = self.project(patches) + self.positions
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Logits (images, classes) of images (images, side, side)."""
        logits: Tensor = self.classify(self.norm(self.encoder(self.embedded(x))).mean(1))
        return logits


@dataclass(frozen=True)
class Pictures:
    """Images (n, side, side), standardized, and their classes."""

    x: Tensor
    y: Tensor


def load_pictures(data: Path, setting: ImageSetting) -> tuple[Pictures, Pictures]:
    """The first images of both parts, standardized by the training images' statistics."""
    parts = load_images(data, setting.dataset)
    if parts[0].pixels.ndim != 3:
        raise ReadingError(
            f"images '{setting.dataset}' have colors, and this study reads gray ones; give "
            "'mnist' or 'fashion-mnist'."
        )
    side = parts[0].pixels.shape[1]
    if side % setting.patch:
        raise ReadingError(f"images of {side} pixels are no whole patches of {setting.patch}.")
    train, test = (
        part.some(torch.arange(min(count, len(part))))
        for part, count in zip(parts, (setting.images, setting.tests), strict=True)
    )
    seen = train.pixels.float()
    mean, deviation = seen.mean(), seen.std().clamp(min=1e-8)
    first, second = (
        Pictures((part.pixels.float() - mean) / deviation, part.y) for part in (train, test)
    )
    return first, second


def make_model(pictures: Pictures, layer: str, setting: ImageSetting) -> VisionTransformer:
    """The model for images of this size."""
    model = VisionTransformer(pictures.x.shape[1], setting.patch, layer, setting.shape)
    return model.to(pictures.x.device)


def measure_training(
    train: Pictures, test: Pictures, layer: str, seed: int, setting: ImageSetting, device: str
) -> Found:
    """Trains for all epochs; accuracy of the last weights on test images, and heads' distance."""
    train, test = (Pictures(part.x.to(device), part.y.to(device)) for part in (train, test))
    torch.manual_seed(seed)
    model = make_model(train, layer, setting)
    step = fitting(model, setting.rate)
    for _ in range(setting.epochs):
        model.train()
        for rows in torch.split(torch.randperm(len(train.y)), setting.batch):
            step((train.x[rows],), train.y[rows])
    with torch.no_grad():
        model.eval()
        logits = torch.cat([model(x) for x in torch.split(test.x, 4 * setting.batch)])
    return {
        "accuracy": float((logits.argmax(-1) == test.y).double().mean()),
        "distance": model.encoder.head_distance(model.embedded(test.x[:INSPECTED])),
    }


def layer_costs(train: Pictures, setting: ImageSetting, device: str) -> Found:
    """What each layer costs."""
    batch = Pictures(train.x[: setting.batch].to(device), train.y[: setting.batch].to(device))
    models = {name: make_model(batch, name, setting) for name in setting.layers}
    return measure_costs(models, (batch.x,), batch.y)
