"""Processes that train together record one run: that of one process on the same batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.recording.distributed_loops import BATCH, LOOPS, STEPS, train, train_all
from tests.recording.refused_loops import refuse_all
from tests.recording.trained_by import trained_by

import dualform

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs of two processes and of one."""
    folder = tmp_path_factory.mktemp("processes")
    trained_by(2, train_all, folder / "two")
    return folder


@pytest.mark.parametrize("name", LOOPS)
def test_two_processes_record_what_one_does(name: str, runs: Path) -> None:
    loop, data = LOOPS[name], LOOPS[name].inputs()
    data = data.to(loop.dtype) if data.is_floating_point() else data
    model, tolerance = train(name, 0, 1, runs / "one" / name), TOLERANCE[loop.dtype]
    one, two = (dualform.open(runs / by / name) for by in ("one", "two"))
    assert two.steps == one.steps == STEPS
    assert list(two.source.ledger.check()) == []
    assert not two.source.ledger.unfinished
    audits = one.audit(), two.audit()
    assert audits[1].remainder < max(1e-12, 10 * tolerance)
    assert audits[0].coverage == audits[1].coverage
    for own, other in zip(audits[0].books, audits[1].books, strict=True):
        assert (own.name, own.granularity, own.rows) == (other.name, other.granularity, other.rows)
    for part, weight in two.state_dict().items():
        torch.testing.assert_close(weight, model.state_dict()[part], rtol=tolerance, atol=tolerance)
    if loop.ids is None:
        assert sorted(two.ids) == list(range(STEPS * BATCH))
        return
    answers = []
    for run in (one, two):
        model.load_state_dict(run.state_dict())
        spotlight = run.spotlight(model, data[:2])
        found = {layer: spotlight[layer].samples() for layer in spotlight}
        answers.append({**found, "explain": run.explain(model, data[:2], target=0)})
    for read, expected in answers[0].items():
        assert set(answers[1][read].ids) == set(expected.ids)
        at = [answers[1][read].ids.index(sample) for sample in expected.ids]
        gap = np.abs(answers[1][read].values[at] - expected.values).max()
        assert gap <= 10 * tolerance * np.abs(expected.values).max(), read


def test_what_cannot_be_one_run_is_refused_in_all_processes(tmp_path: Path) -> None:
    trained_by(2, refuse_all, tmp_path)
    assert dualform.open(tmp_path / "at last").steps == 1
