"""The study of robust attention, on tiny pictures that the test writes itself."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tests.studies.tiny_images import write_images
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dualform.cli import cli
from dualform.errors import EvaluationError, ReadingError
from dualform.studies.encoders import EncoderShape
from dualform.studies.report import read_tables
from dualform.studies.robust import SETTINGS, RobustSetting, run_study
from dualform.studies.robust.contamination import (
    add_noise,
    corrupt_tokens,
    fast_gradient,
    projected_gradient,
)
from dualform.studies.robust.setting import LAYERS, TRAININGS
from dualform.studies.robust.training import (
    PixelClassifier,
    attacked,
    load_pixels,
    measure_training,
    sparse_shares,
)

TINY = RobustSetting(
    EncoderShape(width=8, heads=2, hidden=16, layers=1, dropout=0.0),
    patch=1,
    images=100,
    tests=60,
    attacked=40,
    epochs=1,
    rate=1e-2,
    seeds=2,
    batch=20,
    tokens=(0.25,),
    noise=(0.2,),
    steps=(0.05, 0.2),
    pgd_steps=3,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_images(folder / "mnist", seed=0, count=100)
    return folder


def drawn() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def a_model() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.rand(20, 4, 4)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 10)), x, torch.arange(20) % 10


def test_whole_patches_are_replaced_and_nothing_else() -> None:
    x = torch.rand(5, 6, 6, generator=drawn())
    moved, where = corrupt_tokens(x, 1 / 3, 2, drawn())
    assert where.sum(1).tolist() == [3] * 5
    changed = (moved != x).unfold(1, 2, 2).unfold(2, 2, 2).flatten(3).flatten(1, 2)
    assert torch.equal(changed.all(-1), where)
    assert torch.equal(changed.any(-1), where)
    assert torch.equal(moved, corrupt_tokens(x, 1 / 3, 2, drawn())[0])


def test_noise_has_its_deviation_where_it_is_not_cut_off() -> None:
    x = torch.full((100, 8, 8), 0.5)
    moved = add_noise(x, 0.1, drawn())
    assert float((moved - x).std()) == pytest.approx(0.1, rel=0.05)
    assert float(add_noise(x, 10.0, drawn()).max()) == 1


@pytest.mark.parametrize("step", [0.01, 0.1])
def test_attacks_raise_the_loss_and_stay_near(step: float) -> None:
    """For a linear model FGSM is the worst there is, and PGD gets as far."""
    model, x, y = a_model()
    losses = {"none": cross_entropy(model(x), y)}
    for name, moved in (
        ("FGSM", fast_gradient(model, x, y, step)),
        ("PGD", projected_gradient(model, x, y, step, 10, drawn())),
    ):
        assert float((moved - x).abs().max()) <= step + 1e-6
        assert float(moved.min()) >= 0
        assert float(moved.max()) <= 1
        losses[name] = cross_entropy(model(moved), y)
    found = {name: float(loss.detach()) for name, loss in losses.items()}
    assert found["FGSM"] > found["none"]
    assert found["PGD"] == pytest.approx(found["FGSM"], rel=1e-2)


def test_what_is_drawn_is_the_same_for_every_layer(data: Path) -> None:
    """And answers are those of the model to what it is given."""
    _, test = load_pixels(data, TINY)
    seen: list[Tensor] = []

    class Remembers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.detach())
            return torch.nn.functional.one_hot(test.y[: len(x)], 10) + 0 * x.sum()

    for _ in range(2):
        right = attacked(Remembers(), test, 3, TINY)
        assert set(right) == set(TINY.conditions())
        assert set(right.values()) == {1.0}
    first, second = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_layers_with_one_seed_start_from_the_same_weights(data: Path) -> None:
    train, _ = load_pixels(data, TINY)
    starts = []
    for layer in LAYERS:
        torch.manual_seed(0)
        starts.append(PixelClassifier(train, layer, TINY).state_dict())
    assert all(torch.equal(value, own[name]) for own in starts for name, value in starts[0].items())


def test_where_the_sparse_part_lies(data: Path) -> None:
    """In keys that are made huge by their token, nearly all of it."""
    train, test = load_pixels(data, TINY)
    model = PixelClassifier(train, "robust", TINY)
    for layer in ("softmax", "symmetric"):
        assert sparse_shares(PixelClassifier(train, layer, TINY), test, 0, TINY) is None
    found = sparse_shares(model, test, 0, TINY)
    assert found is not None
    assert 0 < found["S"] < 1
    bright = replace_corrupted_keys(model)
    found = sparse_shares(bright, test, 0, TINY)
    assert found is not None
    assert found["S"] > 0.9 * (1 - 1e-6)
    torch.manual_seed(0)
    nothing = PixelClassifier(train, "robust", TINY)
    nothing.first_attention().options["sparsity"] = 1e6
    found = sparse_shares(nothing, test, 0, TINY)
    assert found is not None
    assert math.isnan(found["S"])
    assert found["K"] > 0


def replace_corrupted_keys(model: PixelClassifier) -> PixelClassifier:
    """The first layer's keys are large for the tokens that `sparse_shares` corrupts."""
    _, where = corrupt_tokens(torch.zeros(60, 4, 4), 0.25, 1, drawn())
    module = model.first_attention()
    plain = module.heads

    def heads(*rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = plain(*rows)
        return q, torch.where(where[:, None, :, None], 1000.0, k), v

    module.heads = heads  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_learns_and_can_be_attacked(data: Path, layer: str) -> None:
    longer = replace(TINY, epochs=12)
    train, test = load_pixels(data, longer)
    found = measure_training(train, test, layer, False, 0, longer, "cpu")["right"]
    assert found["clean"] >= 0.5
    assert found["PGD 0.2"] < found["clean"]


def test_the_study_compares_layers_and_goes_on(data: Path, tmp_path: Path) -> None:
    quick = replace(TINY, layers=("softmax", "robust", "symmetric", "published"))
    run_study(data, quick, 1, "cpu", tmp_path).save(tmp_path)
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "parts").glob("*seed-0.json")}
    assert len(kept) == len(quick.layers) * len(TRAININGS)
    report = run_study(data, quick, 2, "cpu", tmp_path)
    report.save(tmp_path)
    assert kept == {file: file.stat().st_mtime_ns for file in kept}
    answers, gains, *_, costs = read_tables(tmp_path / "study.json")
    assert gains.columns == ("test images", "robust − softmax", "published − symmetric")
    for right, gain in zip(answers.rows, gains.rows, strict=True):
        assert gain[1].mean == pytest.approx(right[2].mean - right[1].mean, abs=1e-6)
        assert gain[2].mean == pytest.approx(right[4].mean - right[3].mean, abs=1e-6)
    flops = {row[0]: row[2] for row in costs.rows}
    assert flops["softmax"] == flops["symmetric"] < flops["robust"] == flops["published"]
    assert report.findings[0].startswith("robust against softmax: of 14 differences, ")
    for picture in ("accuracy.png", "gains.png"):
        assert (tmp_path / picture).stat().st_size > 5000
    with pytest.raises(EvaluationError, match=r"other settings: patch=2 \(there 1\)"):
        run_study(data, replace(quick, patch=2), 1, "cpu", tmp_path)


def test_from_the_shell(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "small", TINY)
    given = ["study", "robust", "--data", str(data), "--kind", "published", "--seeds", "1"]
    done = CliRunner().invoke(
        cli, [*given, "--out", str(tmp_path), "--json"], catch_exceptions=False
    )
    found = json.loads(done.stdout)
    assert found["settings"]["layers"] == "published"
    assert [one["file"] for one in found["pictures"]] == ["accuracy.png"]


def test_errors(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ReadingError, match="images of 4 pixels are no whole patches of 3"):
        load_pixels(data, replace(TINY, patch=3))
    with pytest.raises(ReadingError, match="layer 'sparse' is not in this study; it has softmax, "):
        run_study(data, replace(TINY, layers=("sparse",)), 1, "cpu", tmp_path)
