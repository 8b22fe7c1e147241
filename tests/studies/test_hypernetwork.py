"""The study of hypernetwork attention on tiny networks."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from dualform.cli import cli
from dualform.diagnose import pair_codes
from dualform.errors import EvaluationError
from dualform.studies.hypernetwork import SETTINGS, TrainingSetting, run_study
from dualform.studies.hypernetwork.checkpoint import Checkpoint
from dualform.studies.hypernetwork.findings import findings
from dualform.studies.hypernetwork.fuzzy_logic import FuzzyLogic
from dualform.studies.hypernetwork.measure import (
    answered,
    asked_codes,
    measure_network,
    probe,
)
from dualform.studies.hypernetwork.network import LAYERS, RuleReader
from dualform.studies.hypernetwork.problems import ahead, problems_of, training_batches
from dualform.studies.hypernetwork.raven import RULES, Raven
from dualform.studies.hypernetwork.results import HypernetworkResults, TaskResults
from dualform.studies.hypernetwork.study import parts_of
from dualform.studies.hypernetwork.together import TrainedTogether, make_network
from dualform.studies.hypernetwork.training import ReplayedPasses, StackedNetworks, train
from dualform.studies.parts import Found
from dualform.studies.report import Report, read_tables

TINY = SETTINGS["tiny"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    out = tmp_path_factory.mktemp("study")
    report = run_study(TINY, None, "cpu", out)
    report.save(out)
    return report, out


def scores_of(name: str, q: Tensor, k: Tensor) -> Tensor:
    """(heads, L, S), head by head."""
    s = torch.stack([a @ b.T / a.shape[-1] ** 0.5 for a, b in zip(q, k, strict=True)])
    if name == "softmax":
        return torch.stack([torch.softmax(one, -1) for one in s])
    if name == "rms":
        return s / (s.square().mean(0) + 1e-6).sqrt()
    return s


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_of_the_grid_are_what_they_are_called(layer: str) -> None:
    """In loops over queries and keys, with the network's own projections."""
    torch.manual_seed(0)
    block = RuleReader((5, 3, 1, 2), layer, width=8, heads=2, depth=1).double().blocks[0]
    module, x = block.self_attn, torch.randn(1, 5, 8).double()
    q, k, v = (part[0] for part in module.heads(x, x, x))
    own = {"linear": "dot", "softmax": "softmax", "HYLA, softmax": "softmax", "HYLA, no RMS": "dot"}
    a = scores_of(own.get(layer, "rms"), q, k)
    y = torch.zeros(2, 5, 4).double()
    for i in range(5):
        for j in range(5):
            for h in range(2):
                if not layer.startswith("HYLA"):
                    y[h, i] += a[h, i, j] * v[h, j]
                    continue
                value = a[0, i, j] * v[0, j] + a[1, i, j] * v[1, j]
                y[h, i] += a[h, i, j] * (value if layer == "HYLA, no ReLU" else value.relu())
    expected = module.out_proj(torch.cat([*y], -1))
    got = module(x, x, x, need_weights=False)[0][0]
    assert torch.allclose(got, expected, atol=1e-10)
    codes = pair_codes(RuleReader((5, 3, 1, 2), layer, 8, 2, 2), torch.randn(2, 5, 3))
    assert [one.shape for one in codes.values()] == [(2, 5, 5, 2)] * 2


def test_networks_without_places_do_not_see_the_order_of_rows() -> None:
    torch.manual_seed(0)
    task = FuzzyLogic(rows=6)
    x = problems_of(task, "test", 4).x
    shuffled = torch.cat([x[:, [3, 1, 4, 0, 2]], x[:, -1:]], 1)
    for places in (False, True):
        model = RuleReader(task.shape, "HYLA", 8, 2, 2, places).eval()
        assert torch.allclose(model(x), model(shuffled), atol=1e-6) != places


def test_training_teaches_functions() -> None:
    task = FuzzyLogic(variables=2, terms=1, rows=6, held_out=0)
    training = TrainingSetting(task, width=16, heads=4, depth=1, steps=200, batch=32, rate=1e-2)
    torch.manual_seed(0)
    model = RuleReader(task.shape, "HYLA", 16, 4, 1, places=False)
    problems = problems_of(task, "test", 500)
    before = task.score(*answered(model, problems, "cpu"))
    [loss] = train({"HYLA": [model]}, [task], training, "cpu")["HYLA"]
    after = task.score(*answered(model, problems, "cpu"))
    assert before < 0.1  # which is 0 for who always tells the mean
    assert after > 0.3
    assert loss < 0.05


