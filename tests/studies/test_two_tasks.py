"""The study of two tasks on tiny pictures that the test writes itself, against plain loops."""

from __future__ import annotations

import json
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
from torch import nn
from torch.nn.functional import cross_entropy

import dualform
from dualform.cli import cli
from dualform.errors import EvaluationError, ReadingError
from dualform.studies.class_parts import by_group
from dualform.studies.classifiers import Training, train
from dualform.studies.report import Report, read_tables
from dualform.studies.two_tasks import (
    SETTINGS,
    TwoTasksSetting,
    paper_model,
    run_study,
    small_model,
)
from dualform.studies.two_tasks.attention import NETWORK, ImageQueries, attention
from dualform.studies.two_tasks.change import change_between
from dualform.studies.two_tasks.measure import TwoTasksMeasurement
from dualform.studies.two_tasks.overwriting import changes_between
from dualform.studies.two_tasks.tasks import GROUPS, Tasks, load_tasks

TINY = TwoTasksSetting(
    Training(widths=(16, 12, 10), batch=20, rate=0.1),
    images=80,
    switch=12,
    ends=(20, 30),
    together=20,
    queries=2,
    explained=1,
    explained_margins=6,
    seeds=2,
)
LOOK = "dualform.studies.two_tasks:small_model"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_images(folder / "mnist", 0, 80)
    write_images(folder / "fashion-mnist", 1, 90)
    return folder


@pytest.fixture(scope="module")
def tasks(data: Path) -> Tasks:
    return load_tasks(data, TINY)[0]


def study(data: Path, out: Path, setting: TwoTasksSetting = TINY, seeds: int = 2) -> Report:
    return run_study(data, setting, seeds, "cpu", out, LOOK)


def trained(tasks: Tasks, training: Training, path: Path) -> tuple[dualform.Run, nn.Module]:
    batches = tasks.in_sequence(TINY.switch, training.batch, seed=0)
    model = train(tasks.images, batches, training, 0, path)
    return dualform.open(path), model.eval()


def test_changes_are_those_of_a_plain_loop(tasks: Tasks, tmp_path: Path) -> None:
    training = Training(widths=(16, 10), batch=20, rate=0.5, steps=30)
    run, model = trained(tasks, training, tmp_path / "run")
    every = with_ones(tasks.images.inputs())
    batches = islice(tasks.in_sequence(TINY.switch, training.batch, seed=0), training.steps)
    parts = plain_parts(
        every, tasks.images.y, tasks.groups, first_weights(run), batches, training, {12, 30}
    )
    x, y, wide = tasks.images.inputs()[:5], tasks.images.y[:5], every[:5]
    moved = (parts[30] - parts[12])[:, y]  # (classes, queries, inputs)
    expected = (moved * wide).sum(2)
    groups = dict(enumerate(tasks.groups.tolist()))
    found = changes_between(run.at(12), run, model, x, y[:, None], groups)
    np.testing.assert_allclose(found.classes, expected.numpy(), atol=1e-4)
    assert abs(found.classes[:10]).max() > 1e-2  # momentum carries digits over
    np.testing.assert_allclose(found.classes.sum(0), found.after - found.before, atol=1e-5)
    np.testing.assert_allclose(found.steps.sum(), (found.after - found.before).mean(), atol=1e-5)
    output = model(x).gather(1, y[:, None])[:, 0]
    np.testing.assert_allclose(found.after, output.detach().numpy(), atol=1e-5)


def test_two_changes_add_up_to_the_explanation(tasks: Tasks, tmp_path: Path) -> None:
    """Without a hidden layer, the way between two weights does not matter."""
    training = Training(widths=(16, 10), batch=20, rate=0.5, steps=30)
    run, model = trained(tasks, training, tmp_path / "run")
    x, groups = tasks.images.inputs()[:3], dict(enumerate(tasks.groups.tolist()))
    grouping = by_group(run, groups)
    stages = [
        sum(change_between(early, late, model, x, 4).sums(grouping).values())
        for early, late in ((run.at(0), run.at(12)), (run.at(12), run))
    ]
    whole = run.explain(model, x, 4).by(groups).values
    np.testing.assert_allclose((stages[0] + stages[1])[:20], whole, atol=1e-5)


