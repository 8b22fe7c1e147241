"""What datasets say of their samples; reading them leaves the training as it is."""

from __future__ import annotations

import functools
import random
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import dualform
from dualform.errors import LedgerError, NotARunError, RecordingError, SampleIdsError
from dualform.recording.dataset import look_through
from dualform.recording.randomness import undisturbed

COUNT = 8
X = torch.randn(COUNT, 4, generator=torch.Generator().manual_seed(1))
GLOBAL = np.random.default_rng(3)


class Noisy(Dataset[Any]):
    """Items with chance in them, drawn by a function of the transform."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.transform = SimpleNamespace(steps=[draw])

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return X[index] + self.transform.steps[0](), index % 2


class Owning(Noisy):
    """The same from a generator of its own."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        drawn = (
            torch.rand(1, generator=self.generator)
            if isinstance(self.generator, torch.Generator)
            else self.generator.random()
        )
        return X[index] + drawn, index % 2


def _of_a_closure() -> Callable[[], float]:
    own = random.Random(4)
    return lambda: own.random()


DRAWS: dict[str, Callable[[], Dataset[Any]]] = {
    "torch": lambda: Noisy(lambda: float(torch.rand(1))),
    "numpy": lambda: Noisy(lambda: float(np.random.rand())),
    "python": lambda: Noisy(random.random),
    "own torch generator": lambda: Owning(torch.Generator().manual_seed(2)),
    "own numpy generator": lambda: Owning(np.random.default_rng(2)),
    "own numpy state": lambda: Owning(np.random.RandomState(2)),
    "own python generator": lambda: Owning(random.Random(2)),
    "a closure": lambda: Noisy(_of_a_closure()),
    "a partial": lambda: Noisy(functools.partial(np.random.default_rng(2).normal, 0.0)),
    "a global": lambda: Noisy(lambda: float(GLOBAL.random())),
    "a subset": lambda: Subset(Owning(np.random.default_rng(2)), range(COUNT)),
    "joined": lambda: ConcatDataset([Owning(random.Random(2)), Noisy(random.random)]),
}


def seed() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    GLOBAL.bit_generator.state = np.random.default_rng(3).bit_generator.state


def train(data: Dataset[Any], path: Path, described: bool) -> Tensor:
    model = nn.Linear(4, 2)
    nn.init.constant_(model.weight, 0.1)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seed()
    recording = (
        dualform.record(model, optimizer, path, dataset=data) if described else nullcontext()
    )
    with recording as recorder:
        for ids in torch.randperm(COUNT).split(2):
            if recorder is not None:
                recorder.samples(ids)
            items = [data[int(index)] for index in ids]
            x, y = torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.weight.detach()


@pytest.mark.parametrize("name", DRAWS)
def test_looking_through_a_dataset_moves_no_random_state(name: str) -> None:
    """Items that are read afterwards are those that are read without it."""
    read = []
    for looked in (True, False):
        data = DRAWS[name]()
        seed()
        if looked:
            with undisturbed(data):
                look_through(data)
        read.append([data[index][0] for index in range(len(data))])
    assert all(torch.equal(a, b) for a, b in zip(*read, strict=True))


# Types are checked under pytest by looking at random items, with Python's own random numbers.
@pytest.mark.parametrize("name", sorted(DRAWS.keys() - {"python"}))
def test_training_stays_the_same_with_a_dataset(name: str, tmp_path: Path) -> None:
    recorded = train(DRAWS[name](), tmp_path / "run", described=True)
    assert torch.equal(recorded, train(DRAWS[name](), tmp_path / "none", described=False))
    assert len(dualform.open(tmp_path / "run").samples.labels) >= COUNT


class Torchvision(Dataset[Any]):
    """As torchvision's: images from PIL, numbers of classes, their names beside them."""

    classes = ("cat", "dog")

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return Image.new("RGB", (5, 6), (index, 0, 0)), index % 2


class Unlabeled(Torchvision):
    """Its items are inputs alone; their labels are listed beside them."""

    targets = (1, 0, 1, 0)

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0]


class Table(Dataset[Any]):
    """As those of `datasets`: dicts, with features that know the names of classes."""

    def __init__(
        self, items: list[dict[str, Any]], label: str = "label", names: Any = None
    ) -> None:
        self.items, self.features = items, {label: SimpleNamespace(names=names)}

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def dicts(**columns: list[Any]) -> list[dict[str, Any]]:
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