def trained_in_a_loop(
    model: RuleReader, task: FuzzyLogic, training: TrainingSetting[FuzzyLogic]
) -> list[float]:
    """Training as torch's own pieces do it, one network by itself; the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.rate, weight_decay=training.decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, training.rate, total_steps=training.steps, pct_start=0.1
    )
    losses = []
    for given in training_batches(task, task.seed, training.batch, training.steps):
        optimizer.zero_grad()
        loss = task.loss(model(given.x), given.y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def by_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("by_float64")
def test_networks_that_are_trained_together_become_what_each_becomes_alone() -> None:
    """Some gradients are clipped, so that clipping a seed's by another's would show."""
    layers = ("softmax", "linear, RMS", "HYLA")
    training = replace(TINY.fuzzy_logic, steps=20, rate=1e-2)
    tasks = [replace(training.task, seed=seed) for seed in (0, 1)]
    networks = {layer: [make_network(training, layer, seed) for seed in (0, 1)] for layer in layers}
    alone = copy.deepcopy(networks)
    for one in (networks["HYLA"][1], alone["HYLA"][1]):
        one.leave.weight.data *= 30
    losses = train(networks, tasks, training, "cpu")
    for layer in layers:
        for task, one, other, loss in zip(
            tasks, networks[layer], alone[layer], losses[layer], strict=True
        ):
            expected = trained_in_a_loop(other, task, training)
            assert loss == pytest.approx(sum(expected[-2:]) / 2, abs=1e-10)
            for part, wanted in zip(one.parameters(), other.parameters(), strict=True):
                assert torch.allclose(part, wanted, atol=1e-8), layer


def test_who_asks_first_has_all_networks_trained(tmp_path: Path) -> None:
    training = replace(TINY.fuzzy_logic, layers=("softmax", "HYLA"))
    kept = TrainedTogether(tmp_path, training, seeds=2, device="cpu")
    model, alone = (make_network(training, "HYLA", 1) for _ in range(2))
    loss = kept.load(model, "HYLA", 1)
    task = replace(training.task, seed=1)
    assert [loss] == pytest.approx(train({"HYLA": [alone]}, [task], training, "cpu")["HYLA"])
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    files = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.safetensors")}
    assert len(files) == 4
    (tmp_path / "fuzzy_logic-softmax-seed-0.safetensors").unlink()
    more = replace(kept, seeds=3)
    more.load(make_network(training, "HYLA", 2), "HYLA", 2)
    after = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.safetensors")}
    assert len(after) == 6
    again = {file.name for file in files if after[file] != files[file]}
    assert again == {f"fuzzy_logic-{layer}-seed-0.safetensors" for layer in ("softmax", "HYLA")}


def test_an_interrupted_training_goes_on_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = replace(TINY.fuzzy_logic, steps=12, batch=4)
    tasks = [replace(training.task, seed=seed) for seed in (0, 1)]
    monkeypatch.setattr("dualform.studies.hypernetwork.checkpoint.SECONDS", 0.0)
    monkeypatch.setattr("dualform.studies.hypernetwork.problems.BLOCK", 8)  # two batches
    kept, save = tmp_path / "state.safetensors", Checkpoint.save

    def networks(*layers: str) -> dict[str, list[RuleReader]]:
        return {layer: [make_network(training, layer, seed) for seed in (0, 1)] for layer in layers}

    def save_and_stop(state: Checkpoint, steps: int) -> None:
        save(state, steps)
        if steps in (5, 11):
            raise KeyboardInterrupt

    both = ("softmax", "HYLA")
    whole = networks(*both)
    losses = train(whole, tasks, training, "cpu")
    monkeypatch.setattr(Checkpoint, "save", save_and_stop)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train(networks(*both), tasks, training, "cpu", kept)
    resumed = networks(*both)
    assert train(resumed, tasks, training, "cpu", kept) == losses
    for layer in both:
        for one, other in zip(whole[layer], resumed[layer], strict=True):
            assert torch.equal(*(parameters_to_vector(x.parameters()) for x in (one, other)))
    monkeypatch.setattr(Checkpoint, "save", save)
    anew = train(networks("HYLA"), tasks, training, "cpu", kept)  # the state is of other networks
    assert anew == train(networks("HYLA"), tasks, training, "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_replayed_passes_are_those_of_each_batch() -> None:
    networks = {
        layer: [make_network(TINY.raven, layer, seed, "cuda") for seed in (0, 1)]
        for layer in ("softmax", "HYLA")
    }
    stacked = StackedNetworks(networks, TINY.raven.task)
    drawn = [*training_batches(TINY.raven.task, 0, 4, 4, "cuda")]
    x, y = (
        torch.stack([getattr(one, name) for one in drawn]).view(2, 2, 4, *rest)
        for name, rest in (("x", (18, 8)), ("y", (2,)))
    )
    replayed = ReplayedPasses(stacked, x[0], y[0])
    for one, other in zip(x, y, strict=True):
        losses = replayed.set_gradients(one, other).clone()
        gradients = stacked.weights.grad.clone()
        assert torch.allclose(losses, stacked.set_gradients(one, other), atol=1e-5)
        assert torch.allclose(gradients, stacked.weights.grad, atol=1e-5)


def test_problems_that_are_drawn_ahead_are_the_same() -> None:
    def stops(count: int) -> Iterator[int]:
        yield from range(count)
        raise EvaluationError("no more of them")

    blocks = ahead(stops(3))
    assert [next(blocks) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(EvaluationError, match="no more of them"):
        next(blocks)


def test_a_seed_measures_the_same_again_and_another_differs() -> None:
    one, again, other = (
        measure_network(TINY, TINY.raven, "HYLA", seed, "cpu") for seed in (0, 0, 1)
    )
    assert one == again
    assert one["loss"] != other["loss"]


def test_codes_of_asked_tokens_are_those_of_the_model() -> None:
    torch.manual_seed(0)
    puzzles = Raven(features=2)
    x = problems_of(puzzles, "test", 3).x
    model = RuleReader(puzzles.shape, "HYLA", 8, 2, 2)
    found = asked_codes(model, puzzles, x, "cpu")
    assert found.shape == (3, 2, 2 * 18 * 2)  # two features asked; layers, tokens and heads
    first, second = pair_codes(model, x).values()
    assert torch.equal(found[1, 0], torch.cat([first[1, -2].flatten(), second[1, -2].flatten()]))

    rows = FuzzyLogic(rows=4)
    x = problems_of(rows, "test", 3).x
    model = RuleReader(rows.shape, "HYLA", 8, 2, 1, places=False)
    found = asked_codes(model, rows, x, "cpu")
    (every,) = pair_codes(model, x).values()
    assert torch.allclose(found[:, 0], torch.cat([every[:, 3, 3], every[:, 3, :3].mean(1)], -1))
    assert torch.allclose(found, asked_codes(model, rows, x[:, [2, 0, 1, 3]], "cpu"), atol=1e-6)


def test_a_probe_of_an_untrained_network_tells_rules_that_its_input_shows() -> None:
    """Rows that are constant, and those that are not, differ in what is seen of the last row."""
    task = Raven(features=1, held_out=0)
    torch.manual_seed(0)
    told = probe(RuleReader(task.shape, "softmax", 16, 4, 2), task, 800, "cpu")
    assert told["interval"][0] > told["chance"]


def test_a_report_has_all_layers_and_goes_on(found: tuple[Report, Path]) -> None:
    report, out = found
    fuzzy, raven, *others = read_tables(out / "study.json")
    assert [row[0] for row in fuzzy.rows] == [*LAYERS]
    assert [row[0] for row in raven.rows] == ["softmax", "linear", "HYLA"]
    assert raven.columns == ("layer", "test", "rules", "permutations", "training loss")
    assert [row[0] for row in others[-1].rows] == [*RULES]
    shares = [sum(float(str(x)) for x in row[1:5]) for row in others[-2].rows]
    assert shares == pytest.approx([100] * 8)
    for picture in report.pictures:
        assert (out / picture.file).stat().st_size > 5000
    (out / "parts" / "raven-HYLA-seed-1.json").unlink()  # and is measured again
    assert run_study(TINY, None, "cpu", out).findings == report.findings


def results(score: float, of_hyla: float) -> HypernetworkResults:
    """Made-up networks, all alike but for HYLA."""

    def made(layer: str, parts: tuple[str, ...]) -> Iterator[Found]:
        for seed in range(3):
            right = (of_hyla if layer == "HYLA" else score) + 0.01 * seed
            told = {"accuracy": 0.5, "interval": [0.4, 0.6], "chance": 0.125}
            yield {
                "scores": dict.fromkeys(parts, right),
                "loss": 0.1,
                "probe": {"untrained": told, "trained": {**told, "accuracy": right}},
            }

    tasks = tuple(
        TaskResults(t, {layer: [*made(layer, t.task.parts[1:])] for layer in t.layers})
        for t in TINY.trainings
    )
    answers = {
        "parts": {"test": [0, 90, 10]},
        "features": {"1": [0, 9, 1], "2": [0, 3, 0, 1]},
        "rules": {"constant": 0.01, "sum": 0.05},
    }
    return HypernetworkResults(TINY, tasks, answers)


def test_sentences_follow_the_numbers() -> None:
    said = findings(results(0.6, 0.8))
    assert said[0] == (
        "On fresh problems of known rules (fuzzy_logic, R², %) HYLA is best with 81 ± 2."
    )
    assert "Of 4 differences to softmax, 2 have" in said[7]
    assert "HYLA on raven, rules, 20 ± 0" in said[7]
    assert "15 of 15 cases: linear on test -20 ± 0; linear on combinations -20 ± 0;" in said[8]
    assert "3 of 3 cases: linear on test -20 ± 0;" in said[9]
    assert "HYLA 81 ± 2 (up 31.0 by training)" in said[10]
    assert said[-2].endswith("by their features: 1: 10.0, 2: 25.0.")
    assert "1.0% of the rows (constant) to 5.0% (sum)" in said[-1]
    alike = findings(results(0.6, 0.6))
    assert "none has a 95 % interval without 0" in alike[7]
    assert "in 0 of 15 cases." in alike[8]


def test_the_command_runs(found: tuple[Report, Path]) -> None:
    report, out = found
    asked = ["study", "hypernetwork", "--setting", "tiny", "--out", str(out), "--json"]
    result = CliRunner().invoke(cli, asked)
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["findings"] == list(report.findings)


def test_parts_can_be_sent_to_workers(tmp_path: Path) -> None:
    parts = parts_of(TINY, 1, "cpu", tmp_path)
    sent = pickle.loads(pickle.dumps(parts))
    name = "fuzzy_logic softmax seed 0"
    assert sent[name]() == parts[name]()


def test_one_task_is_a_study_too(found: tuple[Report, Path]) -> None:
    both, out = found
    only = replace(TINY, tasks=("raven",))
    assert [one.task.name for one in only.trainings] == ["raven"]
    report = run_study(only, None, "cpu", out)  # what is kept there is of both
    assert report.tables[0].title.startswith("raven")
    assert set(report.findings) < set(both.findings)
    for picture in report.pictures:
        assert (out / picture.file).stat().st_size > 5000


def test_fewer_steps_and_layers_are_asked_for() -> None:
    [training] = replace(TINY, tasks=("raven",), shorter=2, layers=("HYLA",)).trainings
    assert training.steps == TINY.raven.steps // 2
    assert training.layers == ("softmax", "HYLA")  # what others are compared with is always there


def test_unknown_layers_are_refused(tmp_path: Path) -> None:
    wrong = replace(TINY, raven=replace(TINY.raven, layers=("HYLA", "entmax")))
    with pytest.raises(EvaluationError, match=r"layer='entmax' is not in this study; it has 'soft"):
        run_study(wrong, 1, "cpu", tmp_path)


def test_settings_are_what_they_say() -> None:
    for setting in SETTINGS.values():
        for training in setting.trainings:
            assert training.width % training.heads == 0
            assert {"softmax", "linear", "HYLA"} <= set(training.layers) <= set(LAYERS)
    paper = SETTINGS["paper"].raven
    assert paper.steps * paper.batch == 20_000_000
    assert paper.task.shape[0] == 36
