"""The study of controls on tiny pictures that the test writes itself, against plain loops."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tests.studies.explored import check_pictures, opened
from tests.studies.tiny_images import write_images
from torch import Tensor, nn
from torch.nn.functional import one_hot

import dualform
from dualform.cli import cli
from dualform.errors import ReadingError
from dualform.studies.classifiers import Training, whole_batches
from dualform.studies.controls import (
    SETTINGS,
    ControlsSetting,
    middle_model,
    paper_model,
    run_study,
    small_model,
)
from dualform.studies.controls.experiment import Experiment, lead, load_experiment, margin, others
from dualform.studies.controls.left_out import (
    EXACT,
    PLAIN,
    SCALED,
    VARIANTS,
    clipped,
    contributions,
    rebuilt_errors,
)
from dualform.studies.controls.measure import ControlsMeasurement
from dualform.studies.controls.reads import (
    INPUT_SPACE,
    NEAREST,
    answers,
    exact,
    keys_only,
    nearest,
    readings,
    similar,
)
from dualform.studies.controls.removal import CLASS, Outcomes, Removals, scores
from dualform.studies.report import Report, read_tables

TINY = ControlsSetting(
    Training(widths=(16, 12, 10), batch=20, rate=0.05, clip=0.7),
    images=80,
    epochs=5,
    memorizing=8,
    tested=3,
    explained=2,
    halves=4,
    repeats=2,
    removed=(4, 20),
    removals=1,
    seeds=2,
)
LOOK = "dualform.studies.controls:small_model"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_images(folder / "mnist", 0, 90)
    return folder


@pytest.fixture(scope="module")
def experiment(data: Path) -> Experiment:
    return load_experiment(data, TINY, "cpu")


@pytest.fixture(scope="module")
def trained(
    experiment: Experiment, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dualform.Run, nn.Module]:
    path = tmp_path_factory.mktemp("trained") / "run"
    model = experiment.train(0, path=path)
    return dualform.open(path), model


def rebuilt(experiment: Experiment, momentum: bool, clipping: bool) -> tuple[Tensor, Tensor, float]:
    """A plain loop in float64 for one linear layer: what its rows add up to, without some.

    Returns the sum of rows by sample (samples, outputs, inputs + 1), the change of the real
    weights, and the share of the steps that were clipped.
    """
    own, x, y = experiment.setting.training, experiment.inputs().double(), experiment.images.y
    x = torch.cat([x, torch.ones(len(x), 1)], 1)
    first = experiment.untrained(0).state_dict()
    weights = torch.cat([first["0.weight"], first["0.bias"][:, None]], 1).double()
    start, speed = weights.clone(), torch.zeros_like(weights)
    parts = torch.zeros(len(x), *weights.shape, dtype=torch.float64)
    speeds, cut = torch.zeros_like(parts), 0
    batches = whole_batches(torch.arange(len(x)), own.batch, torch.Generator().manual_seed(0))
    steps = round(experiment.setting.epochs * len(x) / own.batch)
    for ids in islice(batches, steps):
        errors = (x[ids] @ weights.T).softmax(1) - one_hot(y[ids], 10)
        rows = errors[:, :, None] * x[ids][:, None] / len(ids)
        gradient = rows.sum(0)
        factor = min(1.0, own.clip / float(gradient.norm()))
        cut += factor < 1
        speed = own.momentum * speed + factor * gradient
        weights = weights - own.rate * speed
        given = torch.zeros_like(parts).index_add_(0, ids, rows * (factor if clipping else 1.0))
        speeds = given + (own.momentum * speeds if momentum else 0.0)
        parts = parts - own.rate * speeds
    return parts, weights - start, cut / steps


def linear(experiment: Experiment, path: Path) -> tuple[Experiment, dualform.Run, nn.Module]:
    """One linear layer, trained and recorded."""
    training = replace(TINY.training, widths=(16, 10))
    one = replace(experiment, setting=replace(TINY, training=training))
    model = one.train(0, path=path / "run")
    return one, dualform.open(path / "run"), model


CASES = {
    PLAIN: (False, False),
    "clipping only": (False, True),
    "momentum only": (True, False),
    EXACT: (True, True),
}


def test_what_is_left_out_is_that_of_a_plain_loop(experiment: Experiment, tmp_path: Path) -> None:
    one, run, model = linear(experiment, tmp_path)
    errors = rebuilt_errors(run)
    x, y = one.queries(1)
    (reading,) = readings(run, model, x, y).values()
    found = contributions(reading)
    wide = torch.cat([x, torch.ones(len(x), 1)], 1).double()
    for name, left_in in CASES.items():
        parts, change, share = rebuilt(one, *left_in)
        missed = float((parts.sum(0) - change).norm() / change.norm())
        assert errors[name]["0"] == pytest.approx(missed, abs=1e-5), name
        expected = torch.einsum("sqi,qi->sq", parts[:, y], wide)
        np.testing.assert_allclose(found[name], expected.numpy(), atol=1e-5, err_msg=name)
    assert 0 < share < 1
    assert clipped(run.source.accounting)["share"] == pytest.approx(share)
    assert errors[EXACT]["0"] < 1e-5 < errors["momentum only"]["0"] < errors[PLAIN]["0"]
    scaled = found[PLAIN] / (1 - TINY.training.momentum)
    np.testing.assert_allclose(found[SCALED], scaled, atol=1e-6)  # rows are in float32
    np.testing.assert_allclose(found[EXACT], reading.samples().values, atol=1e-6)


def test_keys_of_the_first_layer_are_pixels(
    experiment: Experiment, trained: tuple[dualform.Run, nn.Module]
) -> None:
    """Training changes nothing there but how often an image is seen: the same number of epochs."""
    run, model = trained
    x, _ = experiment.queries(3)
    trained_keys = keys_only(run, model, x)["keys only, layer 0"]
    pixels = (experiment.inputs() @ x.T).abs().numpy()
    np.testing.assert_allclose(trained_keys, TINY.epochs * pixels, rtol=1e-5)
    untrained = similar(experiment.untrained(0), experiment.inputs(), x)
    np.testing.assert_allclose(untrained["keys only, layer 0"], pixels, rtol=1e-6)
    hidden = torch.relu(nn.functional.linear(x, *experiment.untrained(0)[0].parameters()))  # type: ignore[index]
    own = torch.relu(
        nn.functional.linear(experiment.inputs(), *experiment.untrained(0)[0].parameters())  # type: ignore[index]
    )
    np.testing.assert_allclose(
        untrained["keys only, layer 2"], (own @ hidden.T).abs().detach().numpy(), rtol=1e-4
    )


def test_exact_reads_add_up_to_the_output(
    experiment: Experiment, trained: tuple[dualform.Run, nn.Module]
) -> None:
    run, model = trained
    x, _ = experiment.queries(3)
    another = others(model(x).argmax(1), 0)
    output = model(x).gather(1, another[:, None])[:, 0].detach().numpy()
    first = run.at(0).state_dict()
    hidden = model[:2](x)  # type: ignore[index]
    before = hidden @ first["2.weight"].T + first["2.bias"]
    expected = output - before.gather(1, another[:, None])[:, 0].detach().numpy()
    found = exact(run, model, x, another)["exact, layer 2"]
    np.testing.assert_allclose(found.sum(0), expected, atol=1e-5)


def test_neighbors_are_those_of_a_plain_loop(experiment: Experiment) -> None:
    x, _ = experiment.queries(2)
    keys, y = experiment.inputs(), experiment.images.y
    found = answers(nearest(experiment.untrained(0), keys, x)[NEAREST], y)
    for query, answer in zip(x, found, strict=True):
        near = [float(key @ query / key.norm() / query.norm()) for key in keys]
        best = sorted(range(len(keys)), key=lambda at: -near[at])[:10]
        votes = [sum(near[at] for at in best if y[at] == label) for label in range(10)]
        assert answer == int(np.argmax(votes))


def test_the_answer_is_the_class_with_the_largest_total() -> None:
    values = np.array([[3.0, -1.0], [2.0, -3.0], [2.0, -0.5]])
    assert answers(values, torch.tensor([1, 7, 7])).tolist() == [7, 1]
    assert answers(values, torch.tensor([1, 7, 7])).max() < 10  # classes without images do not win


def test_margins_and_leads() -> None:
    outputs = torch.tensor([[1.0, 4.0, 2.0], [3.0, 0.0, 1.0]])
    labels = torch.tensor([1, 2])
    p = outputs.softmax(1)[torch.arange(2), labels]
    torch.testing.assert_close(margin(outputs, labels), torch.log(p / (1 - p)))
    assert lead(outputs, labels).tolist() == [2.0, -2.0]


def test_random_labels_are_those_of_others(experiment: Experiment) -> None:
    images = experiment.shuffled_labels(1)
    assert torch.equal(images.pixels, experiment.images.pixels)
    assert images.y.bincount().tolist() == experiment.images.y.bincount().tolist()
    assert float((images.y == experiment.images.y).float().mean()) < 0.3
    assert not torch.equal(images.y, experiment.shuffled_labels(2).y)


def test_what_is_removed_is_what_ranks_first(
    experiment: Experiment,
    trained: tuple[dualform.Run, nn.Module],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And outputs are those of a network that was trained on what is left."""
    own = scores(*trained, experiment)
    _, labels = experiment.queries(TINY.explained)
    trainings: list[tuple[set[int], int]] = []

    def outcome(self: Outcomes, ids: Any, seed: int) -> Any:
        trainings.append((set(ids.tolist()), seed))
        return np.arange(2.0 * len(labels))

    monkeypatch.setattr(Outcomes, "__call__", outcome)
    found = Removals(experiment, own, [3], workers=0).of_query(0)
    assert found["explain"] == {str(count): [[3.0, 3.0 + len(labels)]] for count in TINY.removed}
    everybody = set(range(80))
    removed = [everybody - ids for ids, _ in trainings]
    assert [len(ids) for ids in removed] == [4, 20] * (len(own) + 1)
    for at, values in enumerate(own.values()):
        for ids in removed[2 * at : 2 * at + 2]:
            chosen = np.isin(np.arange(80), list(ids))
            assert values[chosen, 3].min() >= values[~chosen, 3].max()
    classes = [set(experiment.images.y[list(ids)].tolist()) for ids in removed[-2:]]
    assert classes[0] == {int(labels[3])}  # at random of its class, of which there are 8
    assert len(classes[1]) > 1
    assert CLASS in found


