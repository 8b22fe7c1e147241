"""The classifier of time series, and the two ways it is trained: on some of TRAIN, or on all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dualform.studies.encoders import LAYERS, Encoder, EncoderShape, fitting, measure_costs
from dualform.studies.parts import Found
from dualform.studies.uea.series import Series

DATASETS = ("JapaneseVowels", "Handwriting", "UWaveGestureLibrary", "BasicMotions")
ALL, HELD_OUT = "all", "held out"
"""What is trained on: all of TRAIN, or all but a fifth, which chooses the epoch."""
WAYS = (HELD_OUT, ALL)
INSPECTED = 64
"""How many test samples tell how far apart heads are."""


@dataclass(frozen=True)
class UeaSetting:
    """The model, its training, and on which sets."""

    shape: EncoderShape
    epochs: int
    rate: float
    datasets: tuple[str, ...]
    seeds: int
    layers: tuple[str, ...] = tuple(LAYERS)
    batch: int = 16


SETTINGS = {
    "small": UeaSetting(
        EncoderShape(width=64, heads=8, hidden=128, layers=2),
        epochs=20,
        rate=1e-3,
        datasets=("JapaneseVowels", "BasicMotions"),
        seeds=3,
    ),
    "paper": UeaSetting(
        EncoderShape(width=512, heads=8, hidden=2048, layers=2),
        epochs=100,
        rate=1e-4,
        datasets=DATASETS,
        seeds=5,
    ),
}


class SeriesClassifier(nn.Module):
    """Projection, positions, an encoder, and a linear map of all steps."""

    def __init__(self, data: Series, attention: str, shape: EncoderShape) -> None:
        super().__init__()
        length, channels = data.x.shape[1:]
        self.project = nn.Linear(channels, shape.width)
        self.positions = nn.Parameter(torch.randn(length, shape.width) * 0.02)
        self.encoder = Encoder(shape, attention)
        self.dropout = nn.Dropout(shape.dropout)
        self.classify = nn.Linear(length * shape.width, len(data.classes))

    def embedded(self, x: Tensor) -> Tensor:
        """What the encoder is given."""
        found: Tensor = self.project(x) + self.positions
        return found

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """Logits (samples, classes)."""
        h = self.encoder(self.dropout(self.embedded(x)), real)
        logits: Tensor = self.classify(self.dropout(h * real[..., None]).flatten(1))
        return logits


class HeldOut(NamedTuple):
    """A training without a fifth of TRAIN: accuracies on TEST, and how the epoch was chosen."""

    best: float
    """With the weights of the epoch that is best on the fifth."""
    last: float
    """With the weights of the last epoch."""
    epoch: int
    validation: float


class Whole(NamedTuple):
    """A training on all of TRAIN: accuracy on TEST after the last epoch, and heads' distance."""

    last: float
    distance: float


def measure_training(
    data: Series, test: Series, layer: str, way: str, seed: int, setting: UeaSetting, device: str
) -> Found:
    """One training of one layer with one seed, on some of TRAIN or on all."""
    train = train_held_out if way == HELD_OUT else train_on_all
    return train(data.to(device), test.to(device), layer, seed, setting)._asdict()


def train_held_out(
    data: Series, test: Series, layer: str, seed: int, setting: UeaSetting
) -> HeldOut:
    """Trains on all but a fifth of TRAIN, which chooses an epoch; reads TEST after two epochs."""
    chosen, held = split(data.y, seed)
    best, weights, reached = (-1.0, -math.inf, 0), {}, None
    for epoch, reached in enumerate(epochs(data[chosen], layer, seed, setting), 1):
        accuracy, loss = evaluate(reached, data[held], setting)
        if (accuracy, -loss) > best[:2]:
            best = (accuracy, -loss, epoch)
            weights = {key: value.clone() for key, value in reached.state_dict().items()}
    assert reached is not None
    last = evaluate(reached, test, setting)[0]
    reached.load_state_dict(weights)
    return HeldOut(evaluate(reached, test, setting)[0], last, best[2], best[0])


def train_on_all(data: Series, test: Series, layer: str, seed: int, setting: UeaSetting) -> Whole:
    """Trains on all of TRAIN for all epochs, and reads TEST with the weights of the last one."""
    *_, model = epochs(data, layer, seed, setting)
    some = test[torch.arange(min(INSPECTED, len(test)))]
    distance = model.encoder.head_distance(model.embedded(some.x), some.real)
    return Whole(evaluate(model, test, setting)[0], distance)


def epochs(data: Series, layer: str, seed: int, setting: UeaSetting) -> Iterator[SeriesClassifier]:
    """The model, epoch by epoch; it is the same object each time."""
    torch.manual_seed(seed)
    model = SeriesClassifier(data, layer, setting.shape).to(data.x.device)
    step = fitting(model, setting.rate)
    for _ in range(setting.epochs):
        model.train()
        for rows in torch.split(torch.randperm(len(data)), setting.batch):
            batch = data[rows]
            step((batch.x, batch.real), batch.y)
        yield model


def split(y: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Rows to train on and rows to choose by: a fifth of each class, one at least.

    >>> train, held = split(torch.tensor([0, 0, 0, 1, 1, 1]), seed=0)
    >>> len(train), len(held), sorted([*train.tolist(), *held.tolist()])
    (4, 2, [0, 1, 2, 3, 4, 5])
    """
    generator = torch.Generator().manual_seed(seed)
    train, held = [], []
    for label in range(int(y.max()) + 1):
        rows = (y == label).nonzero().flatten().cpu()
        rows = rows[torch.randperm(len(rows), generator=generator)]
        count = max(1, len(rows) // 5)
        held.append(rows[:count])
        train.append(rows[count:])
    return torch.cat(train), torch.cat(held)


@torch.no_grad()
def evaluate(model: SeriesClassifier, data: Series, setting: UeaSetting) -> tuple[float, float]:
    """Accuracy and mean loss."""
    model.eval()
    parts = [data[rows] for rows in torch.split(torch.arange(len(data)), 8 * setting.batch)]
    logits = torch.cat([model(part.x, part.real) for part in parts])
    right = (logits.argmax(-1) == data.y).double().mean()
    return float(right), float(cross_entropy(logits, data.y))


def layer_costs(data: Series, setting: UeaSetting, device: str) -> Found:
    """What each layer costs on a set."""
    batch = data[torch.arange(min(setting.batch, len(data)))].to(device)
    models = {
        name: SeriesClassifier(batch, name, setting.shape).to(device) for name in setting.layers
    }
    return measure_costs(models, (batch.x, batch.real), batch.y)
