"""Where the attention of test images goes: to training images of which class, in which layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from dualform.read import Run
from dualform.read.scores import Array, Check
from dualform.studies.linear_layers import sensitivities
from dualform.studies.two_tasks.tasks import GROUPS, OUTPUTS

NETWORK = "network"
"""What stands for the whole network among the layers."""


@dataclass(frozen=True)
class ImageQueries:
    """Test images that are asked about, as the model takes them, and their classes."""

    x: Tensor
    groups: Tensor
    """(queries,): 0 to 9 for digits, 10 to 19 for garments."""

    @property
    def outputs(self) -> Tensor:
        """(queries,): the output of each one's class."""
        return self.groups % OUTPUTS


def attention(
    run: Run,
    model: nn.Module,
    queries: ImageQueries,
    explained: ImageQueries,
    groups: Mapping[int, int],
) -> dict[str, Any]:
    """What each layer, and the network, make of some queries: by the classes of both sides.

    Args:
        run: as of the step that is read, whose weights the model has.
        queries: what the layers are asked about.
        explained: what the whole network is asked about.
        groups: the class of each training sample.
    """
    classes = np.array([groups[int(sample)] for sample in run.source.ids])
    found: dict[str, Any] = {}
    directions = sensitivities(model, queries.x, queries.outputs)
    for layer, direction in directions.items():
        reading = run.spotlight(model, queries.x, direction)[layer]
        found[layer] = _shares(reading.samples().values, reading.check, classes, queries)
        keys = np.abs(reading.keys_only().values)
        found[layer]["keys"] = _between(_relative(keys, classes), queries)
    explanation = run.explain(model, explained.x, explained.outputs)
    assert explanation.check is not None
    found[NETWORK] = _shares(explanation.values, explanation.check, classes, explained)
    return found


def _shares(
    values: Array, check: Check, classes: NDArray[np.int64], queries: ImageQueries
) -> dict[str, Any]:
    """What contributions (samples, queries) come to, by the classes of both sides.

    "sizes" has each class's share of the sum of their sizes, "signed" their sums; beside them what
    was there before training, what the output is, and the largest remainder.
    """
    return {
        "sizes": _between(_relative(np.abs(values), classes), queries),
        "signed": _between(_summed(values, classes), queries),
        "initial": _between(check.initial[None], queries)[0],
        "total": _between(check.total[None], queries)[0],
        "remainder": float(np.abs(check.remainder).max()),
    }


def _relative(values: Array, classes: NDArray[np.int64]) -> Array:
    """(classes, queries): the share of the training samples of each class."""
    found: Array = _summed(values, classes) / values.sum(0)
    return found


def _summed(values: Array, classes: NDArray[np.int64]) -> Array:
    """(classes, queries): sums over the training samples of each class."""
    own = classes == np.arange(len(GROUPS))[:, None]
    sums: Array = own.astype(float) @ values
    return sums


def _between(values: Array, queries: ImageQueries) -> list[list[float]]:
    """(lines, classes): means over the queries of each class."""
    groups = queries.groups.numpy()
    found = [values[:, groups == group].mean(1) for group in range(len(GROUPS))]
    means: list[list[float]] = np.stack(found, 1).tolist()
    return means
