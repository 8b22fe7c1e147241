"""Labels and previews taken from a map-style dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dualform.ledger.samples import describe_samples


def describe_dataset(path: Path, dataset: Any) -> None:
    """Describes sample `i` by item `i` of the dataset: `(input, label)` or the input alone."""
    items = [dataset[index] for index in range(len(dataset))]
    pairs = [item if isinstance(item, tuple | list) else (item,) for item in items]
    found = [_label(pair[-1]) for pair in pairs if len(pair) > 1]
    labels = [label for label in found if label is not None]
    known = labels if len(labels) == len(items) else None
    describe_samples(path, range(len(items)), known, _previews([pair[0] for pair in pairs]))


def _label(label: Any) -> int | str | None:
    """A label a person can group by: an integer or a string."""
    if isinstance(label, str):
        return label
    number = label.item() if isinstance(label, Tensor) and label.numel() == 1 else label
    return int(number) if isinstance(number, int) or hasattr(number, "__index__") else None


def _previews(inputs: list[Any]) -> Tensor | list[str] | None:
    """Inputs of one shape as one tensor, texts as texts, anything else not at all."""
    if inputs and all(isinstance(x, str) for x in inputs):
        return inputs
    try:
        tensors = [torch.as_tensor(x) for x in inputs]
        return torch.stack(tensors) if tensors else None
    except (TypeError, ValueError, RuntimeError):
        return None