def test_attention_is_that_of_plain_sums(tasks: Tasks, tmp_path: Path) -> None:
    training = replace(TINY.training, steps=20)
    run, model = trained(tasks, training, tmp_path / "run")
    chosen = torch.tensor([*range(10), *range(80, 90)])
    queries = ImageQueries(tasks.images.inputs()[chosen], tasks.groups[chosen])
    found = attention(run, model, queries, queries, dict(enumerate(tasks.groups.tolist())))

    seen = torch.cat([*islice(tasks.in_sequence(TINY.switch, 20, seed=0), 20)])
    x = tasks.images.inputs().double()
    similar = (x[seen] @ queries.x.double().T).abs()
    sums = torch.zeros(20, 20, dtype=torch.float64).index_add_(0, tasks.groups[seen], similar)
    np.testing.assert_allclose(found["0"]["keys"], (sums / sums.sum(0)), atol=1e-6)

    outputs = model(queries.x).gather(1, queries.outputs[:, None])[:, 0].detach()
    for layer in ("2", NETWORK):
        one = found[layer]
        parts = np.array(one["initial"]) + np.sum(one["signed"], 0)
        near = 1e-5 if layer == "2" else 1e-2
        np.testing.assert_allclose(parts, outputs, atol=near)
        np.testing.assert_allclose(one["total"], outputs, atol=1e-5)
    for one in found.values():
        np.testing.assert_allclose(np.sum(one["sizes"], 0), 1.0)
        assert (np.abs(np.array(one["signed"])) > 0).any()


def test_a_layer_is_asked_along_the_gradient(tasks: Tasks, tmp_path: Path) -> None:
    """In units of the output: what it gives, and the bias of what follows, are the output."""
    run, model = trained(tasks, replace(TINY.training, steps=20), tmp_path / "run")
    chosen = torch.tensor([*range(10), *range(80, 90)])
    queries = ImageQueries(tasks.images.inputs()[chosen], tasks.groups[chosen])
    found = attention(run, model, queries, queries, dict(enumerate(tasks.groups.tolist())))
    last = model.get_submodule("2")
    assert isinstance(last, nn.Linear)
    outputs = (model(queries.x) - last.bias).gather(1, queries.outputs[:, None])[:, 0]
    np.testing.assert_allclose(found["0"]["total"], outputs.detach(), atol=1e-5)


def test_a_shorter_sequence_is_the_beginning_of_a_longer_one(tasks: Tasks, tmp_path: Path) -> None:
    short, _ = trained(tasks, replace(TINY.training, steps=20), tmp_path / "short")
    long, _ = trained(tasks, replace(TINY.training, steps=30), tmp_path / "long")
    read = long.at(20).state_dict()
    for name, value in short.state_dict().items():
        torch.testing.assert_close(read[name], value, rtol=0, atol=1e-6)


def test_tasks_are_one_data_set(tasks: Tasks) -> None:
    assert len(tasks) == len(tasks.images) == 160
    assert tasks.groups[[3, 83]].tolist() == [3, 13]
    assert tasks.images.y[[3, 83]].tolist() == [3, 3]
    sequence = [*islice(tasks.in_sequence(5, 30, seed=0), 9)]
    assert [len(ids) for ids in sequence] == [30] * 9  # short batches are left out
    assert all((ids < 80).all() for ids in sequence[:5])
    assert all((ids >= 80).all() for ids in sequence[5:])
    mixed = torch.cat([*islice(tasks.batches(40, seed=0), 4)])
    assert sorted(mixed.tolist()) == list(range(160))


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
    changes = {row[0]: row[1:] for row in found.tables[5].rows}
    for before, digits, garments, rest, after in zip(
        *(changes[name] for name in ("output before", "all digits", "all garments")),
        changes["remainder"],
        changes["output after"],
        strict=True,
    ):
        parts = before.mean + digits.mean + garments.mean + rest.mean
        assert parts == pytest.approx(after.mean, abs=1e-9)
        assert abs(rest.mean) < 1e-2 * abs(after.mean - before.mean) + 1e-3
    assert all(garments == "yes" for _, _, garments, _ in found.tables[-1].rows)
    assert all(sentence.endswith(".") for sentence in found.findings)


