"""The study of the fixed point: what its closed forms say is what its simulations do."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from dualform.cli import cli
from dualform.studies.fixed_point import run_study, save_study
from dualform.studies.fixed_point.continuum import (
    cumulant_growth,
    growth,
    nodes,
    normal,
    variance_after,
)
from dualform.studies.fixed_point.dynamics import contraction, iterate, standardize, transport
from dualform.studies.fixed_point.normality import energy_distance, measure, null_energy
from dualform.studies.fixed_point.starts import STARTS


@pytest.mark.parametrize("order", [3, 4])
@pytest.mark.parametrize("T", [1.0, 2.0, 4.0])
def test_cumulants_grow_as_predicted(order: int, T: float) -> None:
    found = growth(order, T)
    assert found.measured - 1 == pytest.approx(found.predicted - 1, rel=2e-3)


@pytest.mark.parametrize("order", [3, 4])
@pytest.mark.parametrize("T", [3.0, 4.0])
def test_a_gaussian_attracts_where_values_are_reversed(order: int, T: float) -> None:
    found = growth(order, T, gain=-1.0)
    assert found.measured == pytest.approx(found.predicted, rel=2e-3)
    assert abs(found.predicted) < 1


def test_a_uniform_density_nears_a_gaussian_where_values_are_reversed() -> None:
    x, mass = nodes(lambda x: (x.abs() <= 3**0.5).double(), 3**0.5)
    *_, last = transport(x, mass, 3.0, 30, gain=-1.0)
    start, end = (measure(y, mass) for y in (x, last))
    assert abs(end.kurtosis) < abs(start.kurtosis) / 4
    assert end.energy < start.energy / 10
    *_, last = transport(x, mass, 3.0, 30)
    assert abs(measure(last, mass).kurtosis) > abs(start.kurtosis)


def test_the_variance_of_a_gaussian_repels_under_decay() -> None:
    T, rate = 4.0, 0.8
    assert variance_after(1.0, T, rate) == pytest.approx(1.0)
    slope = (variance_after(1 + 1e-6, T, rate) - variance_after(1 - 1e-6, T, rate)) / 2e-6
    assert slope == pytest.approx(cumulant_growth(2, T), rel=1e-5)


def test_energy_distance_is_that_of_a_plain_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(200, 1, generator=generator).double()
    x = (x - x.mean()) / x.std()
    y, mass = nodes(normal)
    among_x = (x - x.T).abs().mean()
    to_y = ((x - y.T).abs() @ mass).mean()
    expected = (2 * to_y - among_x - 2 / math.sqrt(math.pi)) / (2 / math.sqrt(math.pi))
    found = energy_distance(x, torch.full((200,), 1 / 200, dtype=torch.float64))
    assert found == pytest.approx(float(expected), abs=1e-5)  # the kink of |x − y| between nodes


def test_energy_distance_weighs_points_as_repetitions_do() -> None:
    x = torch.tensor([[-1.0], [0.5], [2.0]], dtype=torch.float64)
    w = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    repeated = x.repeat_interleave(w.long(), dim=0)
    plain = energy_distance(repeated, torch.full((6,), 1 / 6, dtype=torch.float64))
    assert energy_distance(x, w / 6) == pytest.approx(plain, abs=1e-12)


@pytest.mark.parametrize(("gap", "clusters"), [(0.001, 1), (0.05, 2), (2.0, 2)])
def test_clusters_lie_a_hundredth_of_the_size_apart(gap: float, clusters: int) -> None:
    cloud = torch.tensor([[1.0, 0.0], [1.0, gap]]).repeat(20, 1)
    assert measure(cloud).clusters == clusters


def test_normality_tells_gaussians_from_others() -> None:
    limit = null_energy(1000, 4)
    generator = torch.Generator().manual_seed(0)
    found = {name: measure(start(1000, 4, generator)) for name, start in STARTS.items()}
    assert found["gaussian"].energy < 2 * limit
    assert all(found[name].energy > 2 * limit for name in ("uniform", "student", "mixture"))
    assert found["uniform"].kurtosis == pytest.approx(-1.2, abs=0.1)
    assert found["student"].kurtosis > 1
    point = measure(torch.ones(50, 3))
    assert point.clusters == 1
    assert math.isnan(point.energy)


def test_starts_are_standardized() -> None:
    for name, start in STARTS.items():
        x = start(20_000, 4, torch.Generator().manual_seed(0))
        assert x.mean(0).abs().max() < 0.1, name
        assert (x.std(0) - 1).abs().max() < 0.1, name


def test_standardizing_uses_the_masses() -> None:
    x = torch.tensor([[0.0], [1.0], [1.0]], dtype=torch.float64)
    weights = torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64)
    assert standardize(x, weights).flatten().tolist() == [-1.0, 1.0, 1.0]


def test_tokens_on_a_sphere_meet_in_one_point() -> None:
    x = STARTS["gaussian"](200, 4, torch.Generator().manual_seed(0))
    contract = contraction("sphere", 4, 2.0)
    *_, (last, moved) = iterate(contract(x), contract, 2.0, 200)
    assert measure(last).clusters == 1
    assert moved < 1e-5


def test_the_study_runs_prints_and_saves(tmp_path: Path) -> None:
    study = run_study(size=64, steps=12, seeds=2)
    assert "No: a Gaussian is a fixed point that repels." in repr(study)
    paths = save_study(study, tmp_path / "out")
    assert [path.name for path in paths] == ["study.json", "line.png", "tokens.png", "clouds.png"]
    assert all(path.stat().st_size > 1000 for path in paths)
    facts = json.loads(paths[0].read_text())
    assert len(facts["cells"]) == 20
    assert "gaussian, sphere" in facts["fates"]


def test_the_command_prints_json_and_writes_pictures(tmp_path: Path) -> None:
    options = ["--size", "64", "--steps", "3", "--seeds", "1", "--out", str(tmp_path), "--json"]
    result = CliRunner().invoke(cli, ["study", "fixed-point", *options], catch_exceptions=False)
    assert json.loads(result.stdout)["settings"]["size"] == 64
    assert (tmp_path / "clouds.png").exists()
