"""What all studies share: reports, parts that are kept, and the data they read."""

from __future__ import annotations

import gzip
import json
import math
import os
import struct
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch import Tensor

import dualform
from dualform.cli.studies import study
from dualform.errors import EvaluationError, ReadingError, RecordingEndedWarning
from dualform.studies.classifiers import Training, shuffled, train
from dualform.studies.data import CIFAR_RECORD, DIGITS, Images, load_images
from dualform.studies.estimate import Estimate, estimate
from dualform.studies.parts import run_parts
from dualform.studies.report import NumberTable, Picture, Report, read_tables

PAGES = Path(__file__).parents[2] / "docs" / "studies"
STUDIES = sorted(page for page in PAGES.glob("*.md") if page.stem != "README")


@pytest.mark.parametrize("page", STUDIES, ids=lambda page: page.stem)
def test_tables_on_a_page_are_those_of_the_study(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    tables = [t for found in sorted((PAGES / page.stem).glob("*.json")) for t in read_tables(found)]
    assert tables
    for table in tables:
        assert table.markdown() in text, table.title


@pytest.mark.parametrize("page", STUDIES, ids=lambda page: page.stem)
def test_a_page_says_which_command_made_its_numbers(page: Path) -> None:
    assert f"dualform study {page.stem}" in page.read_text(encoding="utf-8")


def test_an_interval_holds_the_mean_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(4000, 5, generator=generator, dtype=torch.float64)
    found = [estimate(row.tolist()) for row in draws]
    held = sum(abs(one.mean) <= one.interval for one in found) / len(found)
    assert held == pytest.approx(0.95, abs=0.012)


def test_one_value_has_no_interval() -> None:
    assert math.isnan(estimate([2.0]).interval)
    assert math.isnan(estimate([]).mean)
    assert str(estimate([0.25, 0.25])) == "0.25 ± 0"


def test_a_report_is_written_whole(tmp_path: Path) -> None:
    rows = (("one", Estimate(1.0, math.nan, 1)), ("two", None), ("three", math.inf))
    table = NumberTable("sums", ("which", "sum"), rows, "a note")
    report = Report("x", "Why?", {"seeds": 3}, ("So.",), (table,), (Picture("p.png", "dots"),))
    paths = report.save(tmp_path / "out")
    assert [path.name for path in paths] == ["study.json", "study.md", "p.png"]
    found = json.loads(paths[0].read_text())
    assert found["tables"][0]["rows"][0][1] == {"mean": 1.0, "interval": None, "count": 1}
    assert found["tables"][0]["rows"][2] == ["three", None]
    page = paths[1].read_text()
    assert table.markdown() in page
    assert "![dots](p.png)" in page


def test_an_interrupted_study_goes_on(tmp_path: Path) -> None:
    made: list[str] = []

    def part(name: str) -> dict[str, float]:
        if name == "c" and len(made) < 3:
            made.append("failed")
            raise KeyboardInterrupt
        made.append(name)
        return {"value": float(len(made))}

    parts = {name: lambda name=name: part(name) for name in "abc"}
    with pytest.raises(KeyboardInterrupt):
        run_parts(tmp_path, {"steps": 1}, parts)
    found = run_parts(tmp_path, {"steps": 1}, parts)
    assert made == ["a", "b", "failed", "c"]
    assert [one["value"] for one in found.values()] == [1.0, 2.0, 4.0]


def test_parts_in_processes_are_those_of_one(tmp_path: Path) -> None:
    parts = {name: partial(json.loads, f'{{"value": {at}}}') for at, name in enumerate("abc")}
    whole = run_parts(tmp_path / "one", {}, parts)
    with pytest.raises(EvaluationError, match=r"ended before its time .*run the study again"):
        run_parts(tmp_path / "two", {}, {**parts, "killed": partial(os._exit, 3)}, workers=1)
    with pytest.raises(ZeroDivisionError) as failure:
        run_parts(tmp_path / "two", {}, {**parts, "wrong": partial(divmod, 1, 0)}, workers=2)
    assert failure.value.__notes__ == ["This was 'wrong', a part of the study."]
    unmade = {name: partial(os._exit, 3) for name in parts}
    assert run_parts(tmp_path / "two", {}, unmade) == whole  # all of them were kept
    assert list(whole) == list("abc")


def test_a_part_whose_recording_ends_is_no_result(tmp_path: Path) -> None:
    part = partial(warnings.warn, "recording has ended: the disk is full", RecordingEndedWarning)
    with pytest.raises(EvaluationError, match=r"'a', a part of the study, was not .*disk is full"):
        run_parts(tmp_path, {}, {"a": part})
    assert not (tmp_path / "parts" / "a.json").exists()


def test_parts_with_other_settings_are_refused(tmp_path: Path) -> None:
    run_parts(tmp_path, {"steps": 10, "widths": (4, 2)}, {})
    run_parts(tmp_path, {"steps": 10, "widths": (4, 2)}, {})
    with pytest.raises(EvaluationError, match=r"steps=20 \(there 10\); use another folder"):
        run_parts(tmp_path, {"steps": 20, "widths": (4, 2)}, {})


def test_two_processes_do_not_share_a_study(tmp_path: Path) -> None:
    run_parts(tmp_path, {}, {})
    with (
        FileLock(tmp_path / "parts" / "lock", timeout=0),
        pytest.raises(EvaluationError, match="another process is at work"),
    ):
        run_parts(tmp_path, {}, {})


def write_idx(folder: Path, count: int) -> None:
    folder.mkdir()
    for part in ("train", "t10k"):
        pixels = bytes(range(4)) * count
        images = b"\0\0\x08\x03" + struct.pack(">3I", count, 2, 2) + pixels
        labels = b"\0\0\x08\x01" + struct.pack(">I", count) + bytes(i % 10 for i in range(count))
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(labels)


def test_idx_files_are_read(tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist", 12)
    train_part, test = load_images(tmp_path, "mnist")
    assert train_part.pixels.shape == (12, 2, 2)
    assert train_part.pixels[5].flatten().tolist() == [0, 1, 2, 3]
    assert test.y.tolist() == [*range(10), 0, 1]
    assert test.classes == DIGITS


def test_cifar_is_read_in_its_binary_version(tmp_path: Path) -> None:
    (tmp_path / "cifar10").mkdir()
    red = bytes([3]) + b"\xff" * 1024 + b"\0" * 2048
    for name in [*(f"data_batch_{at}.bin" for at in range(1, 6)), "test_batch.bin"]:
        (tmp_path / "cifar10" / name).write_bytes(red * 2)
    train_part, test = load_images(tmp_path, "cifar10")
    assert len(train_part) == 10
    assert test[1][0][0, 0].tolist() == [255, 0, 0]
    assert test.classes[test[1][1]] == "cat"
    (tmp_path / "cifar10" / "test_batch.bin").write_bytes(red[:-1])
    with pytest.raises(
        ReadingError, match=f"3,072 bytes, which are no records of {CIFAR_RECORD:,}"
    ):
        load_images(tmp_path, "cifar10")


def test_data_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReadingError, match="images 'svhn' are not known; there are 'mnist'"):
        load_images(tmp_path, "svhn")
    with pytest.raises(ReadingError, match="has no folder 'mnist' with the four idx files"):
        load_images(tmp_path, "mnist")
    write_idx(tmp_path / "mnist", 3)
    cut = tmp_path / "mnist" / "t10k-labels-idx1-ubyte"
    cut.write_bytes(cut.read_bytes()[:-1])
    with pytest.raises(ReadingError, match="no idx file of bytes, or it was cut off"):
        load_images(tmp_path, "mnist")


def test_the_recorded_training_is_the_plain_one(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (60, 4, 4), generator=generator).byte()
    images = Images(pixels, torch.arange(60) % 10, DIGITS)
    setting = Training(widths=(16, 8, 10), steps=12, batch=16, rate=0.1)

    def batches() -> Iterator[Tensor]:
        return shuffled(torch.arange(60), 16, torch.Generator().manual_seed(1))

    plain = train(images, batches(), setting, seed=0)
    recorded = train(images, batches(), setting, seed=0, path=tmp_path / "run")
    for name, value in recorded.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name
    run = dualform.open(tmp_path / "run")
    assert run.steps == 12
    assert run.audit().remainder < 1e-5
    assert run.samples.labels[13] == 3
    preview = run.samples.preview(13)
    assert preview is not None
    assert torch.equal(torch.as_tensor(preview.data), pixels[13])


def test_the_index_names_every_study() -> None:
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    assert [page.stem for page in STUDIES if f"]({page.name})" not in index] == []
    assert {page.stem for page in STUDIES} == set(study.commands)
