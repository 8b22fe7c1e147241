"""The study of collapse on tiny networks and a text of the test's own, against plain loops."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from dualform.cli import cli
from dualform.errors import ReadingError
from dualform.studies.collapse import SETTINGS, CollapseSetting, run_study
from dualform.studies.collapse.measure import CollapseMeasurement, by_depth
from dualform.studies.collapse.networks import MixingBlock, random_blocks
from dualform.studies.collapse.results import CollapseResults, factor
from dualform.studies.collapse.setting import MASKS, NORMS, Architecture
from dualform.studies.collapse.training import HiddenCharacters
from dualform.studies.parts import Found
from dualform.studies.report import Report, read_tables

TINY = CollapseSetting(
    tokens=7,
    width=6,
    depth=4,
    samples=2,
    widths_qk=(2, 8),
    sharpnesses=(1.0, 2.0),
    seeds=2,
    trained_width=8,
    trained_depth=2,
    steps=3,
    batch=2,
    trained_seeds=2,
)
TEXT = "the fox saw the grapes, and the grapes saw the fox. " * 30


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text").mkdir()
    (folder / "text" / "tinyshakespeare.txt").write_text(TEXT, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def found(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    out = tmp_path_factory.mktemp("study")
    return run_study(data, TINY, None, "cpu", out), out


def normed(x: list[float]) -> list[float]:
    """LayerNorm of one token."""
    mean = sum(x) / len(x)
    variance = sum((a - mean) ** 2 for a in x) / len(x)
    return [(a - mean) / (variance + 1e-5) ** 0.5 for a in x]


def plain_block(block: MixingBlock, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """One sample through one block, token by token, and its weights."""
    own, count = block.architecture, len(x)
    inner = [normed(row.tolist()) if own.norm == "pre" else row.tolist() for row in x]
    rows = torch.tensor(inner, dtype=torch.float64)
    Q, K, V = (w.weight.detach().double() for w in (block.q, block.k, block.v))
    A = torch.zeros(count, count, dtype=torch.float64)
    y = torch.zeros_like(rows)
    for i in range(count):
        scores = {
            j: float((Q @ rows[i]) @ (K @ rows[j])) / own.width_qk**0.5
            for j in range(count)
            if mask[i, j]
        }
        top = max(scores.values())
        weights = {j: math.exp(s - top) for j, s in scores.items()}
        for j, weight in weights.items():
            A[i, j] = weight / sum(weights.values())
            y[i] += A[i, j] * (V @ rows[j])
    y = x + y if own.residual else y
    if own.norm == "post":
        y = torch.tensor([normed(row.tolist()) for row in y], dtype=torch.float64)
    return y, A


def tau(A: Tensor) -> float:
    return max(float((a - b).abs().sum()) / 2 for a in A for b in A)


@pytest.mark.parametrize("mask", [*MASKS])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("residual", [False, True])
def test_measures_are_those_of_plain_loops(mask: str, norm: str, residual: bool) -> None:
    torch.manual_seed(0)
    blocks = random_blocks(TINY, Architecture(mask, norm, residual, 2, 1.5))
    x = torch.randn(1, 7, 6)
    found, y, product = by_depth(blocks, x), x[0].double(), torch.eye(7).double()
    sees = [[MASKS[mask](7)[i, j] for j in range(7)] for i in range(7)]
    for at, block in enumerate(blocks, 1):
        assert isinstance(block, MixingBlock)
        y, A = plain_block(block, y, torch.tensor(sees))
        product = A @ product
        apart = float((y - y.mean(0)).norm())
        assert found["distance"][at] == pytest.approx(apart, rel=1e-9)
        assert found["relative"][at] == pytest.approx(apart / float(y.norm()), rel=1e-9)
        stable = float((y.norm() / torch.linalg.svdvals(y)[0]) ** 2)
        assert found["stable_rank"][at] == pytest.approx(stable, rel=1e-9)
        assert found["contraction"][at - 1] == pytest.approx(tau(A), abs=1e-9)
        assert found["together"][at - 1] == pytest.approx(tau(product), abs=1e-9)
        assert found["least"][at - 1] == pytest.approx(float(A[A > 0].min()), rel=1e-9)


def expected_mask(name: str) -> Callable[[int, int], bool]:
    return {
        "complete": lambda i, j: True,
        "causal": lambda i, j: j <= i,
        "local": lambda i, j: abs(i - j) <= 2,
        "sliding": lambda i, j: 0 <= i - j <= 2,
        "global token": lambda i, j: abs(i - j) <= 2 or i == 0 or j == 0,
    }[name]


@pytest.mark.parametrize("name", [*MASKS])
def test_masks_are_what_they_are_called(name: str) -> None:
    mask = MASKS[name](9)
    assert all(bool(mask[i, j]) == expected_mask(name)(i, j) for i in range(9) for j in range(9))


def test_scores_of_random_tokens_have_the_size_that_is_asked_for() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 32, 32)
    for width in (2, 8, 32):
        for sharpness in (0.5, 2.0):
            sizes = []
            for _ in range(20):
                block = MixingBlock(32, 32, Architecture(width_qk=width, sharpness=sharpness))
                scores = block.q(x) @ block.k(x).mT / width**0.5
                sizes.append(float(scores.detach().square().mean()))
            assert (sum(sizes) / 20) ** 0.5 == pytest.approx(sharpness, rel=0.25)


def test_training_teaches_hidden_characters() -> None:
    setting = replace(TINY, tokens=12, trained_width=16, steps=120, batch=16, rate=1e-2)
    task = HiddenCharacters(TEXT, setting)
    found = CollapseMeasurement(setting, task, "cpu").trained(
        0, Architecture("causal", "pre", True)
    )
    assert found["after"]["loss"] < found["before"]["loss"] - 0.5
    assert found["before"]["relative"] != found["after"]["relative"]
    asked, hidden, told = task.windows(500, torch.Generator().manual_seed(0))
    assert float(hidden.float().mean()) == pytest.approx(setting.hidden, abs=0.02)
    words = ["".join(task.alphabet[at] for at in row) for row in told[:20].tolist()]
    assert all(word in TEXT for word in words)
    learned_from, (_, asked_for, letters) = TEXT[: int(len(TEXT) * 0.9)], task.test
    hidden_letters = [task.alphabet[at] for at in letters[asked_for].tolist()]
    logs = [-math.log(learned_from.count(c) / len(learned_from)) for c in hidden_letters]
    assert task.loss_of_frequencies == pytest.approx(sum(logs) / len(logs))
    assert bool((asked[hidden] == len(task.alphabet)).all())
    assert torch.equal(asked[~hidden], told[~hidden])


def test_factors_are_geometric_means_until_rounding() -> None:
    assert factor([3.0 * 0.5**t for t in range(10)]) == pytest.approx(0.5)
    shares = [10.0 ** (-3 * t) for t in range(5)]
    assert factor([*shares, 1e-17, 3e-17, 2e-17]) == pytest.approx(1e-3)


def test_a_report_says_what_the_networks_do(found: tuple[Report, Path], data: Path) -> None:
    report, out = found
    assert {path.name for path in report.save(out)} == {
        "study.json",
        "study.md",
        *(f"{name}.png" for name in ("random", "bounds", "widths", "trained")),
    }
    assert all((out / picture.file).stat().st_size > 5000 for picture in report.pictures)
    alone, *_ = read_tables(out / "study.json")
    assert [row[0] for row in alone.rows] == [*MASKS]
    assert [row[1] for row in alone.rows] == [1, 1, 2, 3, 1]
    said = " ".join(report.findings)
    assert "The bound holds in 30 of 30 cases" in said  # 2 seeds of 4 + 4 + 2 + 1 + 4 depths
    trained = read_tables(out / "study.json")[-1]
    assert len(trained.rows) == len(TINY.trained()) == 11
    again = run_study(data, TINY, None, "cpu", out)
    assert again.findings == report.findings


def test_sentences_follow_the_numbers() -> None:
    """Made-up networks in which only sliding windows keep tokens apart."""

    def made(mask: str) -> Found:
        share = [0.9**t if mask == "sliding" else 10.0 ** (-2 * t) for t in range(5)]
        return {
            "distance": share,
            "relative": share,
            "stable_rank": [1.0] * 5,
            "cosine": [1.0] * 5,
            "contraction": [1.0 if mask == "sliding" else 0.5] * 4,
            "together": share[1:],
            "least": [0.3] * 4,
            "loss": 2.0,
        }

    seeds = [{one.name: made(one.mask) for one in TINY.random()}] * 2
    trained = {
        one: [{"before": made(one.mask), "after": made(one.mask)}] * 2 for one in TINY.trained()
    }
    from dualform.studies.collapse.findings import findings

    said = findings(CollapseResults(TINY, seeds, trained, loss_of_frequencies=1.9))
    assert "complete 0.01 ± 0" in said[0]
    assert "sliding 0.9 ± 0" in said[0]
    assert said[1] == (
        "After 4 blocks of it all tokens are one under complete, causal, local, global token; left "
        "of μ/‖X‖ is otherwise: sliding 0.66."
    )
    assert "of single blocks says nothing under sliding:" in " ".join(said)
    assert "nowhere beyond chance" in " ".join(said)
    assert "are 0 of 11 trained networks." in said[-1]
    better = findings(CollapseResults(TINY, seeds, trained, loss_of_frequencies=2.1))
    assert (
        "are 11 of 11 trained networks: complete, pre-norm, residual, d_qk 8: 2 ± 0;" in better[-1]
    )


@pytest.mark.usefixtures("undrawn")
def test_the_command_runs(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "small", replace(TINY, seeds=1, trained_seeds=1))
    asked = ["study", "collapse", "--data", str(data), "--out", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(cli, asked)
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["name"] == "collapse"
    (tmp_path / "text").mkdir()
    with pytest.raises(ReadingError, match=r"has neither tinyshakespeare\.txt nor"):
        run_study(tmp_path, TINY, 1, "cpu", tmp_path / "none")


def test_settings_are_what_they_say() -> None:
    for setting in SETTINGS.values():
        assert len({one.name for one in setting.random()}) == len(setting.random())
        assert Architecture().width_qk in setting.widths_qk
        assert 1.0 in setting.sharpnesses
