"""The study of the fixed point: what its closed forms say is what its simulations do."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from dualform.cli import cli
from dualform.studies.fixed_point import (
    SETTINGS,
    FixedPointSetting,
    continuum,
    run_study,
    stability,
    study,
)
from dualform.studies.fixed_point.continuum import (
    ATTRACTS_FROM,
    cumulant_growth,
    follow,
    growth,
    nodes,
    normal,
    variance_after,
)
from dualform.studies.fixed_point.dynamics import (
    ATTRACT,
    CONTRACTIONS,
    REPEL,
    contraction,
    iterate,
    learned_moments,
    learned_norm,
    standardize,
    transport,
    whiten,
)
from dualform.studies.fixed_point.normality import energy_distance, measure, null_range
from dualform.studies.fixed_point.stability import escape, line_factor, simplex
from dualform.studies.fixed_point.starts import STARTS
from dualform.studies.report import Report, read_tables

CASES = [(T, m, s) for T in (2.5, 4.0) for m, s in ((0.0, 1.0), (0.7, 1.0), (0.5, 0.8))]


@pytest.mark.parametrize("order", [3, 4])
@pytest.mark.parametrize("gain", [1.0, -1.0])
@pytest.mark.parametrize(("T", "mean", "deviation"), [(1.5, 0.0, 1.0), *CASES])
def test_cumulants_change_as_derived(
    order: int, gain: float, T: float, mean: float, deviation: float
) -> None:
    found = growth(order, T, gain, mean, deviation)
    assert found.measured == pytest.approx(found.predicted, rel=2e-3)


@pytest.mark.parametrize("gain", [1.0, -1.0])
def test_a_factor_is_that_of_a_plain_loop(gain: float) -> None:
    """Sums over a grid, token by token, without the study's transport or measurements."""
    T, m, s, order, trace = 3.0, 0.4, 1.1, 3, 1e-4
    z = np.linspace(-9, 9, 1801)
    mass = np.exp(-(z**2) / 2) * (1 + trace * (z**3 - 3 * z) / 6)
    mass /= mass.sum()
    x = m + s * z
    moved = np.empty_like(x)
    for i, token in enumerate(x):
        weights = mass * np.exp(token * x / T - np.max(token * x / T))
        moved[i] = token + gain * (weights @ x) / weights.sum()
    z_after = moved - mass @ moved
    z_after /= np.sqrt(mass @ z_after**2)
    factor = (mass @ z_after**order) / (mass @ z**order)
    assert factor == pytest.approx(cumulant_growth(order, T, gain, s), abs=1e-3)


def test_a_gaussian_attracts_from_where_it_is_said_to() -> None:
    orders = range(3, 40)
    inside = [abs(cumulant_growth(k, ATTRACTS_FROM + 1e-6, -1.0)) < 1 for k in orders]
    outside = [abs(cumulant_growth(k, ATTRACTS_FROM - 1e-6, -1.0)) < 1 for k in orders]
    assert all(inside)
    assert outside == [False] + [True] * (len(outside) - 1)
    assert min(cumulant_growth(k, T, 1.0) for k in orders for T in (0.5, 1.0, 2.0)) > 1
    slow = [1 - cumulant_growth(k, 3.0, -1.0) for k in orders]
    assert slow == sorted(slow, reverse=True)


def test_skewness_and_kurtosis_vanish_where_values_are_reversed() -> None:
    path = follow("skewed", 3.0, 200, gain=-1.0)
    assert path.skewness[0] == pytest.approx(1.22, abs=0.01)
    assert path.skewness[-1] < 0.002
    assert abs(path.kurtosis[-1]) < 0.01 < path.kurtosis[0]
    attracted = follow("skewed", 3.0, 20)
    assert attracted.skewness[-1] > 1.5


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
    null = null_range(1000, 4)
    limit = null.energy
    generator = torch.Generator().manual_seed(0)
    found = {name: measure(start(1000, 4, generator)) for name, start in STARTS.items()}
    assert found["gaussian"].energy < 2 * limit
    assert all(found[name].energy > 2 * limit for name in ("uniform", "student", "mixture"))
    assert found["uniform"].kurtosis == pytest.approx(-1.2, abs=0.1)
    assert found["student"].kurtosis > 1
    sphere = torch.randn(1000, 4, generator=generator)
    sphere = measure(sphere / sphere.norm(dim=1, keepdim=True))
    assert sphere.radius < null.low < found["gaussian"].radius < null.high < found["student"].radius
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


