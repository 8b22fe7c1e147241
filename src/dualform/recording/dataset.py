"""Labels, class names and previews found in a map-style dataset, whatever its items look like."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dualform.errors import RecordingError
from dualform.ledger.samples import Label, SampleId, describe_samples
from dualform.recording.randomness import undisturbed

Decode: TypeAlias = Callable[[list[int]], str]
"""Makes a text of token ids, as a tokenizer does."""
CLASS = "class"
"""The column that holds the names of classes; labels stay the numbers a model is trained on."""
LABELS = ("label", "labels", "target", "targets", "y")
IMAGES = ("image", "img", "pixel_values")
TEXTS = ("text", "sentence", "content", "document", "prompt")
TOKENS = "input_ids"


@dataclass
class Described:
    """What a dataset says of its samples, in its order."""

    labels: list[Label] | None = None
    previews: Tensor | list[str] | None = None
    columns: dict[str, list[Label]] = field(default_factory=dict)


def describe_dataset(
    path: Path, dataset: Any, ids: Sequence[SampleId] | None = None, decode: Decode | None = None
) -> None:
    """Describes each sample of a run by an item of the dataset: sample `i` by item `i`, or by ids.

    Items are read once. Random states are put back, so that the training stays what it is.
    """
    count = length(dataset)
    with undisturbed(dataset, decode):
        found = look_through(dataset, decode)
    ids = range(count) if ids is None else ids
    describe_samples(path, ids, found.labels, found.previews, found.columns)


def length(dataset: Any) -> int:
    """How many items a dataset has; what has none to be read by number is refused."""
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return len(dataset)
    raise RecordingError(
        f"the dataset is a {type(dataset).__name__}, whose items cannot be read by number; give "
        "one with a length, or describe samples by hand: describe(ids=…, labels=…, previews=…)."
    )


def look_through(dataset: Any, decode: Decode | None = None) -> Described:
    """What the items of a dataset, and the dataset itself, say of its samples.

    >>> look_through([("a fable", 1), ("a tale", 0)])
    Described(labels=[1, 0], previews=['a fable', 'a tale'], columns={})
    >>> look_through([{"text": "a fable", "labels": 1}]).labels
    [1]
    """
    items = list(_items(dataset))
    labels = _all(_label(item) for item in items) or _listed(dataset, len(items))
    found = Described(labels, _previews([_input(item, decode) for item in items]))
    names = class_names(dataset)
    if names and labels and all(isinstance(la, int) and 0 <= la < len(names) for la in labels):
        found.columns[CLASS] = [names[int(label)] for label in labels]
    return found


def class_names(dataset: Any) -> list[str]:
    """The names of a dataset's classes, as torchvision and datasets keep them; else none.

    >>> from types import SimpleNamespace
    >>> class_names(SimpleNamespace(dataset=SimpleNamespace(classes=["cat", "dog"])))
    ['cat', 'dog']
    """
    for part in _inner(dataset):
        features = getattr(part, "features", None)
        if isinstance(features, Mapping):
            known = [getattr(features.get(name), "names", None) for name in LABELS]
            for names in known:
                if isinstance(names, list):
                    return [str(name) for name in names]
        names = getattr(part, "classes", None)
        if isinstance(names, list | tuple) and names:
            return [str(name) for name in names]
    return []


def _items(dataset: Any) -> Iterator[Any]:
    for index in range(len(dataset)):
        try:
            yield dataset[index]
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise RecordingError(
                f"item {index} of the {type(dataset).__name__} cannot be read: {problem}; "
                "describe samples by hand: describe(ids=…, labels=…, previews=…)."
            ) from error


def _inner(dataset: Any) -> Iterator[Any]:
    """A dataset, and those it is a part or a view of."""
    for _ in range(8):  # one may be a view of itself
        yield dataset
        several = getattr(dataset, "datasets", None)
        first = several[0] if isinstance(several, list) and several else None
        inner = getattr(dataset, "dataset", None)
        dataset = first if inner is None else inner
        if dataset is None:
            return


def _label(item: Any) -> Label | None:
    """The label of an item: its column of that name, or its last part."""
    if isinstance(item, Mapping):
        return next((la for name in LABELS if (la := _plain(item.get(name))) is not None), None)
    return _plain(item[-1]) if isinstance(item, tuple | list) and len(item) > 1 else None


def _plain(label: Any) -> Label | None:
    """A label a person can group by: an integer or a string."""
    if isinstance(label, str):
        return label
    number = label.item() if isinstance(label, Tensor) and label.numel() == 1 else label
    if isinstance(number, int) or (hasattr(number, "__index__") and not isinstance(number, Tensor)):
        try:
            return int(number)
        except TypeError:  # an array of several numbers
            return None
    return None


def _listed(dataset: Any, count: int) -> list[Label] | None:
    """Labels that a dataset lists beside items without any, as torchvision's do."""
    for name in ("targets", "labels"):
        listed = getattr(dataset, name, None)
        if isinstance(listed, Tensor | np.ndarray | list | tuple) and len(listed) == count:
            return _all(_plain(label) for label in listed)
    return None


def _input(item: Any, decode: Decode | None) -> Any:
    """What to show of an item: an image, a text, or numbers."""
    if isinstance(item, tuple | list):
        item = item[0] if len(item) else None
    if not isinstance(item, Mapping):
        return item
    for name in (*IMAGES, *TEXTS):
        if (shown := item.get(name)) is not None and (name in IMAGES or isinstance(shown, str)):
            return shown
    tokens = item.get(TOKENS)
    if tokens is not None and decode is not None:
        return decode(torch.as_tensor(tokens).flatten().tolist())
    others = {name: value for name, value in item.items() if name not in LABELS}
    texts = [value for value in others.values() if isinstance(value, str)]
    if texts:
        return "\n".join(texts)  # such as a premise and a hypothesis
    if tokens is not None:
        return " ".join(map(str, torch.as_tensor(tokens).flatten().tolist()))
    return next((value for value in others.values() if np.ndim(value) > 0), None)


def _previews(inputs: list[Any]) -> Tensor | list[str] | None:
    """Inputs of one shape as one tensor, texts as texts, anything else not at all."""
    if inputs and all(isinstance(x, str) for x in inputs):
        return inputs
    try:
        tensors = [x if isinstance(x, Tensor) else torch.as_tensor(np.array(x)) for x in inputs]
        return torch.stack(tensors) if tensors else None
    except (TypeError, ValueError, RuntimeError):
        return None


def _all(labels: Iterator[Label | None]) -> list[Label] | None:
    """The labels, if every sample has one."""
    found = list(labels)
    known = [label for label in found if label is not None]
    return known if known and len(known) == len(found) else None