def test_a_retrained_network_is_a_plain_training(experiment: Experiment) -> None:
    ids = np.arange(0, 80, 2)
    x, y = experiment.queries(TINY.explained)
    sent = pickle.dumps(Outcomes(experiment))  # as worker processes get it
    found = pickle.loads(sent)(ids, 3)
    model = experiment.train(1003, torch.from_numpy(ids))
    with torch.no_grad():
        expected = torch.cat([margin(model(x), y), lead(model(x), y)])
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-6)


def test_stacked_networks_are_those_of_single_trainings(experiment: Experiment) -> None:
    """Starts, orders, momentum and clipping are each network's own."""
    tight = replace(TINY, training=replace(TINY.training, clip=0.2))
    task = Outcomes(replace(experiment, setting=tight))
    ids = [np.arange(0, 80, 2), np.arange(40), np.arange(40)]
    stacked = task.stacked(ids, [3, 3, 4])
    single = [task(*one) for one in zip(ids, [3, 3, 4], strict=True)]
    np.testing.assert_allclose(stacked, single, atol=1e-4)
    assert all(np.abs(single[at] - single[at - 1]).max() > 0.1 for at in range(3))
    assert np.abs(Outcomes(experiment)(ids[0], 3) - single[0]).max() > 1e-2  # clipping matters
    assert task.at_once == 0
    assert Outcomes(replace(experiment, device="cuda")).at_once > 1


