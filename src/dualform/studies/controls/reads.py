"""What reads say of test digits: a number for each training image, and the class with most of it.

Every read is (samples, queries). Its *answer* is the class whose training images have the largest
total.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dualform.evaluate.scores import by_position
from dualform.read import Run
from dualform.read.scores import Array
from dualform.read.spotlight import Reading
from dualform.studies.controls.experiment import CLASSES
from dualform.studies.linear_layers import layer_inputs, sensitivities

NETWORK = "exact, whole network"
"""The read of the whole network: its explanation."""
INPUT_SPACE = "sums in input space"
"""|x·q| between pictures, where keys only has it between what a layer is given."""
NEIGHBORS = 10
"""How many of the nearest training images have a vote."""
NEAREST = f"{NEIGHBORS} nearest in input space"

Reads: TypeAlias = dict[str, Array]
"""(samples, queries) for each read, by its name."""


def answers(values: Array, labels: Tensor) -> NDArray[np.int64]:
    """(queries,): the class with the largest total.

    >>> answers(np.array([[1.0, -1.0], [2.0, 0.0], [1.5, 0.0]]), torch.tensor([3, 4, 3])).tolist()
    [3, 4]
    """
    own = labels.numpy() == np.arange(CLASSES)[:, None]
    sums = np.where(own.any(1, keepdims=True), own.astype(float) @ values, -np.inf)
    found: NDArray[np.int64] = sums.argmax(0)
    return found


def keys_only(run: Run, model: nn.Module, x: Tensor) -> Reads:
    """The published score of each layer: `Σ |x·q|` over the visits of a training image."""
    spotlight, count = run.spotlight(model, x), len(run.ids)
    return {
        f"keys only, layer {layer}": by_position(reading.keys_only(), count)
        for layer, reading in spotlight.items()
    }


def exact(run: Run, model: nn.Module, x: Tensor, outputs: Tensor) -> Reads:
    """Signed contributions in each layer to one output of the network for each query."""
    return {
        f"exact, layer {layer}": by_position(reading.samples(), len(run.ids))
        for layer, reading in readings(run, model, x, outputs).items()
    }


def readings(run: Run, model: nn.Module, x: Tensor, outputs: Tensor) -> dict[str, Reading]:
    """Each layer, asked along the gradient of one output of the network for each query."""
    return {
        layer: run.spotlight(model, x, direction)[layer]
        for layer, direction in sensitivities(model, x, outputs).items()
    }


def explained(run: Run, model: nn.Module, x: Tensor, outputs: Tensor) -> Reads:
    """Signed contributions through the whole network."""
    return {NETWORK: by_position(run.explain(model, x, outputs), len(run.ids))}


def similar(model: nn.Module, keys: Tensor, x: Tensor) -> Reads:
    """|x·q| in each layer of a network as it is, each training image once."""
    return {
        f"keys only, layer {layer}": _array((own @ asked.T).abs())
        for layer, (own, asked) in _pairs(model, keys, x).items()
    }


def nearest(model: nn.Module, keys: Tensor, x: Tensor) -> Reads:
    """The votes of the nearest training images by cosine, in what each layer is given.

    What the first layer is given is input space.
    """
    found = {
        f"{NEIGHBORS} nearest, layer {layer}": votes(cosines(own, asked))
        for layer, (own, asked) in _pairs(model, keys, x).items()
    }
    first, *_ = found
    found[NEAREST] = found.pop(first)
    return found


def in_input_space(keys: Tensor, x: Tensor) -> Reads:
    """|x·q| between pictures: no network takes part."""
    return {INPUT_SPACE: _array((keys @ x.T).abs())}


def cosines(keys: Tensor, queries: Tensor) -> Array:
    """(samples, queries): the cosine of each two.

    >>> cosines(torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 1.0], [3.0, 0.0]])).round(3)
    array([[0.707, 1.   ]])
    """
    return _array(
        nn.functional.normalize(keys.double(), dim=1)
        @ nn.functional.normalize(queries.double(), dim=1).T
    )


def votes(similarity: Array, count: int = NEIGHBORS) -> Array:
    """A vote for each of the most similar samples, of the size of its similarity; else 0.

    >>> votes(np.array([[0.5], [0.9], [0.7]]), 2).T
    array([[0. , 0.9, 0.7]])
    """
    nearest = np.argpartition(-similarity, count - 1, 0)[:count]
    found = np.zeros_like(similarity)
    np.put_along_axis(found, nearest, np.take_along_axis(similarity, nearest, 0), 0)
    return found


def agreement(
    reads: Mapping[str, Array], labels: Tensor, wanted: Mapping[str, Tensor]
) -> dict[str, dict[str, float]]:
    """How often each read's answer is some wanted class, for each kind of wanted class."""
    found = {name: answers(values, labels) for name, values in reads.items()}
    return {
        name: {kind: float((own == classes.numpy()).mean()) for kind, classes in wanted.items()}
        for name, own in found.items()
    }


def answered(model: nn.Module, x: Tensor) -> Tensor:
    """(queries,): the class that the network answers."""
    with torch.no_grad():
        found: Tensor = model(x).argmax(1).cpu()
    return found


def _pairs(model: nn.Module, keys: Tensor, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """What each layer is given, of the training images and of the queries."""
    own, asked = layer_inputs(model, keys), layer_inputs(model, x)
    return {layer: (own[layer], asked[layer]) for layer in own}


def _array(values: Tensor) -> Array:
    found: Array = values.double().cpu().numpy()
    return found
