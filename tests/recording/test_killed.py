"""Training that is killed around a checkpoint goes on from the file it saved last, in any order."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from tests.processes import SERVER
from tests.recording.killed_victim import fresh, main, save, steps
from tests.told import told
from torch import nn

import dualform
from dualform.errors import RecordingWarning
from dualform.ledger.log import open_line

MOMENTS = {"save mark": 9, "mark save": 9, "save": 6}
"""Before the first of each round, after it, and after the second: three rounds."""


@pytest.mark.parametrize("optimizer_name", ["sgd", "adam"])
@pytest.mark.parametrize(
    ("order", "kill_at"), [(order, at) for order, count in MOMENTS.items() for at in range(count)]
)
def test_the_last_file_saved_can_be_gone_on_from(
    order: str, kill_at: int, optimizer_name: str, tmp_path: Path
) -> None:
    victim = SERVER.Process(target=main, args=(tmp_path, order, kill_at, optimizer_name))
    victim.start()
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    model, optimizer = fresh(optimizer_name)
    expected = 0
    if (tmp_path / "saved.pt").exists():
        saved = torch.load(tmp_path / "saved.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        expected = saved["step"]
    with dualform.record(model, optimizer, tmp_path / "run", resume=True) as recorder:
        assert recorder.step == expected
        steps(model, optimizer, 3, recorder)
    run = dualform.open(tmp_path / "run")
    assert run.steps == expected + 3
    audit = run.audit()
    assert audit.coverage == 1.0
    assert audit.remainder <= 1e-12


def kept_after(tmp_path: Path, per_step: str) -> list[int]:
    """The steps kept in a loop that asks for states in some way at each of its six steps."""
    model, optimizer = fresh("sgd")
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(6):
            if "model" in per_step:
                model.state_dict()
            if "optimizer" in per_step:
                optimizer.state_dict()
            if "live" in per_step:
                model.state_dict(keep_vars=True)
            if "part" in per_step:
                model[0].state_dict()
            steps(model, optimizer, 1, recorder)
    assert not model._state_dict_pre_hooks
    assert not optimizer._optimizer_state_dict_pre_hooks
    return dualform.open(tmp_path / "run").kept_steps


@pytest.mark.parametrize(
    "asked", ["", "model", "optimizer", "live optimizer", "part optimizer", "model live"]
)
def test_one_state_alone_is_no_checkpoint(asked: str, tmp_path: Path) -> None:
    """Averages of weights and logged learning rates must not fill the disk."""
    assert kept_after(tmp_path, asked) == [0, 6]


def test_both_states_are_a_checkpoint(tmp_path: Path) -> None:
    assert kept_after(tmp_path, "model optimizer") == [0, 1, 2, 3, 4, 5, 6]


def test_a_step_is_kept_once(tmp_path: Path) -> None:
    """Saving marks it; `checkpoint` before or after adds nothing, unless weights were changed."""
    model, optimizer = fresh("sgd")
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        steps(model, optimizer, 2, recorder)
        recorder.checkpoint()
        save(tmp_path, model, optimizer, recorder.step)
        recorder.checkpoint()
        steps(model, optimizer, 1, recorder)
    marks = _marks(tmp_path / "run")
    assert marks == [(2, "checkpoint"), (3, "final")]


def _marks(path: Path) -> list[tuple[int, str]]:
    (log,) = path.glob("writer-*/commits.jsonl")
    records = map(open_line, log.read_bytes().splitlines(keepends=True))
    return [(r["step"], r["mark"]) for r in records if r is not None and r["kind"] == "weights"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_scripted_models_are_marked_by_hand(tmp_path: Path) -> None:
    model = torch.jit.script(nn.Linear(6, 3).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "run"
    with told(path), dualform.record(model, optimizer, path, strict=True) as recorder:
        steps(model, optimizer, 2, recorder)
        recorder.checkpoint()
        save(tmp_path, model, optimizer, recorder.step)
        steps(model, optimizer, 1, recorder)
    assert dualform.open(tmp_path / "run").kept_steps == [0, 2, 3]


def test_copies_save_as_before(tmp_path: Path) -> None:
    """A model saved as a whole takes no hook with it."""
    model, optimizer = fresh("sgd")
    with (
        pytest.warns(RecordingWarning, match="saw no step"),
        dualform.record(model, optimizer, tmp_path / "run"),
    ):
        torch.save(model, tmp_path / "model.pt")
    copy = torch.load(tmp_path / "model.pt", weights_only=False)
    assert isinstance(copy, nn.Module)
    assert copy.state_dict().keys() == model.state_dict().keys()