def test_tokens_on_a_sphere_spread_where_values_are_reversed() -> None:
    """A uniform distribution on a sphere in d dimensions has a kurtosis of −6/(d + 2)."""
    x = STARTS["mixture"](800, 3, torch.Generator().manual_seed(0))
    contract = contraction("sphere", 3, 2.0)
    *_, (last, _) = iterate(contract(x), contract, 2.0, 60, REPEL)
    found = measure(last)
    assert found.spread > 0.98
    assert found.kurtosis == pytest.approx(-6 / 5, abs=0.05)
    assert last.mean(0).norm() < 0.05


def test_learned_contractions_restore_what_they_learned() -> None:
    x = torch.randn(400, 5, generator=torch.Generator().manual_seed(0)).double()
    y = learned_moments(5)(x)
    other = learned_moments(5)(x * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]) + 7)
    centered, apart = y - y.mean(0), other - other.mean(0)
    torch.testing.assert_close(y.mean(0), other.mean(0))
    torch.testing.assert_close(centered.T @ centered, apart.T @ apart)
    values = torch.linalg.eigvalsh(centered.T @ centered / 400)
    torch.testing.assert_close(values, torch.linspace(0.5, 1.5, 5).double(), rtol=1e-5, atol=0)
    white = whiten(x)
    torch.testing.assert_close(white.T @ white / 400, torch.eye(5).double(), rtol=0, atol=1e-10)
    norm = learned_norm(5)
    shift = norm(torch.ones(1, 5).double())  # of a row without variance, nothing else is left
    plain = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True, correction=0)
    scale = (norm(x) - shift) / plain
    torch.testing.assert_close(scale, scale[:1].expand_as(scale))
    assert scale[0].std() > 0.05 < shift.std()


@pytest.mark.parametrize("T", [2.0, 4.0, 8.0])
def test_one_cluster_holds_on_a_sphere_and_more_drift(T: float) -> None:
    assert escape(1, 8, T).is_stable
    drifts = [escape(clusters, 8, T).between for clusters in (2, 3, 4, 6)]
    assert 1 < drifts[0] == pytest.approx(1 + math.exp(-2 * 8 / T), abs=1e-9)
    assert drifts == sorted(drifts)
    assert all(escape(clusters, 8, T).within < 1 for clusters in (1, 2, 3, 4, 6))


def test_the_drift_of_two_clusters_is_that_of_a_simulation() -> None:
    T, width = 4.0, 4
    x = simplex(2, width)
    x[:, 1] += 1e-6  # both bend to the same side
    project = contraction("sphere", width, T)
    sizes = [float(cloud[:, 1].abs().mean()) for cloud, _ in iterate(project(x), project, T, 20)]
    factors = [b / a for a, b in itertools.pairwise(sizes[5:])]
    assert factors == pytest.approx([escape(2, width, T).between] * len(factors), rel=1e-6)


@pytest.mark.parametrize(("mass", "holds"), [(0.5, True), (0.3, False), (0.02, True)])
def test_masses_that_hold_are_those_that_a_simulation_keeps(mass: float, holds: bool) -> None:
    T, weights = 4.0, torch.tensor([mass, 1 - mass]).double()
    assert (line_factor(weights, torch.tensor([-1.0, 1.0]).double(), T) < 1) == holds
    apart = torch.tensor([-1.0, -1.0, 1.0, 1.0]).double()[:, None]
    split = torch.tensor([mass / 2, mass / 2, (1 - mass) / 2, (1 - mass) / 2]).double()
    apart = standardize(apart + 1e-4 * torch.tensor([-1.0, 1.0, -1.0, 1.0])[:, None], split)
    *_, last = transport(apart, split, T, 600)
    gaps = (last[1] - last[0]).abs() + (last[3] - last[2]).abs()
    assert (float(gaps) < 1e-4) == holds