TWO = ["first", "second"]
Labels, Names, Displayed = list[Any], list[str], Any
KINDS: dict[str, tuple[Any, Labels, Names, Displayed]] = {
    "tensors": (TensorDataset(X[:2], torch.tensor([0, 1])), [0, 1], [], "numbers"),
    "tensors without labels": (TensorDataset(X[:2]), [], [], "numbers"),
    "regression": (TensorDataset(X[:2], torch.rand(2, 1)), [], [], "numbers"),
    "torchvision": (Torchvision(), [0, 1, 0, 1], ["cat", "dog", "cat", "dog"], "image"),
    "targets": (Unlabeled(), [1, 0, 1, 0], ["dog", "cat", "dog", "cat"], "image"),
    "a subset": (Subset(Torchvision(), [3, 2]), [1, 0], ["dog", "cat"], "image"),
    "joined": (ConcatDataset([Torchvision()]), [0, 1, 0, 1], ["cat", "dog"] * 2, "image"),
    "texts": (
        Table(dicts(text=TWO, label=[1, 0]), names=["bad", "good"]),
        [1, 0],
        ["good", "bad"],
        TWO,
    ),
    "pairs of texts": (
        Table(dicts(premise=TWO, hypothesis=["a", "b"], label=[2, 0], idx=[0, 1])),
        [2, 0],
        [],
        ["first\na", "second\nb"],
    ),
    "labels of transformers": (
        dicts(input_ids=[[5, 6], [7]], attention_mask=[[1, 1], [1]], labels=torch.tensor([1, 0])),
        [1, 0],
        [],
        ["5 6", "7"],
    ),
    "a language model": (dicts(input_ids=[[5, 6]] * 2, labels=[[5, 6]] * 2), [], [], ["5 6"] * 2),
    "images in columns": (
        dicts(pixel_values=[torch.rand(3, 4, 4)] * 2, labels=["a", "b"]),
        ["a", "b"],
        [],
        "image",
    ),
    "other columns": (dicts(x=list(X[:2]), labels=np.array([1, 0])), [1, 0], [], "numbers"),
    "named tuples": (
        [("a fable", "good"), ("a tale", "bad")],
        ["good", "bad"],
        [],
        ["a fable", "a tale"],
    ),
    "names too few": (Table(dicts(text=TWO, label=[1, 5]), names=["bad", "good"]), [1, 5], [], TWO),
    "all sorts of shapes": ([(X[0], 1), (X[0, :2], 0)], [1, 0], [], None),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A run of two samples, without descriptions."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.samples([0, 1])
        model(X[:2]).square().mean().backward()
        optimizer.step()
    return tmp_path / "run"


@pytest.mark.parametrize("name", KINDS)
def test_what_is_found_in_a_dataset(name: str, path: Path) -> None:
    dataset, labels, names, shown = KINDS[name]
    dualform.describe(path, dataset)
    samples = dualform.open(path).samples
    assert list(samples.labels.values()) == labels
    assert list(samples.columns.get("class", {}).values()) == names
    previews = [samples.preview(at) for at in range(len(dataset))]
    if isinstance(shown, list):
        assert [preview and preview.data for preview in previews] == shown
    else:
        assert {preview and preview.kind for preview in previews} == {shown}


def test_tokens_are_decoded(path: Path) -> None:
    items = dicts(input_ids=[[5, 6], torch.tensor([7])], labels=[0, 1])
    dualform.describe(path, items, decode=lambda tokens: "-".join(map(str, tokens)), ids=["a", "b"])
    samples = dualform.open(path).samples
    assert [samples.preview(name).data for name in "ab"] == ["5-6", "7"]  # type: ignore[union-attr]


def test_a_dataset_and_what_is_known_beside_it(path: Path) -> None:
    dualform.describe(path, TensorDataset(X[:2], torch.tensor([0, 1])))
    dualform.describe(path, ids=[1], labels=["dog"], columns={"source": ["web"]})
    samples = dualform.open(path).samples
    assert samples.labels == {0: 0, 1: "dog"}
    assert samples.columns["source"] == {1: "web"}


class Broken(Torchvision):
    def __getitem__(self, index: int) -> Any:
        raise FileNotFoundError("no such image")


def test_what_cannot_describe(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecordingError, match=r"item 0 of the Broken cannot be read: FileNotFound"):
        dualform.describe(path, Broken())
    with pytest.raises(RecordingError, match="a generator, whose items cannot be read by number"):
        dualform.describe(path, (pair for pair in [(X[0], 1)]))
    with pytest.raises(SampleIdsError, match="got no ids; say whose"):
        dualform.describe(path, labels=[1])
    with pytest.raises(SampleIdsError, match="got 3 ids but 2 labels"):
        dualform.describe(path, TensorDataset(X[:2], torch.tensor([0, 1])), ids=[0, 1, 2])
    with pytest.raises(NotARunError):
        dualform.describe(path / "none", ids=[1], labels=[1])
    monkeypatch.setattr("dualform.ledger.samples.write_durably", _full)
    with pytest.raises(LedgerError, match=r"cannot write to .*No space left on device; make room"):
        dualform.describe(path, ids=[1], labels=[1])


def _full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_odd_things_in_a_dataset(path: Path) -> None:
    """Proxies of what is gone, and datasets that are views of themselves."""
    data: Any = Torchvision()
    data.gone, data.dataset = weakref.proxy(Torchvision()), data
    data.hardware = random.SystemRandom()
    dualform.describe(path, data)
    assert dualform.open(path).samples.columns["class"][1] == "dog"
