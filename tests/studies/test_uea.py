"""The study of time series on tiny files that the test writes itself."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from dualform.cli import cli
from dualform.errors import ReadingError, RetrainingError
from dualform.studies import uea
from dualform.studies.data import data_folder
from dualform.studies.estimate import estimate
from dualform.studies.series import Series, load

SMALL = uea.Setting(width=16, heads=8, hidden=16, epochs=12, rate=5e-3, batch=8)


def write(folder: Path, lengths: tuple[int, int] = (6, 9)) -> None:
    """Two classes, rising and falling, of two channels and several lengths."""
    generator = torch.Generator().manual_seed(0)
    place = folder / "uea" / "Tiny"
    place.mkdir(parents=True)
    for part in ("TRAIN", "TEST"):
        lines = ["# made up", "@problemName Tiny", "@classLabel true up down", "@data"]
        for number in range(20):
            label = ("up", "down")[number % 2]
            length = lengths[number % 4 // 2]
            slope = torch.linspace(-1, 1, length) * (1 if label == "up" else -1)
            noisy = (slope + 0.1 * torch.randn(length, generator=generator) for _ in range(2))
            channels = (",".join(f"{x:.4f}" for x in channel) for channel in noisy)
            lines.append(":".join([*channels, label]))
        text = "\n".join(lines) + "\n"
        if part == "TRAIN":
            (place / f"Tiny_{part}.ts").write_text(text, encoding="utf-8")
        else:
            (place / f"Tiny_{part}.ts.gz").write_bytes(gzip.compress(text.encode()))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write(tmp_path)
    return tmp_path


def test_files_are_read_and_standardized(data: Path) -> None:
    train, test = load(data, "Tiny")
    assert train.x.shape == test.x.shape == (20, 9, 2)
    assert train.classes == ("down", "up")
    assert train.y[:2].tolist() == [1, 0]
    assert train.real.sum(1).tolist() == [6, 6, 9, 9] * 5
    assert (train.x[~train.real] == 0).all()
    seen = train.x[train.real]
    torch.testing.assert_close(seen.mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(seen.std(0), torch.ones(2))


@pytest.mark.parametrize("kind", uea.KINDS)
def test_every_kind_learns(data: Path, kind: str) -> None:
    train, test = load(data, "Tiny")
    result = uea.train("Tiny", train, test, kind, 0, SMALL)
    assert result.accuracy >= 0.9
    assert 0 < result.distance < 2
    again = uea.train("Tiny", train, test, kind, 0, SMALL)
    assert again.accuracy == result.accuracy


def test_test_data_take_no_part_in_choosing(data: Path) -> None:
    train, test = load(data, "Tiny")
    other = Series(torch.randn_like(test.x), test.real, test.y, test.classes)
    pair = [uea.train("Tiny", train, part, "softmax", 1, SMALL) for part in (test, other)]
    assert pair[0].epoch == pair[1].epoch
    assert pair[0].validation == pair[1].validation


def test_padding_is_not_seen(data: Path) -> None:
    train, _ = load(data, "Tiny")
    for kind in uea.KINDS:
        torch.manual_seed(0)
        model = uea.Classifier(train, kind, SMALL).eval()
        other = train.x.masked_fill(~train.real[..., None], 5.0)
        torch.testing.assert_close(model(other, train.real), model(train.x, train.real))


def test_shorter_heads_count_fewer_operations(data: Path) -> None:
    train, _ = load(data, "Tiny")
    models = {kind: uea.Classifier(train, kind, SMALL) for kind in uea.KINDS}
    flops = {kind: uea.count_flops(model, train[torch.arange(4)]) for kind, model in models.items()}
    assert flops["scaled_heads"] < flops["softmax"] == flops["batch_norm"]
    # two layers, 8 heads, 6 of 9 queries real but all computed: 2 · 2 · 9 · 9 · 16 less by blocks
    keys = sum(math.ceil(9 / s) for s in (1, 1, 2, 2, 4, 4, 8, 8))
    fewer = 2 * 2 * 2 * 9 * 2 * (8 * 9 - keys)
    assert flops["softmax"] - flops["scaled_heads"] == fewer


def test_split_is_by_class_and_by_seed() -> None:
    y = torch.arange(100) % 5
    train, held = uea.split(y, 0)
    assert y[held].bincount().tolist() == [4] * 5
    assert not set(train.tolist()) & set(held.tolist())
    assert uea.split(y, 1)[1].tolist() != held.tolist()


def test_intervals() -> None:
    assert estimate([0.5] * 5).interval == 0
    assert math.isnan(estimate([0.5]).interval)
    assert estimate([0.0, 1.0] * 50).interval == pytest.approx(0.0999, abs=2e-3)


def test_from_the_shell(data: Path, tmp_path: Path) -> None:
    given = ["study", "uea", "--data", str(data), "--dataset", "Tiny", "--kind", "linear"]
    options = ["--seeds", "2", "--epochs", "1", "--out", str(tmp_path / "all.json")]
    printed = CliRunner().invoke(cli, [*given, *options], catch_exceptions=False).output
    assert "Tiny, linear, seed 1" in printed
    assert "chosen by test accuracy" in printed
    assert len(json.loads((tmp_path / "all.json").read_text())) == 2
    rows = json.loads(
        CliRunner().invoke(cli, [*given, "--epochs", "1", "--seeds", "1", "--json"]).output
    )
    assert rows[0]["kind"] == "linear"
    assert set(rows[0]) >= {"accuracy", "interval", "distance", "mflops", "kept_mb"}


def test_workers_find_the_same_in_the_same_order(data: Path) -> None:
    chosen: dict[str, Any] = {"datasets": ["Tiny"], "kinds": ["softmax", "linear"], "epochs": 2}
    here, elsewhere = (uea.study(data, seeds=2, workers=n, **chosen) for n in (0, 2))
    assert [(r.kind, r.seed) for r in here] == [
        (kind, seed) for seed in range(2) for kind in ("softmax", "linear")
    ]
    for one, other in zip(here, elsewhere, strict=True):  # threads may add up in another order
        assert one.distance == pytest.approx(other.distance, rel=1e-4)
        assert replace(one, distance=0, seconds=0) == replace(other, distance=0, seconds=0)


def test_errors(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DUALFORM_DATA", raising=False)
    with pytest.raises(ReadingError, match="say where the data are: --data DIR, or DUALFORM_DATA"):
        data_folder(None)
    with pytest.raises(ReadingError, match=r"has neither Other_TRAIN.ts nor Other_TRAIN.ts.gz"):
        load(data, "Other")
    with pytest.raises(ReadingError, match="kind 'ridge' is not in this study; it has softmax"):
        uea.study(data, kinds=["ridge"])
    with pytest.raises(RetrainingError, match=r"Tiny, softmax, seed 0: RuntimeError: .*nowhere"):
        uea.study(data, datasets=["Tiny"], device="nowhere")
