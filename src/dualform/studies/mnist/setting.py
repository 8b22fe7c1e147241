"""How large the study is, and what it trains on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dualform.errors import ReadingError
from dualform.studies.classifiers import Training
from dualform.studies.data import Images, check_count, load_images

CLASSES = 10
WATCHED = 6
"""The class whose test images are looked at closely, as the paper does: the digit 6."""


@dataclass(frozen=True)
class MnistSetting:
    """How large the study is."""

    training: Training
    images: int
    """How many training images there are."""
    asked: int
    """Of how many test images that are right, and that are wrong, the layers are asked."""
    compared: int
    """Of how many of each the strongest training images are compared."""
    influenced: int
    """Of how many of each the influence is estimated."""
    influence_seeds: int
    """With how many of the seeds."""
    seeds: int
    dataset: str = "mnist"

    def fitted(self, images: Images) -> MnistSetting:
        """The same with a network that takes these images."""
        pixels = images.pixels[0].numel()
        widths = (pixels, *self.training.widths[1:])
        return replace(self, training=replace(self.training, widths=widths))


SETTINGS = {
    "small": MnistSetting(
        Training(widths=(784, 128, 128, 10), steps=1500),
        images=10_000,
        asked=300,
        compared=60,
        influenced=15,
        influence_seeds=3,
        seeds=3,
    ),
    "paper": MnistSetting(
        Training(),
        images=60_000,
        asked=500,
        compared=100,
        influenced=15,
        influence_seeds=0,
        seeds=5,
    ),
}


def load_parts(data: Path, setting: MnistSetting) -> tuple[Images, Images]:
    """The first training images and all test images, standardized as the paper's code does."""
    whole, test = load_images(data, setting.dataset)
    train = whole.some(torch.arange(min(setting.images, len(whole))))
    check_count(train, setting.dataset, setting.training.batch)
    for part, images in (("training", train), ("test", test)):
        missing = sorted(set(range(CLASSES)) - set(images.y.tolist()))
        if missing:
            names = ", ".join(images.classes[one] for one in missing)
            raise ReadingError(f"there is no {part} image of {names}; is --data right?")
    return train.standardized(train), test.standardized(train)
