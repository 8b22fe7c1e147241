"""A few test images in detail: their strongest training images, and scores sorted by class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor, nn

from dualform.read import Run
from dualform.read.scores import Array
from dualform.studies.linear_layers import sensitivities
from dualform.studies.mnist.setting import CLASSES
from dualform.studies.mnist.votes import NETWORK, AskedImages

SHOWN = 5
"""How many training images are shown of each kind."""
POINTS = 60
"""How many points a curve of sorted scores has."""


def examples(
    run: Run, model: nn.Module, asked: AskedImages, labels: Tensor
) -> list[dict[str, Any]]:
    """Each test image, with what each layer and the network say of it.

    Args:
        labels: the class of each training sample, in the order of the run.
    """
    parts = [*_values(run, model, asked)]
    return [
        {
            "image": image,
            "class": target,
            "given": given,
            "said": [
                {"measure": measure, "where": where, **_shown(values[:, at], run, labels)}
                for measure, where, values in parts
            ],
        }
        for at, (image, target, given) in enumerate(
            zip(
                *(part.tolist() for part in (asked.images, asked.targets, asked.given)), strict=True
            )
        )
    ]


def _values(run: Run, model: nn.Module, asked: AskedImages) -> Iterator[tuple[str, str, Array]]:
    """Measures, where, and what training samples have by them: (samples, queries)."""
    for layer, reading in run.spotlight(model, asked.x).items():
        yield "keys", layer, reading.keys_only().values
    for layer, direction in sensitivities(model, asked.x, asked.given).items():
        yield "given", layer, run.spotlight(model, asked.x, direction)[layer].samples().values
    yield "given", NETWORK, run.explain(model, asked.x, asked.given).values


def _shown(values: Array, run: Run, labels: Tensor) -> dict[str, Any]:
    """The strongest samples, for and against; and for each class, its sum and sorted values."""
    order = np.argsort(-values, kind="stable")
    ends = {"for": order[:SHOWN], "against": order[::-1][:SHOWN]}
    own = [values[labels.numpy() == label] for label in range(CLASSES)]
    return {
        **{
            name: [{"id": int(run.ids[at]), "value": float(values[at])} for at in chosen]
            for name, chosen in ends.items()
        },
        "sums": [float(part.sum()) for part in own],
        "curves": [np.quantile(part, np.linspace(1, 0, POINTS)).tolist() for part in own],
    }
