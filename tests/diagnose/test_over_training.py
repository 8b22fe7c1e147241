"""Instruments against training: at each step, what they say of the weights of that step."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import dualform
from dualform.cli import cli
from dualform.diagnose import Diagnosis, OverTraining, heads, over_training, paths
from dualform.diagnose.heads import AttentionHead, Heads
from dualform.errors import ModelMismatchError, UnknownStepError
from dualform.read import Run
from dualform.testing import tiny_attention_run, tiny_run


@pytest.fixture(scope="module")
def recorded() -> tuple[Run, nn.Module, Tensor]:
    return tiny_attention_run()


def test_each_step_is_a_report_on_its_weights(recorded: tuple[Run, nn.Module, Tensor]) -> None:
    run, model, x = recorded
    before = copy.deepcopy(model.state_dict())
    y = torch.arange(8.0)
    found = over_training(run, model, x, steps=[0, 2, 6], targets=y)
    assert found.steps == (0, 2, 6)
    for step, report, scored in zip(found.steps, found.reports, found.paths, strict=True):
        then = copy.deepcopy(model)
        then.load_state_dict(run.at(step).state_dict())
        assert report.heads == heads(then, x)
        assert scored.each == paths(then, x, targets=y).each
    assert found.reports[-1].findings == dualform.diagnose(model, x, targets=y).findings
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert over_training(run, model, x).steps == (0, 1, 2, 3, 4, 5, 6)


def test_it_prints_plots_and_becomes_a_frame(recorded: tuple[Run, nn.Module, Tensor]) -> None:
    run, model, x = recorded
    found = over_training(run, model, x, steps=[0, 6], targets=torch.arange(8.0))
    assert "the model over training" in repr(found)
    assert "needed most" in repr(found)
    scores = [row.max().item() for row in found.paths[-1].scores]
    block = scores.index(max(scores))
    assert f"layers.{block}, {int(found.paths[-1].scores[block].argmax())}" in repr(found)
    assert found.findings[-1].startswith("At step 6: Paths to the targets use head")
    frame = found.to_pandas()
    assert frame.shape == (2 * 4, 9)
    assert frame["score"].notna().all()
    assert over_training(run, model, x, steps=[6]).to_pandas()["score"].isna().all()
    assert len(found.plot().lines) == 2


def with_overlaps(report: Diagnosis, *overlaps: float) -> Diagnosis:
    """The same report, with pairs of heads of one block that overlap so much."""
    made = [AttentionHead("b", at, 0.5, at ^ 1, overlaps[at // 2]) for at in range(4)]
    return Diagnosis(report.collapse, report.masks, Heads(tuple(made)), ())


def test_it_says_since_when_heads_attend_alike(recorded: tuple[Run, nn.Module, Tensor]) -> None:
    _, model, x = recorded
    report = dualform.diagnose(model, x)
    courses = [(0.99, 0.2), (0.2, 0.2), (0.2, 0.97), (0.2, 0.98)]
    found = OverTraining((0, 10, 20, 30), tuple(with_overlaps(report, *o) for o in courses))
    assert found.findings[1:] == (
        "Heads 2, 3 of b attend alike since step 20.",
        "Heads 0, 1 of b attended alike, and do so no more after step 0.",
    )
    steady = OverTraining((0, 10), (with_overlaps(report, 0.99, 0.1),) * 2)
    assert steady.findings[1:] == ("Heads 0, 1 of b attend alike from the first step on.",)


def test_steps_and_models_of_other_runs_are_refused(
    recorded: tuple[Run, nn.Module, Tensor],
) -> None:
    run, model, x = recorded
    with pytest.raises(UnknownStepError, match="step 7 is not in this run; it has steps 0 to 6"):
        over_training(run, model, x, steps=[7])
    with pytest.raises(UnknownStepError, match="steps is empty; give one step or more"):
        over_training(run, model, x, steps=[])
    block = nn.TransformerEncoderLayer(4, 2, 16, batch_first=True)
    with pytest.raises(ModelMismatchError, match="this is not the recorded model: size mismatch"):
        over_training(run, nn.TransformerEncoder(block, 2, enable_nested_tensor=False), x)


def test_the_command_line(
    recorded: tuple[Run, nn.Module, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, x = recorded
    monkeypatch.chdir(tmp_path)
    Path("attends.py").write_text(
        "import torch\ndef model():\n"
        "    block = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)\n"
        "    return torch.nn.TransformerEncoder(block, 2, enable_nested_tensor=False)\n"
    )
    np.save("x.npy", x.numpy())
    asked = ["diagnose", str(run.path), "--model", "attends:model", "--input", "x.npy"]
    plain = CliRunner().invoke(cli, asked, catch_exceptions=False)
    assert "what the model does" in plain.output
    told = CliRunner().invoke(cli, [*asked, "--json", "--ablate"], catch_exceptions=False)
    answer = json.loads(told.output)
    assert [one["step"] for one in answer["heads"]] == [6] * 4
    assert all(one["damage"] > 0 for one in answer["heads"])
    course = CliRunner().invoke(cli, [*asked, "--step", "0", "--step", "6"], catch_exceptions=False)
    assert "the model over training" in course.output
    np.save("classes.npy", np.sign(np.arange(8) - 3.5))
    asked += ["--targets", "classes.npy", "--json", "--step", "6"]
    scored = json.loads(CliRunner().invoke(cli, asked, catch_exceptions=False).output)
    assert [one["head"] for one in scored["paths"]][:2] == [
        "head 0 of layers.0",
        "head 1 of layers.0",
    ]
    assert "Paths to the targets use" in scored["findings"][-1]
    np.save("classes.npy", np.ones((8, 2)))
    wrong = str(CliRunner().invoke(cli, asked).exception)
    assert "--targets classes.npy: it holds (8, 2); expected one number a query, as .npy" in wrong
    other, _, _ = tiny_run()
    Path("plain.py").write_text(
        "from torch import nn\ndef model():\n"
        "    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))\n"
    )
    np.save("y.npy", np.ones((2, 4), "float32"))
    asked = ["diagnose", str(other.path), "--model", "plain:model", "--input", "y.npy"]
    assert "no self-attention was seen" in str(CliRunner().invoke(cli, asked).exception)
