"""What the study trains on: digits and garments, which share ten outputs, and in which order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dualform.errors import ReadingError
from dualform.studies.classifiers import Training, whole_batches
from dualform.studies.data import DIGITS, GARMENTS, Images, check_count, load_images

TASKS = ("digits", "garments")
OUTPUTS = 10
GROUPS = (*(f"digit {name}" for name in DIGITS), *GARMENTS)
"""The classes of both tasks: output k is that of group k and of group 10 + k."""


@dataclass(frozen=True)
class TwoTasksSetting:
    """How large the study is."""

    training: Training
    images: int
    """How many training images of each task there are."""
    switch: int
    """After this step, garments follow digits."""
    ends: tuple[int, ...]
    """The steps after which the sequence is read."""
    together: int
    """How many steps the training on both tasks has."""
    queries: int
    """How many test images of each class the layers are asked about."""
    explained: int
    """How many of them the whole network is asked about."""
    explained_margins: int
    """Of how many digits that were forgotten, and that were kept, the margins are explained."""
    seeds: int


SETTINGS = {
    "small": TwoTasksSetting(
        Training(widths=(784, 128, 128, 10)),
        images=10_000,
        switch=300,
        ends=(600, 1000),
        together=600,
        queries=10,
        explained=3,
        explained_margins=100,
        seeds=3,
    ),
    "paper": TwoTasksSetting(
        Training(),
        images=60_000,
        switch=3000,
        ends=(6000, 10_000),
        together=5000,
        queries=10,
        explained=5,
        explained_margins=500,
        seeds=5,
    ),
}


@dataclass(frozen=True)
class Tasks:
    """Digits, then garments, as one data set with the labels 0 to 9."""

    digits: Images
    garments: Images

    def __len__(self) -> int:
        return len(self.digits) + len(self.garments)

    @property
    def _parts(self) -> tuple[Images, Images]:
        return self.digits, self.garments

    @property
    def images(self) -> Images:
        """All of them; labels alone do not name a class, so that classes have no names."""
        pixels = torch.cat([part.pixels for part in self._parts])
        return Images(pixels, torch.cat([part.y for part in self._parts]), ())

    @property
    def groups(self) -> Tensor:
        """(n,): the class of each image: 0 to 9 for digits, 10 to 19 for garments.

        >>> pixels = torch.zeros(2, 4, 4).byte()
        >>> part = Images(pixels, torch.tensor([3, 0]), ())
        >>> Tasks(part, part).groups.tolist()
        [3, 0, 13, 10]
        """
        return torch.cat([self.digits.y, OUTPUTS + self.garments.y])

    def batches(self, batch: int, seed: int) -> Iterator[Tensor]:
        """Whole batches of both tasks, mixed, without end."""
        return whole_batches(torch.arange(len(self)), batch, torch.Generator().manual_seed(seed))

    def in_sequence(self, switch: int, batch: int, seed: int) -> Iterator[Tensor]:
        """Whole batches of digits up to a step, then of garments without end."""
        generator = torch.Generator().manual_seed(seed)
        digits, garments = torch.split(torch.arange(len(self)), [*map(len, self._parts)])
        yield from itertools.islice(whole_batches(digits, batch, generator), switch)
        yield from whole_batches(garments, batch, generator)


def load_tasks(data: Path, setting: TwoTasksSetting) -> tuple[Tasks, Tasks]:
    """The first training images of both tasks, and all test images."""
    loaded = [load_images(data, name) for name in ("mnist", "fashion-mnist")]
    train = [part.some(torch.arange(min(setting.images, len(part)))) for part, _ in loaded]
    for part, task in zip(train, TASKS, strict=True):
        check_count(part, task, setting.training.batch)
    tests = Tasks(*(test for _, test in loaded))
    missing = set(range(len(GROUPS))) - set(tests.groups.tolist())
    if missing:
        names = ", ".join(GROUPS[group] for group in sorted(missing))
        raise ReadingError(f"there is no test image of {names}; is --data right?")
    return Tasks(*train), tests
