"""Influence on summaries, in the coordinates of their bases, is that of the whole matrix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.read.engine_runs import InPieces
from torch import Tensor, nn

import dualform
from dualform.read.engine import Engine
from dualform.read.samples_matrix import basis_lines, coordinates, matrix, optimizer_metric
from dualform.read.samples_matrix.block_sums import BasisGrams
from dualform.read.samples_matrix.cost import Work

SAMPLES, BATCH, STEPS = 40, 30, 12
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "wide": (lambda: nn.Sequential(nn.Linear(20, 15), nn.Tanh(), nn.Linear(15, 3)), (7, 20)),
    "tall": (lambda: nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 9)), (7, 12)),
    "few rows": (lambda: nn.Sequential(nn.Linear(20, 15), nn.Tanh(), nn.Linear(15, 3)), (20,)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 9, 3)), (3, 8, 8)),
}


@pytest.fixture(autouse=True)
def first_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The laws hold for one set of bases. Several are joined, which leaves a little out."""
    monkeypatch.setattr("dualform.recording.bases.RENEWED", ())


def record(
    path: Path, model: str, optimizer: type[torch.optim.Optimizer]
) -> tuple[Tensor, nn.Module]:
    """A run of which every step is kept as summaries: the first batch shows enough rows."""
    torch.manual_seed(0)
    make, shape = MODELS[model]
    net, data = make(), torch.randn(SAMPLES, *shape)
    stepper = optimizer(net.parameters(), lr=0.01)
    keep = dualform.summaries(3, 6 if len(shape) > 1 else 3, "rows")
    with dualform.record(net, stepper, path, keep=keep, strict=True) as recorder:
        for step in range(STEPS):
            ids = torch.arange(step, step + BATCH) % SAMPLES
            recorder.samples(ids)
            (net(data[ids]).flatten(1) - 0.5).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
    return data, net


def influence(
    path: Path, net: nn.Module, data: Tensor, engine: Engine | None = None
) -> NDArray[np.float64]:
    run = dualform.open(path, engine=engine)
    return run.influence(net, data[:3], lambda out: out.flatten(1).sum(1)).values


@pytest.mark.parametrize("model", MODELS)
def test_coordinates_give_what_the_whole_matrix_gives(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Line by line, however the lines' Gram matrices are added up, and in how many scans."""
    data, net = record(tmp_path / "run", model, torch.optim.SGD)
    found = [influence(tmp_path / "run", net, data)]
    with monkeypatch.context() as patched:
        patched.setattr(basis_lines, "GRAM_BYTES", 0)
        patched.setattr(basis_lines, "BATCH_BYTES", 1)
        found.append(influence(tmp_path / "run", net, data))
    with monkeypatch.context() as patched:
        patched.setattr(basis_lines, "CACHE_BYTES", 1)
        found.append(influence(tmp_path / "run", net, data))
    with monkeypatch.context() as patched:
        patched.setattr(matrix, "COLUMN_BYTES", 1)
        for by_rows in (True, False):
            patched.setattr(Work, "row_by_row", lambda *_, by_rows=by_rows, **__: by_rows)
            found.append(influence(tmp_path / "run", net, data))
        engine = InPieces()
        found.append(influence(tmp_path / "run", net, data, engine))
        assert (BasisGrams, 3) in engine.cut
    monkeypatch.setattr(optimizer_metric, "has_coordinates", lambda ledger, book: False)
    whole = influence(tmp_path / "run", net, data)
    for one in found:
        assert np.abs(one - whole).max() < 1e-4 * np.abs(whole).max()


def test_a_metric_of_rank_one_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the optimizer moves elements by `p qᵀ`, nothing is lost by coordinates."""
    data, net = record(tmp_path / "run", "wide", torch.optim.AdamW)
    size = optimizer_metric.OptimizerMetric._size

    def rank_one(
        self: optimizer_metric.OptimizerMetric, book: dualform.ledger.Book
    ) -> Tensor | None:
        h = size(self, book)
        if h is None or h.ndim < 2:
            return h
        p, q = coordinates._rank_one(h)
        return p[:, None] * q

    monkeypatch.setattr(optimizer_metric.OptimizerMetric, "_size", rank_one)
    monkeypatch.setattr(coordinates, "damped_inverse", torch.reciprocal)
    found = influence(tmp_path / "run", net, data)
    monkeypatch.setattr(optimizer_metric, "has_coordinates", lambda ledger, book: False)
    whole = influence(tmp_path / "run", net, data)
    assert np.abs(found - whole).max() < 1e-3 * np.abs(whole).max()


def test_tables_that_are_tied_have_coordinates(tmp_path: Path) -> None:
    """What a table is read for is taken along the directions of what it is multiplied by."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix = nn.Embedding(30, 12), nn.Linear(12, 12)

        def forward(self, words: Tensor) -> Tensor:
            return self.mix(self.embed(words)) @ self.embed.weight.T

    torch.manual_seed(0)
    net, data = Tied(), torch.randint(30, (SAMPLES, 9))
    stepper = torch.optim.SGD(net.parameters(), lr=0.01)
    keep = dualform.summaries(3, 6, "rows")
    with dualform.record(net, stepper, tmp_path / "run", keep=keep, strict=True) as recorder:
        for step in range(STEPS):
            ids = torch.arange(step, step + BATCH) % SAMPLES
            recorder.samples(ids)
            net(data[ids]).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
    found = influence(tmp_path / "run", net, data)
    assert found.shape == (SAMPLES, 3)
    assert np.isfinite(found).all()
    assert np.abs(found).max() > 0
