"""accelerate, the transformers Trainer and Lightning in two processes: one run of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.integrations.distributed import (
    accelerated,
    by_lightning,
    by_sharding_trainer,
    by_trainer,
)
from tests.integrations.one_hot import COUNT
from tests.recording.trained_by import Task, trained_by

import dualform


@pytest.mark.parametrize(
    ("task", "passes", "layer"),
    [
        (accelerated, 2, "first"),
        pytest.param(by_trainer, 1, "first", marks=pytest.mark.long),
        pytest.param(by_sharding_trainer, 1, "first", marks=pytest.mark.long),
        pytest.param(by_lightning, 1, "net.first", marks=pytest.mark.long),
    ],
)
def test_two_processes_are_recorded(task: Task, passes: int, layer: str, tmp_path: Path) -> None:
    trained_by(2, task, tmp_path)
    run = dualform.open(tmp_path / "run")
    audit = run.audit()
    assert audit.remainder <= 1e-6
    assert audit.coverage == 1.0
    assert run.ids == list(range(COUNT))
    diaries = [json.loads((tmp_path / f"diary-{rank}.json").read_text()) for rank in range(2)]
    batches = len(diaries[0]) // 2  # an epoch's, of which the last step may be shorter
    steps = -(-batches // passes)
    trained = {
        (sample, 1 + at // batches * steps + at % batches // passes)
        for diary in diaries
        for at, batch in enumerate(diary)
        for sample in batch
    }
    rows = run.revisit(run.ids)[layer].rows(10_000).rows
    assert {(row.id, row.step) for row in rows} == trained
    assert run.steps == 2 * steps