@pytest.fixture(scope="module")
def report(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    out = tmp_path_factory.mktemp("study")
    found = run_study(data, TINY, None, "cpu", out, LOOK)
    found.save(out)
    return found, out


def table(report: Report, title: str) -> dict[Any, tuple[Any, ...]]:
    (found,) = (table for table in report.tables if title in table.title)
    return {row[0]: row[1:] for row in found.rows}


def test_the_study_answers_its_questions(report: tuple[Report, Path]) -> None:
    found, out = report
    assert [t.title for t in read_tables(out / "study.json")] == [t.title for t in found.tables]
    for picture in found.pictures:
        assert (out / picture.file).stat().st_size > 5000, picture.file
    assert all(sentence.endswith(".") for sentence in found.findings)
    assert all(row[1] == "yes" for row in table(found, "do the books balance").values())
    assert not any("|" in str(cell) for t in found.tables for row in t.rows for cell in row)


def test_reads_stand_next_to_input_space(report: tuple[Report, Path]) -> None:
    rates = table(report[0], "whose class has the largest total")
    assert rates["exact, layer 2"][3] is None  # nothing was learned, nothing contributes
    trained, by_label, by_class, untrained = rates["keys only, layer 0"]
    assert trained == by_class == untrained == rates[INPUT_SPACE][0]
    assert by_label == rates[INPUT_SPACE][1]
    answer = table(report[0], "whose answer has the largest total")["the network itself"]
    assert {one.mean for one in answer} == {100.0}
    errors = table(report[0], "weights rebuilt")
    assert list(errors) == list(VARIANTS)
    assert errors[EXACT][0].mean < 1e-3 < errors[PLAIN][0].mean


def test_runs_stay_for_the_explorer(
    experiment: Experiment, report: tuple[Report, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, out = report
    assert not (out / "scratch").exists()
    assert found.look == tuple(
        f"dualform view {out / name} --model {LOOK} --input {out / f'{name}.npz'}"
        for name in ("run", "random-labels")
    )
    monkeypatch.setitem(SETTINGS, "small", TINY)
    given = {"run": experiment.images, "random-labels": experiment.shuffled_labels(0)}
    for look, (name, images) in zip(found.look, given.items(), strict=True):
        samples = dualform.open(out / name).samples
        assert samples.columns["digit"][13] == "3"
        asked = np.load(out / f"{name}.npz")
        assert asked["x"].shape == (20, 16)
        assert "test digit 0" in asked["titles"][0]
        labels = [str(label) for label in images.y.tolist()]
        explorer = opened(look, monkeypatch)
        check_pictures(explorer, images.pixels.numpy(), labels, asked["x"])


@pytest.mark.usefixtures("undrawn")
def test_an_interrupted_study_goes_on(
    data: Path, tmp_path: Path, report: tuple[Report, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(ControlsMeasurement, "untrained", fails)
    with pytest.raises(KeyboardInterrupt):
        run_study(data, TINY, None, "cpu", tmp_path, LOOK)
    monkeypatch.undo()
    monkeypatch.setattr(
        ControlsMeasurement, "random_labels", _only(ControlsMeasurement.random_labels, 1)
    )
    monkeypatch.setattr(
        ControlsMeasurement, "true_labels", _only(ControlsMeasurement.true_labels, 1)
    )
    again = run_study(data, TINY, None, "cpu", tmp_path, LOOK)
    for one, other in zip(again.tables, report[0].tables, strict=True):
        assert one.markdown() == other.markdown()


def _only(whole: Any, seed: int) -> Any:
    """What fails for all seeds but one: those of the others are kept."""

    def method(self: ControlsMeasurement, given: int) -> Any:
        assert given == seed
        return whole(self, given)

    return method


@pytest.mark.usefixtures("undrawn")
def test_from_the_shell(
    data: Path, report: tuple[Report, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETTINGS, "small", TINY)  # whose parts are kept there
    given = ["study", "controls", "--data", str(data), "--out", str(report[1])]
    result = CliRunner().invoke(cli, [*given, "--json"], catch_exceptions=False)
    found = json.loads(result.stdout)
    assert found["name"] == "controls"
    assert found["settings"]["halves"] == 4
    assert json.loads((report[1] / "study.json").read_text()) == found
    assert "does a read foretell retraining" in CliRunner().invoke(cli, given).stdout


def test_too_few_images_are_refused(data: Path) -> None:
    with pytest.raises(
        ReadingError,
        match="there are 90 training digits, and the study needs 200 to train on halves of them",
    ):
        load_experiment(data, SETTINGS["small"], "cpu")


def test_every_class_is_there(tmp_path: Path) -> None:
    write_images(tmp_path / "mnist", 0, 9)
    few = replace(TINY, training=replace(TINY.training, batch=2), removed=(1,))
    with pytest.raises(ReadingError, match="no training digit 9; is --data right"):
        load_experiment(tmp_path, few, "cpu")


def test_models_are_those_of_the_settings() -> None:
    for name, make in (("small", small_model), ("middle", middle_model), ("paper", paper_model)):
        widths = SETTINGS[name].training.widths
        assert make().get_parameter("0.weight").shape == (widths[1], widths[0])