def test_three_clusters_need_a_heavy_one_between() -> None:
    thin, equal = (torch.tensor([q, 1 - 2 * q, q]).double() for q in (0.01, 1 / 3))
    places = torch.tensor([-1.0, 0.0, 1.0]).double()
    assert line_factor(thin, places, 2.0) < 1 < line_factor(equal, places, 2.0)


@pytest.mark.parametrize("count", [4, 5, 6])
def test_equal_clusters_merge_to_two(count: int) -> None:
    x = torch.linspace(-1, 1, count).double()[:, None]
    *_, last = transport(standardize(x), torch.full((count,), 1 / count).double(), 2.0, 1500)
    assert len({round(place, 6) for place in last.flatten().tolist()}) == 2


@pytest.mark.parametrize("T", [1.5, 3.0, 8.0])
def test_no_two_clusters_hold_where_values_are_reversed(T: float) -> None:
    """Half of a cluster leaves the other half by (1 − u/cosh² u)/(1 − tanh u), u = 1/T, a step."""
    u, gap = 1 / T, 1e-6
    x = torch.tensor([-1.0, -1.0 + gap, 1.0 - gap, 1.0], dtype=torch.float64)[:, None]
    mass = torch.full((4,), 0.25).double()
    before, after = transport(standardize(x), mass, T, 1, REPEL)
    factor = float(after[1] - after[0]) / float(before[1] - before[0])
    expected = (1 - u / math.cosh(u) ** 2) / (1 - math.tanh(u))
    assert abs(factor) == pytest.approx(expected, rel=1e-4)
    assert expected > 1


TINY = FixedPointSetting(64, 12, 12, seeds=2, sizes=(64,))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    out = tmp_path_factory.mktemp("study")
    patch = pytest.MonkeyPatch()
    patch.setattr(continuum, "NODES", 300)
    patch.setattr(study, "TEMPERATURES", (2.0, 3.0))
    patch.setattr(stability, "GRID", 20)
    found = run_study(TINY, None, "cpu", out)
    patch.undo()
    found.save(out)
    return found, out


def test_the_study_answers_for_both_signs(report: tuple[Report, Path]) -> None:
    found, out = report
    said = " ".join(found.findings)
    assert "No: a Gaussian is a fixed point that repels." in said
    assert "With values −x a Gaussian attracts at orders 3 and 4" in said
    assert "stable numbers of equal clusters are: 1." in said
    assert all(sentence.endswith(".") for sentence in found.findings)
    tables = read_tables(out / "study.json")
    assert len(tables[2].rows) == len(STARTS) * len(CONTRACTIONS[ATTRACT])
    assert len(tables[3].rows) == len(STARTS) * len(CONTRACTIONS[REPEL])
    assert {row[2] for row in tables[3].rows} == {"stays spread"}
    for picture in found.pictures:
        assert (out / picture.file).stat().st_size > 5000, picture.file


def test_the_command_goes_on_where_it_was_interrupted(
    report: tuple[Report, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, out = report
    (out / "parts" / "uniform-seed-1.json").unlink()
    monkeypatch.setitem(SETTINGS, "small", TINY)
    options = ["--out", str(out), "--json"]
    result = CliRunner().invoke(cli, ["study", "fixed-point", *options], catch_exceptions=False)
    again = json.loads(result.stdout)
    assert again["settings"]["size"] == 64
    assert again["findings"] == list(found.findings)
    assert json.loads((out / "study.json").read_text()) == again
