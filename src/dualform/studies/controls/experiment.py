"""What the study trains: one network on some digits, on true labels and on random ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from dualform.errors import ReadingError
from dualform.studies.classifiers import Training, train, train_stacked, whole_batches
from dualform.studies.data import Images, first_of_each, load_images

CLASSES = 10


@dataclass(frozen=True)
class ControlsSetting:
    """How large the study is."""

    training: Training
    """What one training is; it has as many steps as its epochs need."""
    images: int
    """How many training images there are."""
    epochs: int
    memorizing: int
    """How many epochs the training on random labels has: what has no pattern is learned slowly."""
    tested: int
    """How many test images of each class the layers are asked about."""
    explained: int
    """How many of them the whole network is asked about, and retrained networks."""
    halves: int
    """How many random halves of the training images are trained on."""
    repeats: int
    """How many networks are trained on each half."""
    removed: tuple[int, ...]
    """How many training images are removed."""
    removals: int
    """How many networks are trained on what each removal leaves."""
    seeds: int


SETTINGS = {
    "small": ControlsSetting(
        Training(widths=(784, 128, 128, 10), batch=100, rate=2e-2),
        images=2000,
        epochs=20,
        memorizing=60,
        tested=20,
        explained=5,
        halves=40,
        repeats=2,
        removed=(20, 100),
        removals=1,
        seeds=3,
    ),
    "middle": ControlsSetting(
        Training(widths=(784, 128, 128, 10), batch=100, rate=2e-2),
        images=5000,
        epochs=100,
        memorizing=120,
        tested=20,
        explained=5,
        halves=40,
        repeats=2,
        removed=(250,),
        removals=1,
        seeds=3,
    ),
    "paper": ControlsSetting(
        Training(),
        images=60_000,
        epochs=11,
        memorizing=40,
        tested=50,
        explained=10,
        halves=100,
        repeats=5,
        removed=(100, 600, 3000),
        removals=3,
        seeds=5,
    ),
}


@dataclass(frozen=True)
class Experiment:
    """The digits, and how networks are trained on them."""

    setting: ControlsSetting
    images: Images
    test: Images
    device: str = "cpu"

    def train(
        self,
        seed: int,
        ids: Tensor | None = None,
        epochs: int | None = None,
        images: Images | None = None,
        path: Path | None = None,
    ) -> nn.Module:
        """Trains a network on some samples, by default on all of them; records it at a path.

        Args:
            epochs: by default the setting's; short batches are left out and made up for.
            images: other labels than the true ones.
        """
        chosen = torch.arange(len(self.images)) if ids is None else ids
        own = self.setting.training
        steps = round((epochs or self.setting.epochs) * len(chosen) / own.batch)
        batches = whole_batches(chosen, own.batch, torch.Generator().manual_seed(seed))
        training = replace(own, steps=steps)
        shown = images or self.images
        return train(shown, batches, training, seed, path, device=self.device).eval()

    def train_stacked(self, ids: Sequence[Tensor], seeds: Sequence[int]) -> nn.Module:
        """The same for several sets of equally many samples: many networks at once."""
        own = self.setting.training
        steps = round(self.setting.epochs * len(ids[0]) / own.batch)
        batches = [
            whole_batches(chosen, own.batch, torch.Generator().manual_seed(seed))
            for chosen, seed in zip(ids, seeds, strict=True)
        ]
        training = replace(own, steps=steps)
        return train_stacked(self.images, batches, training, seeds, self.device)

    def untrained(self, seed: int) -> nn.Module:
        """The network that a training with this seed starts from."""
        torch.manual_seed(seed)
        return self.setting.training.make_model().eval().to(self.device)

    def shuffled_labels(self, seed: int) -> Images:
        """The same pictures, with the labels of others."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.images), generator=generator)
        return replace(self.images, y=self.images.y[order])

    def queries(self, count: int) -> tuple[Tensor, Tensor]:
        """So many test images of each class, as the network takes them, and their classes."""
        chosen = first_of_each(self.test.y, count)
        return self.test.some(chosen).inputs().to(self.device), self.test.y[chosen]

    def inputs(self) -> Tensor:
        """(samples, pixels): the training images, as the network takes them."""
        return self.images.inputs().to(self.device)


def load_experiment(data: Path, setting: ControlsSetting, device: str) -> Experiment:
    """The first training digits of the MNIST files, and all test digits."""
    images, test = load_images(data, "mnist")
    images = images.some(torch.arange(min(setting.images, len(images))))
    least = max(2 * setting.training.batch, max(setting.removed) + setting.training.batch)
    if len(images) < least:
        raise ReadingError(
            f"there are {len(images)} training digits, and the study needs {least} to train on "
            "halves of them and without some; is --data right?"
        )
    for part, y in (("training", images.y), ("test", test.y)):
        missing = sorted(set(range(CLASSES)) - set(y.tolist()))
        if missing:
            raise ReadingError(
                f"there is no {part} digit {', '.join(map(str, missing))}; is --data right?"
            )
    return Experiment(setting, images, test, device)


def margin(outputs: Tensor, labels: Tensor) -> Tensor:
    """log p/(1 − p) of the right class: its output minus the log-sum-exp of the others.

    >>> margin(torch.tensor([[2.0, 0.5]]), torch.tensor([0]))
    tensor([1.5000])
    """
    own = labels[:, None].to(outputs.device)
    others = outputs.scatter(1, own, -torch.inf).logsumexp(1)
    return outputs.gather(1, own)[:, 0] - others


def lead(outputs: Tensor, labels: Tensor) -> Tensor:
    """The output of the right class minus the largest of the others: negative where it is wrong.

    >>> lead(torch.tensor([[2.0, 0.5, 1.0]]), torch.tensor([2]))
    tensor([-1.])
    """
    own = labels[:, None].to(outputs.device)
    return outputs.gather(1, own)[:, 0] - outputs.scatter(1, own, -torch.inf).amax(1)


def others(classes: Tensor, seed: int) -> Tensor:
    """Another class for each, at random.

    >>> bool((others(torch.arange(10), 0) == torch.arange(10)).any())
    False
    """
    generator = torch.Generator().manual_seed(seed)
    return (classes + torch.randint(1, CLASSES, classes.shape, generator=generator)) % CLASSES


def right(model: nn.Module, images: Images, device: str) -> float:
    """The share of images that a network has right."""
    with torch.no_grad():
        found = model(images.inputs().to(device)).argmax(1).cpu()
    return float((found == images.y).float().mean())
