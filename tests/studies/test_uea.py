"""The study of time series on tiny files that the test writes itself."""

from __future__ import annotations

import gzip
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from dualform.cli import cli
from dualform.errors import EvaluationError, ReadingError
from dualform.studies.data import data_folder
from dualform.studies.encoders import LAYERS, Encoder, EncoderShape, count_flops, kept_bytes
from dualform.studies.estimate import estimate
from dualform.studies.report import read_tables
from dualform.studies.uea import SETTINGS, UeaSetting, run_study, training
from dualform.studies.uea.series import Series, load
from dualform.studies.uea.training import (
    SeriesClassifier,
    train_held_out,
    train_on_all,
)

SHAPE = EncoderShape(width=16, heads=8, hidden=16, layers=2)
SMALL = UeaSetting(SHAPE, epochs=12, rate=5e-3, datasets=("Tiny",), seeds=2, batch=8)
QUICK = replace(SMALL, epochs=2, layers=("softmax", "centered"))


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


@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_learns(data: Path, layer: str) -> None:
    found = train_on_all(*load(data, "Tiny"), layer, 0, SMALL)
    assert found.last >= 0.9
    assert 0 < found.distance < 2


def test_the_same_seed_is_the_same_training(data: Path) -> None:
    parts = load(data, "Tiny")
    pair = [train_on_all(*parts, "centered", 0, QUICK) for _ in range(2)]
    assert pair[0] == pair[1]
    assert pair[0].distance != train_on_all(*parts, "softmax", 0, QUICK).distance
    assert pair[0].distance != train_on_all(*parts, "centered", 1, QUICK).distance


def test_test_data_take_no_part_in_choosing(data: Path) -> None:
    train, test = load(data, "Tiny")
    other = Series(torch.randn_like(test.x), test.real, test.y, test.classes)
    pair = [train_held_out(train, part, "softmax", 1, SMALL) for part in (test, other)]
    assert pair[0].epoch == pair[1].epoch
    assert pair[0].validation == pair[1].validation
    assert pair[0].best != pair[1].best


def test_both_epochs_are_read_as_plain_trainings_would_give_them(data: Path) -> None:
    train, test = load(data, "Tiny")
    setting = replace(SMALL, epochs=6)
    found = train_held_out(train, test, "softmax", 1, setting)
    chosen, _ = training.split(train.y, 1)
    stopped = replace(setting, epochs=found.epoch)
    assert train_on_all(train[chosen], test, "softmax", 1, setting).last == found.last
    assert train_on_all(train[chosen], test, "softmax", 1, stopped).last == found.best


def test_padding_is_not_seen(data: Path) -> None:
    train, _ = load(data, "Tiny")
    for layer in LAYERS:
        torch.manual_seed(0)
        model = SeriesClassifier(train, layer, SHAPE).eval()
        other = train.x.masked_fill(~train.real[..., None], 5.0)
        torch.testing.assert_close(model(other, train.real), model(train.x, train.real))


def test_shorter_heads_count_fewer_operations(data: Path) -> None:
    one = load(data, "Tiny")[0][torch.tensor([0])]
    models = {layer: SeriesClassifier(one, layer, SHAPE).eval() for layer in LAYERS}
    flops = {
        layer: count_flops(lambda model=model: model(one.x, one.real))
        for layer, model in models.items()
    }
    assert flops["scaled_heads"] < flops["softmax"] == flops["batch_norm"] == flops["centered"]
    # two layers, 8 heads, 6 of 9 queries real but all computed: 2 · 2 · 9 · 9 · 16 less by blocks
    keys = sum(math.ceil(9 / s) for s in (1, 1, 2, 2, 4, 4, 8, 8))
    fewer = 2 * 2 * 2 * 9 * 2 * (8 * 9 - keys)
    assert flops["softmax"] - flops["scaled_heads"] == fewer


def test_kept_bytes_grow_with_the_batch_and_leave_parameters_out() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    small, large = torch.ones(4, 3), torch.ones(8, 3)
    assert kept_bytes(model, lambda: model(small)) == 4 * (4 * 3 + 4 * 5)
    assert kept_bytes(model, lambda: model(large)) == 4 * (8 * 3 + 8 * 5)


