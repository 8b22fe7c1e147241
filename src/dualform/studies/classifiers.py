"""The classifier of the dual-form paper's studies, and how it is trained and recorded."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dualform.read import Run
from dualform.recording import record
from dualform.recording.keep import Keep
from dualform.studies.data import Images


@dataclass(frozen=True)
class Training:
    """A network of linear layers and ReLU, and the SGD that trains it; as the paper has them."""

    widths: tuple[int, ...] = (784, 800, 800, 10)
    steps: int = 5000
    batch: int = 128
    rate: float = 3e-3
    momentum: float = 0.9
    clip: float = 1.0

    def make_model(self) -> nn.Sequential:
        """The network, with weights drawn at random.

        >>> Training(widths=(4, 3, 2)).make_model()
        Sequential(
          (0): Linear(in_features=4, out_features=3, bias=True)
          (1): ReLU()
          (2): Linear(in_features=3, out_features=2, bias=True)
        )
        """
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(self.widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])


def shuffled(ids: Tensor, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Batches of some samples without end: all of them in a new order, epoch after epoch.

    >>> batches = shuffled(torch.arange(4), 2, torch.Generator().manual_seed(0))
    >>> sorted(torch.cat([next(batches), next(batches)]).tolist())
    [0, 1, 2, 3]
    """
    while True:
        order = ids[torch.randperm(len(ids), generator=generator)]
        yield from torch.split(order, batch)


def whole_batches(ids: Tensor, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """The same without short batches, which would count their samples more than others.

    >>> batches = whole_batches(torch.arange(5), 2, torch.Generator().manual_seed(0))
    >>> [len(next(batches)) for _ in range(4)]
    [2, 2, 2, 2]
    """
    return (some for some in shuffled(ids, batch, generator) if len(some) == batch)


def trained_model(training: Training, run: Run, device: str = "cpu") -> nn.Module:
    """The network as of the step that a run is read at."""
    model = training.make_model()
    model.load_state_dict(run.state_dict())
    return model.eval().to(device)


def train(
    images: Images,
    batches: Iterable[Tensor],
    training: Training,
    seed: int,
    path: Path | None = None,
    keep: Keep = "rows",
    device: str = "cpu",
) -> nn.Sequential:
    """Trains on as many batches of samples as the training has steps; records them at a path."""
    torch.manual_seed(seed)
    model = training.make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=training.rate, momentum=training.momentum)
    x, y = images.inputs().to(device), images.y.to(device)

    def step(ids: Tensor) -> None:
        torch.autograd.backward(cross_entropy(model(x[ids]), y[ids]))
        nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
        optimizer.zero_grad()

    steps = itertools.islice(batches, training.steps)
    if path is None:
        for ids in steps:
            step(ids)
        return model
    with record(model, optimizer, path, dataset=images, keep=keep, overwrite=True) as recorder:
        for ids in steps:
            recorder.samples(ids)
            step(ids)
    return model


class StackedClassifiers(nn.Module):
    """Many networks of the same widths, which one call of torch moves a step on.

    >>> training = Training(widths=(4, 3, 2))
    >>> models = [training.make_model() for _ in range(5)]
    >>> x = torch.randn(5, 6, 4)
    >>> torch.allclose(StackedClassifiers(models)(x)[3], models[3](x[3]), atol=1e-6)
    True
    """

    def __init__(self, models: Sequence[nn.Sequential]) -> None:
        super().__init__()
        states = [model.state_dict() for model in models]
        self.values = nn.ParameterList(
            torch.stack([state[name] for state in states]) for name in states[0]
        )

    def forward(self, x: Tensor) -> Tensor:
        """(networks, samples, outputs) of (networks, samples, inputs)."""
        layers = [*zip(self.values[::2], self.values[1::2], strict=True)]
        for at, (weight, bias) in enumerate(layers, 1):
            x = torch.baddbmm(bias[:, None], x, weight.mT)
            x = x.relu() if at < len(layers) else x
        return x


def train_stacked(
    images: Images,
    batches: Sequence[Iterable[Tensor]],
    training: Training,
    seeds: Sequence[int],
    device: str = "cpu",
) -> StackedClassifiers:
    """What `train` makes with each seed of its own batches, many networks at once."""
    models = []
    for seed in seeds:
        torch.manual_seed(seed)
        models.append(training.make_model())
    stacked = StackedClassifiers(models).to(device)
    optimizer = torch.optim.SGD(stacked.parameters(), lr=training.rate, momentum=training.momentum)
    x, y = images.inputs().to(device), images.y.to(device)
    for ids in itertools.islice(zip(*batches, strict=False), training.steps):
        at = torch.stack(ids).to(device)
        logits = stacked(x[at]).flatten(0, 1)
        losses = cross_entropy(logits, y[at].flatten(), reduction="sum") / at.shape[1]
        torch.autograd.backward(losses)  # of networks that share nothing
        _clip(stacked, training.clip)
        optimizer.step()
        optimizer.zero_grad()
    return stacked.eval()


def _clip(stacked: StackedClassifiers, largest: float) -> None:
    """As `clip_grad_norm_` does, each network by its own norm."""
    gradients = [value.grad for value in stacked.values if value.grad is not None]
    norms = torch.stack([one.flatten(1).norm(dim=1) for one in gradients]).norm(dim=0)
    left = (largest / (norms + 1e-6)).clamp(max=1)
    for one in gradients:
        one.mul_(left.reshape(-1, *[1] * (one.ndim - 1)))