def test_the_first_sequence_stays_for_the_explorer(
    tasks: Tasks, report: tuple[Report, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, out = report
    assert not (out / "scratch").exists()
    assert found.look == (
        f"dualform view {out / 'run'} --model {LOOK} --input {out / 'queries.npz'}",
    )
    samples = dualform.open(out / "run").samples
    assert samples.columns["task"][84] == "garments"
    assert samples.columns["output"][84] == "4"
    asked = np.load(out / "queries.npz")
    assert asked["x"].shape[1] == 16
    assert len(asked["x"]) == len(asked["labels"]) == len(asked["titles"])
    assert {"digit 0", "bag"} <= set(asked["labels"].tolist())
    assert any("taken for output" in title for title in asked["titles"].tolist())
    monkeypatch.setitem(SETTINGS, "small", TINY)
    explorer = opened(found.look[0], monkeypatch)
    labels = [GROUPS[group] for group in tasks.groups.tolist()]
    assert (labels[3], labels[84]) == ("digit 3", "coat")
    check_pictures(explorer, tasks.images.pixels.numpy(), labels, asked["x"])
    answer = explorer.view("answer", {"query": "0", "by": "task"})
    assert {group["label"] for group in answer["groups"]} == {"digits", "garments"}


@pytest.mark.usefixtures("undrawn")
def test_an_interrupted_study_goes_on(
    data: Path, tmp_path: Path, report: tuple[Report, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = interrupted_at(1, TwoTasksMeasurement.in_sequence)
    monkeypatch.setattr(TwoTasksMeasurement, "in_sequence", fails)
    with pytest.raises(KeyboardInterrupt):
        study(data, tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(TwoTasksMeasurement, "together", fails)  # that of seed 1 is kept
    again = study(data, tmp_path)
    assert [table.markdown() for table in again.tables] == [
        table.markdown() for table in report[0].tables
    ]
    assert again.findings == report[0].findings


def test_what_is_kept_holds_for_its_data_only(report: tuple[Report, Path], tmp_path: Path) -> None:
    for name, seed, count in (("mnist", 5, 80), ("fashion-mnist", 1, 90)):
        write_images(tmp_path / "other" / name, seed, count)
    with pytest.raises(EvaluationError, match=r"with other settings: data='[0-9a-f]{8}' \(there '"):
        study(tmp_path / "other", report[1])


@pytest.mark.usefixtures("undrawn")
def test_where_nothing_is_learned_nothing_is_forgotten(data: Path, tmp_path: Path) -> None:
    still = replace(TINY, training=replace(TINY.training, rate=1e-7), ends=(14,), together=4)
    found = study(data, tmp_path, still, seeds=1)
    assert "At step 14 no digit that was right at the switch was forgotten." in found.findings
    assert found.tables[6].rows[0][1] is None
    assert "examples.png" not in {picture.file for picture in found.pictures}


@pytest.mark.usefixtures("undrawn")
def test_from_the_shell(
    data: Path, report: tuple[Report, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETTINGS, "small", TINY)  # whose parts are kept there
    given = ["study", "two-tasks", "--data", str(data), "--out", str(report[1])]
    result = CliRunner().invoke(cli, [*given, "--json"], catch_exceptions=False)
    found = json.loads(result.stdout)
    assert found["name"] == "two-tasks"
    assert found["settings"]["switch"] == 12
    assert json.loads((report[1] / "study.json").read_text()) == found
    assert "margins of test digits" in CliRunner().invoke(cli, given).stdout


def test_too_few_images_are_refused(data: Path) -> None:
    with pytest.raises(
        ReadingError,
        match="there are 80 training images of digits, fewer than the 128 of a batch; is --data",
    ):
        load_tasks(data, SETTINGS["small"])


def test_tests_have_every_class(data: Path, tmp_path: Path) -> None:
    (tmp_path / "mnist").symlink_to(data / "mnist")
    write_images(tmp_path / "fashion-mnist", 1, 9)
    with pytest.raises(ReadingError, match="no test image of ankle boot; is --data right"):
        load_tasks(tmp_path, replace(TINY, training=replace(TINY.training, batch=5)))


def test_models_are_those_of_the_settings() -> None:
    assert cross_entropy(small_model()(torch.zeros(2, 784)), torch.tensor([1, 2])) > 0
    assert paper_model().get_parameter("2.weight").shape == (800, 800)
