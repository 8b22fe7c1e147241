"""The study of digits on tiny pictures that the test writes itself, against plain loops."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tests.studies.explored import check_pictures, opened
from tests.studies.tiny_images import (
    first_weights,
    interrupted_at,
    plain_parts,
    with_ones,
    write_images,
)
from torch import Tensor

import dualform
from dualform.cli import cli
from dualform.errors import EvaluationError, ReadingError
from dualform.studies.class_parts import class_parts
from dualform.studies.classifiers import Training, train, whole_batches
from dualform.studies.data import CIFAR_RECORD, Images, load_images
from dualform.studies.mnist import (
    SETTINGS,
    MnistSetting,
    paper_cifar10_model,
    paper_model,
    run_study,
    small_cifar10_model,
    small_model,
)
from dualform.studies.mnist.measure import MnistMeasurement
from dualform.studies.mnist.setting import load_parts
from dualform.studies.mnist.votes import AskedImages, places, scores_of, votes
from dualform.studies.report import Report, read_tables

TINY = MnistSetting(
    Training(widths=(16, 12, 10), steps=30, batch=20, rate=0.1),
    images=80,
    asked=12,
    compared=4,
    influenced=2,
    influence_seeds=1,
    seeds=2,
)
LOOK = "dualform.studies.mnist:small_model"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_images(folder / "mnist", 0, 90, noise=250)
    return folder


@pytest.fixture(scope="module")
def parts(data: Path) -> tuple[Images, Images]:
    return load_parts(data, TINY)


def batches(images: Images, setting: MnistSetting = TINY) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return whole_batches(torch.arange(len(images)), setting.training.batch, generator)


@pytest.fixture(scope="module")
def trained(
    parts: tuple[Images, Images], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dualform.Run, torch.nn.Module, AskedImages]:
    images, tests = parts
    path = tmp_path_factory.mktemp("trained") / "run"
    model = train(images, batches(images), TINY.training, 0, path).eval()
    with torch.no_grad():
        given = model(tests.inputs()).argmax(1)
    every = AskedImages(torch.arange(len(tests)), tests.inputs(), tests.y, given)
    return dualform.open(path), model, every


def test_parts_of_classes_are_those_of_a_plain_loop(
    parts: tuple[Images, Images], tmp_path: Path
) -> None:
    images, _ = parts
    training = Training(widths=(16, 10), batch=20, rate=0.5, steps=30)
    train(images, batches(images), training, 0, tmp_path / "run")
    run = dualform.open(tmp_path / "run")
    x, order = with_ones(images.inputs()), islice(batches(images), 30)
    expected = plain_parts(x, images.y, images.y, first_weights(run), order, training, {12, 30})
    for step in (12, 30):
        found = class_parts(run.at(step), dict(enumerate(images.y.tolist()))).books
        both = torch.cat([found["0.weight"], found["0.bias"][:, :, None]], 2)
        torch.testing.assert_close(both, expected[step], rtol=0, atol=2e-6)
        assert float(both.abs().max()) > 0.1


def test_classes_add_up_to_what_samples_add(
    parts: tuple[Images, Images], trained: tuple[dualform.Run, torch.nn.Module, AskedImages]
) -> None:
    run, model, every = trained
    groups = dict(enumerate(parts[0].y.tolist()))
    sums = class_parts(run, groups)
    asked = every.some(torch.arange(3))
    amounts = sums.by_layer(model, asked.x)
    network = sums.through_network(run, model, asked.x)
    for output in (0, 7):
        layer = run.spotlight(model, asked.x, output)["2"].by(groups).values
        np.testing.assert_allclose(amounts["2"][:, output].T, layer, atol=1e-5)
        whole = run.explain(model, asked.x, output, tolerance=1e-4).by(groups).values
        np.testing.assert_allclose(network[:, output].T, whole, atol=0.02 * np.abs(whole).max())
    before = run.at(0).state_dict()
    first = Training(widths=(16, 12, 10)).make_model()
    first.load_state_dict(before)
    change = (model(asked.x) - first(asked.x)).detach().double()
    np.testing.assert_allclose(network.sum(2), change, atol=5e-3 * float(change.abs().max()))


def test_classes_that_were_not_seen_add_nothing(
    parts: tuple[Images, Images], trained: tuple[dualform.Run, torch.nn.Module, AskedImages]
) -> None:
    """Several in a row, as the garments before they are learned."""
    run, labels = trained[0], parts[0].y
    own = class_parts(run, dict(enumerate(labels.tolist()))).books
    found = class_parts(run, dict(enumerate((labels + 5).tolist()))).books
    for name, sums in found.items():
        assert not sums[:5].any()
        torch.testing.assert_close(sums[5:], own[name])


def test_a_layer_is_asked_along_every_output(
    parts: tuple[Images, Images], trained: tuple[dualform.Run, torch.nn.Module, AskedImages]
) -> None:
    """What the first layer adds moves hidden units, and those that are on move the outputs."""
    run, model, every = trained
    sums = class_parts(run, dict(enumerate(parts[0].y.tolist())))
    asked = every.some(torch.arange(4))
    found = sums.by_layer(model, asked.x)["0"]
    weights = run.state_dict()
    first, last = weights["0.weight"].double(), weights["2.weight"].double()
    for at, x in enumerate(asked.x.double()):
        on = (first @ x + weights["0.bias"]) > 0
        for label in range(10):
            moved = sums.books["0.weight"][label] @ x + sums.books["0.bias"][label]
            expected = last @ (moved * on)
            torch.testing.assert_close(found[at, :, label], expected, rtol=0, atol=1e-5)


def test_after_relu_a_class_speaks_for_its_own_output_only(
    parts: tuple[Images, Images], trained: tuple[dualform.Run, torch.nn.Module, AskedImages]
) -> None:
    """So the vote for the output that was given is right by construction in the last layer."""
    run, model, every = trained
    amounts = class_parts(run, dict(enumerate(parts[0].y.tolist()))).by_layer(model, every.x)
    own = torch.eye(10, dtype=torch.bool)
    assert (amounts["2"][:, own] > 0).all()
    assert (amounts["2"][:, ~own] < 0).all()
    given = votes(scores_of(amounts["2"], every)["given"], every)
    assert given["right"] == given["wrong, the output"] == 1.0


def test_keys_only_are_plain_sums(
    parts: tuple[Images, Images], data: Path, tmp_path: Path, report: tuple[Report, Path]
) -> None:
    images, tests = parts
    kept = json.loads((report[1] / "parts" / "seed-0.json").read_text())
    measure = MnistMeasurement(TINY, images, tests, "cpu", tmp_path)
    model = small_of(report[1])
    with torch.no_grad():
        asked = measure._asked(model(tests.inputs()), 0)
    seen = torch.cat([*islice(batches(images), 30)])
    assert torch.equal(tests.y[asked.images], asked.targets)
    found = {one["measure"]: one["votes"] for one in kept["said"] if one["where"] == "0"}
    plain = [Images(part.pixels, part.y, ()) for part in parts]
    for measure, (x, queries) in {"keys": parts, "keys unscaled": plain}.items():
        similar = x.inputs()[seen].double() @ queries.inputs()[asked.images].double().T
        sums = torch.zeros(10, len(asked.x), dtype=torch.float64)
        for row, label in zip(similar.abs(), images.y[seen].tolist(), strict=True):
            sums[label] += row
        expected = plain_votes(sums, asked)
        assert found[measure] == pytest.approx(expected)
        if measure == "keys":
            visits = torch.bincount(images.y[seen], minlength=10)[:, None]
            assert found["keys mean"] == pytest.approx(plain_votes(sums / visits, asked))


def plain_votes(sums: Tensor, asked: AskedImages) -> dict[str, float]:
    """How often the largest sum (classes, queries) is that of the class, and of the output."""
    hits: dict[str, list[bool]] = {"right": [], "wrong, its class": [], "wrong, the output": []}
    for own, target, given in zip(
        sums.T.tolist(), asked.targets.tolist(), asked.given.tolist(), strict=True
    ):
        first = own.index(max(own))
        if target == given:
            hits["right"].append(first == target)
        else:
            hits["wrong, its class"].append(first == target)
            hits["wrong, the output"].append(first == given)
    return {name: sum(some) / len(some) for name, some in hits.items()}


def small_of(out: Path) -> torch.nn.Module:
    model = TINY.training.make_model()
    model.load_state_dict(dualform.open(out / "run").state_dict())
    return model.eval()


def test_places_are_counted_from_one() -> None:
    scores = torch.tensor([[9.0, 8, 7, 6, 5, 4, 10, 3, 2, 1], [1.0, 2, 3, 4, 5, 6, 7, 8, 9, 10]])
    y = torch.tensor([6, 6])
    asked = AskedImages(y, y, y, y)
    assert places(scores, asked) == [6, 6, 6, 6, 6, 6, 2.5, 5.5, 5.5, 5.5]
    assert places(scores, AskedImages(y, y, y, torch.tensor([1, 2]))) is None


def test_images_are_standardized_as_those_for_training(data: Path) -> None:
    images, tests = load_parts(data, TINY)
    x = images.inputs()
    assert float(x.mean()) == pytest.approx(0, abs=1e-5)
    assert float(x.std(correction=0)) == pytest.approx(1, abs=1e-5)
    assert tests.center == images.center
    pixels = torch.tensor([[[[0, 10, 50]], [[100, 20, 60]]]]).byte()
    colors = Images(pixels, torch.tensor([3]), ())
    assert colors.standardized(colors).inputs().tolist() == [[-1, -1, -1, 1, 1, 1]]


def study(data: Path, out: Path, setting: MnistSetting = TINY, seeds: int = 2) -> Report:
    return run_study(data, setting, seeds, "cpu", out, LOOK)


@pytest.fixture(scope="module")
def report(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    out = tmp_path_factory.mktemp("study")
    found = study(data, out)
    found.save(out)
    return found, out


def test_the_study_answers_its_questions(report: tuple[Report, Path]) -> None:
    found, out = report
    assert [table.title for table in read_tables(out / "study.json")] == [
        table.title for table in found.tables
    ]
    for picture in found.pictures:
        assert (out / picture.file).stat().st_size > 5000, picture.file
    assert {"votes.png", "strongest-0.png", "sorted.png", "sums.png"} <= {
        picture.file for picture in found.pictures
    }
    assert all(sentence.endswith(".") for sentence in found.findings)
    rows = {row[0]: row[1:] for row in found.tables[1].rows}
    assert rows["exact: a class for the output given"][1].mean == 100
    assert rows["influence: a class for its own output"][0] is None
    assert all(kept == "yes" for _, _, kept, _ in found.tables[-1].rows)
    missed = found.tables[0].rows[-1][1]
    assert isinstance(missed, float)
    assert missed < 1e-2


def test_the_first_run_stays_for_the_explorer(
    parts: tuple[Images, Images], report: tuple[Report, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, out = report
    assert not (out / "scratch").exists()
    assert found.look == (
        f"dualform view {out / 'run'} --model {LOOK} --input {out / 'queries.npz'}",
    )
    asked = np.load(out / "queries.npz")
    assert asked["x"].shape[1] == 16
    assert len(asked["x"]) == len(asked["labels"]) == len(asked["titles"])
    assert any("taken for" in title for title in asked["titles"].tolist())
    monkeypatch.setitem(SETTINGS, "small", TINY)
    explorer, (images, _) = opened(found.look[0], monkeypatch), parts
    labels = [str(label) for label in images.y.tolist()]
    check_pictures(explorer, images.pixels.numpy(), labels, asked["x"])
    for card in explorer.view("queries", {})["queries"]:
        assert card["right"] == ("taken for" not in card["title"])
    wrong = explorer.view("queries", {"wrong": "1"})["queries"]
    assert 0 < len(wrong) < len(asked["x"])


@pytest.mark.usefixtures("undrawn")
def test_an_interrupted_study_goes_on(
    data: Path, tmp_path: Path, report: tuple[Report, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = MnistMeasurement.seed
    monkeypatch.setattr(MnistMeasurement, "seed", interrupted_at(1, whole))
    with pytest.raises(KeyboardInterrupt):
        study(data, tmp_path)
    monkeypatch.setattr(MnistMeasurement, "seed", lambda self, seed: whole(self, 1))
    again = study(data, tmp_path)  # the first seed is kept
    assert [table.markdown() for table in again.tables] == [
        table.markdown() for table in report[0].tables
    ]
    assert again.findings == report[0].findings
    with pytest.raises(EvaluationError, match=r"asked=3 \(there 12\); use another folder"):
        study(data, tmp_path, replace(TINY, asked=3))


@pytest.mark.usefixtures("undrawn")
def test_a_network_that_is_never_wrong(data: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "easy" / "mnist", 3, 90, noise=2)
    steps = replace(TINY.training, steps=300)
    found = study(tmp_path / "easy", tmp_path / "out", replace(TINY, training=steps), seeds=1)
    assert found.tables[2].rows[0][1] is None
    assert not any("Of wrong images" in sentence for sentence in found.findings)
    assert {picture.file for picture in found.pictures} == {
        "votes.png",
        "strongest-0.png",
        "sorted.png",
        "sums.png",
    }


def write_cifar(folder: Path) -> None:
    """The binary version, one color a class, and noise."""
    generator = torch.Generator().manual_seed(0)
    folder.mkdir(parents=True)
    for name in [*(f"data_batch_{at}.bin" for at in range(1, 6)), "test_batch.bin"]:
        y = torch.arange(20) % 10
        pixels = torch.randint(0, 200, (20, CIFAR_RECORD - 1), generator=generator)
        pixels[torch.arange(20), 100 * y] = 255
        records = torch.cat([y[:, None], pixels], 1).byte()
        (folder / name).write_bytes(bytes(records.flatten()))


@pytest.mark.usefixtures("undrawn")
def test_from_the_shell(
    data: Path, report: tuple[Report, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETTINGS, "small", TINY)  # whose parts are kept there
    given = ["study", "mnist", "--data", str(data), "--out", str(report[1])]
    result = CliRunner().invoke(cli, [*given, "--json"], catch_exceptions=False)
    found = json.loads(result.stdout)
    assert found["name"] == "mnist"
    assert found["settings"]["widths"] == [16, 12, 10]
    assert json.loads((report[1] / "study.json").read_text()) == found


@pytest.mark.usefixtures("undrawn")
def test_cifar_from_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path / "cifar10")
    brief = replace(TINY, training=replace(TINY.training, steps=3), seeds=1)
    monkeypatch.setitem(SETTINGS, "small", brief)
    given = ["study", "mnist", "--data", str(tmp_path), "--out", str(tmp_path / "out")]
    options = ["--dataset", "cifar10"]
    result = CliRunner().invoke(cli, [*given, *options], catch_exceptions=False)
    assert "do the books balance?" in result.stdout
    found = json.loads((tmp_path / "out" / "study.json").read_text())
    assert found["settings"]["dataset"] == "cifar10"
    assert found["settings"]["widths"] == [3072, 12, 10]
    assert "--model dualform.studies.mnist:small_cifar10_model" in found["look"][0]
    assert small_cifar10_model().get_parameter("0.weight").shape == (12, 3072)
    samples = dualform.open(tmp_path / "out" / "run").samples
    assert samples.labels[4] == "deer"
    preview = samples.preview(4)
    assert preview is not None
    assert torch.as_tensor(preview.data).shape == (32, 32, 3)


@pytest.mark.parametrize("place", ["cifar10/cifar-10-batches-bin", "cifar-10-batches-bin"])
def test_cifar_is_found_as_its_archive_unpacks(place: str, tmp_path: Path) -> None:
    write_cifar(tmp_path / place)
    batch = tmp_path / place / "data_batch_2.bin"
    batch.with_suffix(".bin.gz").write_bytes(gzip.compress(batch.read_bytes()))
    batch.unlink()
    train, test = load_images(tmp_path, "cifar10")
    assert (len(train), len(test)) == (100, 20)
    label, *pixels = (tmp_path / place / "data_batch_3.bin").read_bytes()[:CIFAR_RECORD]
    assert train.y[40] == label
    assert train.pixels[40, 0, 1].tolist() == [pixels[1], pixels[1025], pixels[2049]]
    batch.write_bytes(b"\0" * (CIFAR_RECORD + 1))
    with pytest.raises(ReadingError, match=r"data_batch_2\.bin' has 3,074 bytes, which are no rec"):
        load_images(tmp_path, "cifar10")


def test_data_that_is_not_there_is_named(data: Path, tmp_path: Path) -> None:
    for options, said in (
        (["--dataset", "cifar10"], "has neither data_batch_1.bin nor data_batch_1.bin.gz"),
        ([], "has no folder 'mnist' with the four idx files"),
    ):
        given = ["study", "mnist", "--data", str(tmp_path), "--out", str(tmp_path / "out")]
        result = CliRunner().invoke(cli, [*given, *options])
        assert isinstance(result.exception, ReadingError)
        assert said in str(result.exception)
    with pytest.raises(
        ReadingError,
        match="there are 90 training images of mnist, fewer than the 128 of a batch; is --data",
    ):
        load_parts(data, SETTINGS["small"])
    write_images(tmp_path / "few" / "mnist", 1, 9)
    with pytest.raises(ReadingError, match="no training image of 9; is --data right"):
        load_parts(tmp_path / "few", replace(TINY, training=replace(TINY.training, batch=5)))


def test_models_are_those_of_the_settings() -> None:
    assert small_model()(torch.zeros(2, 784)).shape == (2, 10)
    assert paper_model().get_parameter("2.weight").shape == (800, 800)
    assert paper_cifar10_model().get_parameter("0.weight").shape == (800, 3072)
