"""The study of attention paths at its tiny size, against counts and trainings of the test's own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tests.studies.tiny_images import write_images

from dualform.cli import cli
from dualform.diagnose import heads, path_features
from dualform.studies.data import load_images
from dualform.studies.parts import Found
from dualform.studies.paths import SETTINGS, run_study
from dualform.studies.paths.chains import STAYS, attention, hidden_states, measure_chains, sequences
from dualform.studies.paths.pruning import METHODS, PatchTransformer, measure_pruning
from dualform.studies.paths.results import NEEDED, PathsResults
from dualform.studies.report import Report, read_tables

TINY = SETTINGS["tiny"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_images(folder / "mnist", 0, 130)
    return folder


@pytest.fixture(scope="module")
def found(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    out = tmp_path_factory.mktemp("study")
    return run_study(data, TINY, None, "cpu", out), out


def test_chains_stay_as_often_as_their_class_does() -> None:
    y = torch.tensor([1, -1]).repeat_interleave(3000)
    states = hidden_states(y, 20, torch.Generator().manual_seed(0))
    stayed = (states[:, 1:] == states[:, :-1]).double().mean(1)
    assert float(stayed[:3000].mean()) == pytest.approx(STAYS[1], abs=0.01)
    assert float(stayed[3000:].mean()) == pytest.approx(STAYS[-1], abs=0.01)
    assert float(states[:, 0].double().mean()) == pytest.approx(0.5, abs=0.03)


def test_the_first_path_counts_how_often_a_chain_stayed() -> None:
    """Without noise, its feature is the sum of the states that stayed: one for each."""
    generator = torch.Generator().manual_seed(0)
    states = hidden_states(torch.tensor([1, -1, 1]), 12, generator)
    x = sequences(states, 0.0, generator)
    features = path_features(x, attention(states), query=0)
    for chain in range(3):
        counts = [0, 0]
        for t in range(1, 12):
            if states[chain, t] == states[chain, t - 1]:
                counts[int(states[chain, t])] += 1
        a, b = (x[chain, 1 + int((states[chain] == s).int().argmax())] for s in (0, 1))
        expected = (counts[0] * a + counts[1] * b) / 13
        torch.testing.assert_close(features[chain, 0], expected, rtol=0, atol=1e-9)
        torch.testing.assert_close(features[chain, 1], x[chain].mean(0), rtol=0, atol=1e-9)


def test_noise_is_outside_of_the_plane_of_the_states() -> None:
    generator = torch.Generator().manual_seed(0)
    states = hidden_states(torch.tensor([1, -1]), 12, generator)
    calm, noisy = (sequences(states, n, torch.Generator().manual_seed(1)) for n in (0.0, 3.0))
    noise = noisy - calm
    assert float((noise.flatten(0, 1) @ calm.flatten(0, 1).T).abs().max()) < 1e-9
    assert float(noise[:, 1:].square().mean()) == pytest.approx(9 * 198 / 200, rel=0.05)


def test_narrow_layers_beat_the_gaussian_process_where_noise_is_large() -> None:
    setting = replace(TINY, noises=(5.0,), widths=(10, 100_000), chains=100, test_chains=400)
    found = [measure_chains(setting, seed)["5"] for seed in range(2)]
    for one in found:
        narrow, wide, process = (one[name] for name in ("N = 10", "N = 100000", "Gaussian process"))
        assert narrow["accuracy"] > process["accuracy"] + 0.02
        assert wide["accuracy"] == pytest.approx(process["accuracy"], abs=0.01)
        assert narrow["cosine"] < -0.3
        assert process["cosine"] == 0.0


def test_heads_are_scored_and_left_out(data: Path) -> None:
    found = measure_pruning(TINY, load_images(data, "mnist"), "cpu", 0)
    count = TINY.layers * TINY.heads
    assert {len(scores) for scores in found["scores"].values()} == {count}
    assert list(found["scores"]) == list(METHODS)
    for curve in found["pruned"].values():
        assert len(curve) == count + 1
        assert curve[0] == found["accuracy"]
    assert len({curve[-1] for curve in found["pruned"].values()}) == 1  # all heads are left out


def test_gates_leave_out_heads_as_zeros_in_the_projection_do() -> None:
    torch.manual_seed(0)
    model, x = PatchTransformer(TINY, 8), torch.randn(5, 8, 8)
    gates = torch.ones(5, TINY.layers, TINY.heads)
    gates[:, 1, 0] = 0.0
    with torch.no_grad():
        without = model(x, gates)
        plain = model(x)
        change = (without - plain).norm() / (plain - plain.mean(0)).norm()
    one = heads(model, x, layers="blocks.*", ablate=True).heads[TINY.heads]
    assert (one.block, one.head) == ("blocks.1", 0)
    torch.testing.assert_close(model(x, torch.ones_like(gates)), model(x))
    assert one.damage == pytest.approx(float(change), rel=1e-4)


def test_a_report_has_both_parts(found: tuple[Report, Path]) -> None:
    report, out = found
    assert len(report.tables) == 4
    assert len(report.findings) == 2 + 1 + len(METHODS) - 2
    paths = report.save(out)
    assert read_tables(paths[0]) == list(report.tables)
    assert {(out / picture.file).exists() for picture in report.pictures} == {True}


def test_sentences_follow_the_numbers() -> None:
    def pruning(own: list[float], other: list[float], lost: list[float]) -> Found:
        scores = dict.fromkeys(METHODS, other) | {NEEDED: own}
        return {"scores": scores, "ablation": lost, "fall": lost, "accuracy": 0.9}

    lost = [0.1, 0.2, 0.3, 0.4]
    chains = [
        {"5": {"Gaussian process": {"accuracy": 0.8 + at}, "N = 10": {"accuracy": 0.9 + at}}}
        for at in (0.0, 0.01)
    ]
    results = PathsResults(TINY, chains, [pruning(lost, lost[::-1], lost)] * 2)
    said = results.findings()
    assert "beyond chance at noise 5 (0.1 ± 0)" in said[0].replace("0.100", "0.1")
    assert said[2].endswith("gradient -1 ± 0, random -1 ± 0.")
    assert said[3].startswith("Scores by paths (N = head) agree with ablation more than norm: 2")
    same = PathsResults(TINY, chains, [pruning(lost, lost, lost)] * 2)
    assert "as norm does, within chance" in same.findings()[3]


def test_the_command_runs(data: Path, tmp_path: Path) -> None:
    asked = ["study", "paths", "--data", str(data), "--setting", "tiny", "--seeds", "1"]
    result = CliRunner().invoke(cli, [*asked, "--out", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["name"] == "paths"
