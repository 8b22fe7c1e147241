"""Trainers that are killed around a checkpoint go on from the last one that is whole."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.killed_lightning import train_lightning
from tests.integrations.killed_transformers import train_transformers, transformers_trainer
from tests.processes import SERVER

import dualform

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated"),
]


def kill(train: Callable[..., Any], folder: Path, how: str) -> None:
    victim = SERVER.Process(target=train, args=(folder, how))
    victim.start()
    victim.join()
    assert victim.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("how", ["usual", "only the model", "late"])
def test_transformers(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    kill(train_transformers, tmp_path, how)
    assert {2, 4} <= set(dualform.open(tmp_path / "run").kept_steps)
    trainer = transformers_trainer(tmp_path, how, kill=False)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    run = dualform.open(tmp_path / "run")
    assert run.steps == trainer.state.global_step == 12
    assert run.audit().remainder <= 1e-6


@pytest.mark.parametrize(("how", "step"), [("before", 2), ("after", 4)])
def test_lightning(how: str, step: int, tmp_path: Path) -> None:
    kill(train_lightning, tmp_path, how)
    assert {2, 4} <= set(dualform.open(tmp_path / "run").kept_steps)
    train_lightning(tmp_path, "", resume=tmp_path / f"step={step}.ckpt")
    run = dualform.open(tmp_path / "run")
    assert run.steps == 12
    assert run.audit().remainder <= 1e-6
