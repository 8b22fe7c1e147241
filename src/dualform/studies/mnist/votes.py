"""What classes of training images say of test images, and how often they say the right thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dualform.read import Run
from dualform.read.scores import Array
from dualform.studies.mnist.setting import CLASSES, WATCHED

NETWORK = "network"
"""What stands for the whole network among the layers."""
STRONGEST = 10
"""Of how many training images it is said whether they have the class of the test image."""
HIGHEST = 50
"""Of how many training images of a class the strongest are averaged."""
MEASURES = {
    "keys": "keys only, total",
    "keys mean": "keys only, mean",
    "keys strongest": "keys only, 50 strongest",
    "keys unscaled": "keys only, total, pixels from −1 to 1",
    "own": "exact: a class for its own output",
    "own relative": "exact: the same, relative to its mean",
    "evidence": "exact: all classes for an output",
    "given": "exact: a class for the output given",
    "own influence": "influence: a class for its own output",
    "given influence": "influence: a class for the output given",
}
"""Scores that classes have for a test image, and what tables call them."""


@dataclass(frozen=True)
class AskedImages:
    """Test images that are asked about: what the model takes, their classes and its outputs."""

    images: Tensor
    """(queries,): their places in the test set."""
    x: Tensor
    targets: Tensor
    given: Tensor
    """(queries,): the class that the model takes each for."""

    @property
    def right(self) -> Tensor:
        """(queries,): whether the model has the class right."""
        return self.targets == self.given

    def some(self, chosen: Tensor) -> AskedImages:
        """Some of them."""
        parts = (self.images, self.x, self.targets, self.given)
        return AskedImages(*(part[chosen.to(part.device)] for part in parts))

    def first(self, count: int) -> AskedImages:
        """So many that are right, and as many that are wrong."""
        places = [torch.nonzero(side).flatten()[:count] for side in (self.right, ~self.right)]
        return self.some(torch.cat(places))

    def for_all_outputs(self) -> tuple[Tensor, Tensor]:
        """Each image once for every output: what the model takes, and the outputs."""
        return self.x.repeat_interleave(CLASSES, 0), torch.arange(CLASSES).repeat(len(self.x))


def by_influence(run: Run, model: nn.Module, asked: AskedImages, labels: Tensor) -> Tensor:
    """(queries, outputs, classes): sums of the influence of single training images.

    Args:
        labels: the class of each training sample, in the order of the run.
    """
    influence = run.influence(model, *asked.for_all_outputs())
    return of_classes(torch.from_numpy(influence.values), labels).reshape(-1, CLASSES, CLASSES)


def of_classes(values: Tensor, labels: Tensor) -> Tensor:
    """(queries, classes): sums of values (samples, queries) over the samples of each class.

    >>> of_classes(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1, 0, 1]))[:, :2].tolist()
    [[2.0, 5.0]]
    """
    sums = values.new_zeros(CLASSES, values.shape[1])
    return sums.index_add_(0, labels, values).T


def strongest_of_classes(values: Tensor, labels: Tensor) -> Tensor:
    """(queries, classes): means over the strongest samples of each class, by their values.

    >>> strongest_of_classes(torch.arange(20.0)[:, None], torch.arange(20) % 10)[0, :3].tolist()
    [5.0, 6.0, 7.0]
    """
    own = [values[labels == label] for label in range(CLASSES)]
    return torch.stack([part.topk(min(HIGHEST, len(part)), 0).values.mean(0) for part in own], 1)


def scores_of(amounts: Tensor, asked: AskedImages) -> dict[str, Tensor]:
    """Scores of classes (queries, classes) from amounts (queries, outputs, classes), by measure."""
    own = amounts.diagonal(dim1=1, dim2=2)
    return {
        "own": own,
        "own relative": own / own.mean(0),
        "evidence": amounts.sum(2),
        "given": amounts[torch.arange(len(amounts)), asked.given],
    }


def votes(scores: Tensor, asked: AskedImages) -> dict[str, float | None]:
    """How often the class with the largest score is an image's class, and the output.

    Of images that are right, both are the same.

    >>> scores, y = torch.eye(10)[[3, 5]], torch.tensor([3, 4])
    >>> votes(scores, AskedImages(y, y, y, torch.tensor([3, 5])))
    {'right': 1.0, 'wrong, its class': 0.0, 'wrong, the output': 1.0}
    """
    vote, right = scores.argmax(1), asked.right
    return {
        "right": _share(vote == asked.targets, right),
        "wrong, its class": _share(vote == asked.targets, ~right),
        "wrong, the output": _share(vote == asked.given, ~right),
    }


def places(scores: Tensor, asked: AskedImages) -> list[float] | None:
    """The mean place of each class, from 1, for images of the watched class that are right."""
    watched = asked.right & (asked.targets == WATCHED)
    if not bool(watched.any()):
        return None
    ordered = scores[watched].argsort(1, descending=True).argsort(1) + 1
    found: list[float] = ordered.double().mean(0).tolist()
    return found


def alike(
    measure: str, where: str, values: Array, asked: AskedImages, labels: Tensor
) -> dict[str, Any]:
    """Which share of the strongest training images have the class of the test image.

    Args:
        values: (samples, queries).
        labels: the class of each training sample, in the order of the run.
    """
    found = torch.from_numpy(values)
    strongest = labels[found.topk(min(STRONGEST, len(found)), 0).indices]
    shares = (strongest == asked.targets).double().mean(0)
    means = {
        name: float(shares[side].mean()) if bool(side.any()) else None
        for name, side in (("right", asked.right), ("wrong", ~asked.right))
    }
    return {"measure": measure, "where": where, **means}


def said(measure: str, where: str, scores: Tensor, asked: AskedImages) -> dict[str, Any]:
    """What is kept of the scores (queries, classes) of a measure in a layer, or the network."""
    found = {"votes": votes(scores, asked), "places": places(scores, asked)}
    return {"measure": measure, "where": where, **found}


def _share(hit: Tensor, among: Tensor) -> float | None:
    """The share of hits among some; None where there are none."""
    return float(hit[among].double().mean()) if bool(among.any()) else None
