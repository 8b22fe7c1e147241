"""Suspicion: wrong labels are found from one recorded run, whatever the batches and the loss."""

from __future__ import annotations

import gzip
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import dualform
from dualform.errors import RecordingWarning, UnknownLayerError, UnknownSampleError
from dualform.evaluate import mislabeled
from dualform.read import Run

WIDTHS = (64, 32, 10)


def flip(labels: Tensor, share: float, seed: int) -> tuple[Tensor, np.ndarray]:
    """Some labels replaced by others, and which."""
    chance = np.random.default_rng(seed)
    flipped = np.zeros(len(labels), dtype=bool)
    flipped[chance.choice(len(labels), int(share * len(labels)), replace=False)] = True
    moved = (labels.numpy() + chance.integers(1, 10, len(labels))) % 10
    return torch.from_numpy(np.where(flipped, moved, labels.numpy())), flipped


def record(
    x: Tensor, y: Tensor, path: Path, widths: tuple[int, ...], epochs: int, reduction: str = "mean"
) -> Run:
    """Trains a small network with momentum; the last batch of an epoch may be short."""
    torch.manual_seed(0)
    layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
    model = nn.Sequential(*[module for pair in layers for module in pair][:-1])
    rate = 0.05 if reduction == "mean" else 0.05 / 64
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    with dualform.record(model, optimizer, path) as recorder:
        for _ in range(epochs):
            for ids in torch.randperm(len(x)).split(64):
                recorder.samples(ids)
                F.cross_entropy(model(x[ids]), y[ids], reduction=reduction).backward()
                optimizer.step()
                optimizer.zero_grad()
    return dualform.open(path)


def digits() -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x).float()[:1500] / 16, torch.tensor(y)[:1500]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_flipped_digits_are_found(tmp_path: Path, reduction: str) -> None:
    x, y = digits()
    given, flipped = flip(y, 0.1, seed=0)
    run = record(x, given, tmp_path / "run", WIDTHS, 8, reduction)
    found = mislabeled(run.suspicion(), flipped)
    assert found.auc > 0.98
    assert found.found(0.15) > 0.95


def test_suspicion_is_the_mean_of_relative_error_sizes(tmp_path: Path) -> None:
    """Against a plain loop over the errors p − y, taken from a second training alike."""
    x, y = digits()
    x, y = x[:150], y[:150]
    run = record(x, y, tmp_path / "run", (64, 10), epochs=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sizes: dict[int, list[tuple[int, float]]] = {at: [] for at in range(150)}
    for _ in range(2):
        for ids in torch.randperm(150).split(64):
            output = model(x[ids])
            error = (output.softmax(1) - F.one_hot(y[ids], 10)).detach() / len(ids)
            for sample, size in zip(ids.tolist(), error.norm(dim=1).tolist(), strict=True):
                sizes[sample].append((len(ids), size))
            F.cross_entropy(output, y[ids]).backward()
            optimizer.step()
            optimizer.zero_grad()
    usual = {
        length: np.mean([s for rows in sizes.values() for n, s in rows if n == length])
        for length in (64, 22)
    }
    expected = [np.mean([size / usual[n] for n, size in rows]) for rows in sizes.values()]
    np.testing.assert_allclose(run.suspicion().values[:, 0], expected, rtol=1e-5)


def test_suspicion_as_of_a_step_and_of_a_layer(tmp_path: Path) -> None:
    x, y = digits()
    run = record(x[:128], y[:128], tmp_path / "run", WIDTHS, epochs=2)
    assert run.suspicion().ids == list(range(128))
    early = run.at(1).suspicion()
    assert (early.values > 0).sum() == 64
    assert not np.allclose(run.suspicion("0").values, run.suspicion("2").values)
    with pytest.raises(UnknownLayerError, match="layer 'fc' is not in this run; it recorded '0'"):
        run.suspicion("fc")


def test_a_run_without_rows_knows_no_samples(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.warns(RecordingWarning, match="the recorder saw no step"),
        dualform.record(model, optimizer, tmp_path / "run"),
    ):
        pass
    with pytest.raises(UnknownSampleError, match="this run knows no samples"):
        dualform.open(tmp_path / "run").suspicion()


def mnist(folder: Path, samples: int) -> tuple[Tensor, Tensor]:
    images, labels = (
        gzip.decompress((folder / f"train-{name}-ubyte.gz").read_bytes())
        for name in ("images-idx3", "labels-idx1")
    )
    x = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 784)[:samples]
    y = np.frombuffer(labels, np.uint8, offset=8)[:samples]
    return torch.from_numpy(x.astype(np.float32) / 255), torch.from_numpy(y.astype(np.int64))


@pytest.mark.long
@pytest.mark.skipif("DUALFORM_DATA" not in os.environ, reason="MNIST is in $DUALFORM_DATA")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_flipped_mnist_is_found(tmp_path: Path, seed: int) -> None:
    x, y = mnist(Path(os.environ["DUALFORM_DATA"]) / "mnist", 5000)
    given, flipped = flip(y, 0.1, seed)
    run = record(x, given, tmp_path / "run", (784, 128, 64, 10), epochs=20)
    assert mislabeled(run.suspicion(), flipped).auc > 0.99
