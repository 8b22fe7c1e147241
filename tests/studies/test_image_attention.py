"""The study of a small vision transformer, on tiny pictures that the test writes itself."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from dualform.cli import cli
from dualform.errors import EvaluationError, ReadingError
from dualform.studies.encoders import EncoderShape
from dualform.studies.image_attention import SETTINGS, ImageSetting, run_study
from dualform.studies.image_attention.training import (
    VisionTransformer,
    load_pictures,
    measure_training,
)
from dualform.studies.report import read_tables

TINY = ImageSetting(
    EncoderShape(width=16, heads=4, hidden=16, layers=1, dropout=0.0),
    patch=2,
    images=100,
    tests=40,
    epochs=20,
    rate=5e-3,
    seeds=2,
    batch=20,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of 8 × 8 pixels, the same patterns in both parts: a bright row or column a class."""
    folder = tmp_path_factory.mktemp("data") / "fashion-mnist"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    patterns = torch.zeros(10, 8, 8, dtype=torch.long)
    for label in range(10):
        patterns[label, label % 5 if label < 5 else slice(None)] += 100
        patterns[label, :, label % 5 + 3] += 100 * (label >= 5)
    for part, count in (("train", 100), ("t10k", 50)):
        y = torch.arange(count) % 10
        pixels = patterns[y] + torch.randint(0, 50, (count, 8, 8), generator=generator)
        images = b"\0\0\x08\x03" + struct.pack(">3I", count, 8, 8)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(
            images + bytes(pixels.flatten().tolist())
        )
        labels = b"\0\0\x08\x01" + struct.pack(">I", count) + bytes(y.tolist())
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    return folder.parent


def test_patches_are_squares_of_the_image() -> None:
    model = VisionTransformer(4, 2, "softmax", TINY.shape)
    with torch.no_grad():
        model.positions.zero_()
    image = torch.arange(16.0).reshape(1, 4, 4)
    patches = torch.tensor([[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]])
    torch.testing.assert_close(model.embedded(image)[0], model.project(patches.float()))


def test_pictures_are_standardized_by_the_training_images(data: Path) -> None:
    train, test = load_pictures(data, TINY)
    assert train.x.shape == (100, 8, 8)
    assert test.x.shape == (40, 8, 8)
    assert float(train.x.mean()) == pytest.approx(0, abs=1e-5)
    assert float(train.x.std()) == pytest.approx(1, abs=1e-5)
    assert float(test.x.mean()) != pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("layer", TINY.layers)
def test_every_layer_learns(data: Path, layer: str) -> None:
    found = measure_training(*load_pictures(data, TINY), layer, 0, TINY, "cpu")
    assert found["accuracy"] >= 0.7
    assert 0 < found["distance"] < 2
    again = measure_training(*load_pictures(data, TINY), layer, 0, TINY, "cpu")
    assert again == found


def test_the_study_compares_layers_and_goes_on(data: Path, tmp_path: Path) -> None:
    quick = replace(TINY, epochs=1)
    run_study(data, quick, 1, "cpu", tmp_path).save(tmp_path)
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "parts").glob("*seed-0.json")}
    assert len(kept) == len(TINY.layers)
    report = run_study(data, quick, 2, "cpu", tmp_path)
    report.save(tmp_path)
    assert kept == {file: file.stat().st_mtime_ns for file in kept}
    (table,) = read_tables(tmp_path / "study.json")
    plain, *others = table.rows
    assert plain[0] == "softmax"
    assert plain[2] is None
    for row in others:
        assert row[2].mean == pytest.approx(row[1].mean - plain[1].mean, abs=1e-6)
    flops = {row[0]: row[5] for row in table.rows}
    assert flops["scaled_heads"] < flops["softmax"] == flops["batch_norm"]
    assert report.findings[0].startswith("Of 4 differences to softmax")
    assert (tmp_path / "layers.png").stat().st_size > 5000
    with pytest.raises(EvaluationError, match=r"other settings: patch=4 \(there 2\)"):
        run_study(data, replace(quick, patch=4), 1, "cpu", tmp_path)


def test_from_the_shell(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "small", TINY)
    given = ["study", "image-attention", "--data", str(data), "--kind", "centered", "--epochs", "1"]
    options = ["--seeds", "1", "--out", str(tmp_path), "--json"]
    found = json.loads(CliRunner().invoke(cli, [*given, *options], catch_exceptions=False).stdout)
    assert found["settings"]["layers"] == "centered"
    assert found["pictures"] == []


def test_errors(data: Path) -> None:
    with pytest.raises(ReadingError, match="images of 8 pixels are no whole patches of 3"):
        load_pictures(data, replace(TINY, patch=3))
    with pytest.raises(ReadingError, match="images 'letters' are not known; there are 'mnist'"):
        load_pictures(data, replace(TINY, dataset="letters"))