@pytest.mark.parametrize("layer", ["softmax", "centered", "scaled_heads"])
def test_head_distance_is_that_of_a_plain_loop(layer: str) -> None:
    torch.manual_seed(0)
    encoder = Encoder(replace(SHAPE, layers=1), layer).double().eval()
    x, real = torch.randn(3, 9, 16).double(), torch.ones(3, 9).bool()
    real[1, 6:] = False
    module = encoder.layers[0].self_attn
    outputs = module.layer(*module.heads(x, x, x), real[:, None, None]).detach()  # (3, 8, 9, 2)
    apart, sizes = [], []
    for sample, step in real.nonzero().tolist():
        heads = outputs[sample, :, step]
        apart += [float((a - b).norm()) for a, b in itertools.combinations(heads, 2)]
        sizes += [float(head.norm()) for head in heads]
    expected = (sum(apart) / len(apart)) / (sum(sizes) / len(sizes))
    assert encoder.head_distance(x, real) == pytest.approx(expected)


def test_split_is_by_class_and_by_seed() -> None:
    y = torch.arange(100) % 5
    train, held = training.split(y, 0)
    assert y[held].bincount().tolist() == [4] * 5
    assert not set(train.tolist()) & set(held.tolist())
    assert training.split(y, 1)[1].tolist() != held.tolist()


def test_intervals() -> None:
    assert estimate([0.5] * 5).interval == 0
    assert math.isnan(estimate([0.5]).interval)
    assert estimate([0.0, 1.0] * 50).interval == pytest.approx(0.0999, abs=2e-3)


def test_the_study_reports_three_protocols(data: Path, tmp_path: Path) -> None:
    report = run_study(data, replace(SMALL, epochs=1), 2, "cpu", tmp_path)
    report.save(tmp_path)
    accuracy, costs = read_tables(tmp_path / "study.json")
    assert accuracy.columns[1::2] == (
        "four fifths, chosen epoch",
        "four fifths, last epoch",
        "all of TRAIN, last epoch",
    )
    assert [row[0] for row in accuracy.rows] == list(LAYERS)
    first, *others = accuracy.rows
    assert first[2] is first[4] is first[6] is None
    for row in others:
        for at in (1, 3, 5):
            assert row[at + 1].mean == pytest.approx(row[at].mean - first[at].mean, abs=1e-6)
    assert costs.rows[0][3].mean == 1
    assert sum("differences to softmax" in sentence for sentence in report.findings) == 3
    assert all(sentence.endswith(".") for sentence in report.findings)
    assert (tmp_path / report.pictures[0].file).stat().st_size > 5000


def test_an_interrupted_study_goes_on_and_takes_more_seeds(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_study(data, QUICK, 1, "cpu", tmp_path)
    seen = []
    whole = training.train_on_all

    def counted(*given: object) -> training.Whole:
        seen.append(given[3])
        return whole(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(training, "train_on_all", counted)
    run_study(data, QUICK, 2, "cpu", tmp_path)
    assert set(seen) == {1}  # seed 0 is kept
    with pytest.raises(EvaluationError, match=r"other settings: epochs=3 \(there 2\)"):
        run_study(data, replace(QUICK, epochs=3), 1, "cpu", tmp_path)


def test_from_the_shell(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "small", SMALL)
    given = ["study", "uea", "--data", str(data), "--dataset", "Tiny", "--kind", "linear"]
    options = ["--seeds", "1", "--epochs", "1", "--out", str(tmp_path / "out")]
    printed = CliRunner().invoke(cli, [*given, *options], catch_exceptions=False).output
    assert "softmax was not trained" in printed.replace("\n", " ")
    again = CliRunner().invoke(cli, [*given, *options, "--json"], catch_exceptions=False)
    found = json.loads(again.stdout)
    assert found["settings"]["layers"] == "linear"
    assert json.loads((tmp_path / "out" / "study.json").read_text()) == found


def test_errors(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DUALFORM_DATA", raising=False)
    with pytest.raises(ReadingError, match="say where the data are: --data DIR, or DUALFORM_DATA"):
        data_folder(None)
    with pytest.raises(ReadingError, match=r"has neither Other_TRAIN.ts nor Other_TRAIN.ts.gz"):
        load(data, "Other")
    with pytest.raises(
        ReadingError, match="attention layer 'ridge' is not in this study; it has softmax, linear"
    ):
        run_study(data, replace(QUICK, layers=("ridge",)), 1, "cpu", tmp_path)
