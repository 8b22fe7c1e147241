"""Processes that train together record one run: that of one process on the same batches."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.recording.distributed_loops import BATCH, FOUR, LOOPS, STEPS, start, train, train_all
from tests.recording.failing_loops import STEPS as STEPS_OF_VICTIMS
from tests.recording.failing_loops import (
    fail_save_and_leave,
    killed_0_at_7,
    killed_0_at_7_in_parts,
    killed_1_at_5,
    killed_1_at_5_in_parts,
    killed_as_said,
    killed_as_said_in_parts,
    to_the_end,
)
from tests.recording.refused_loops import refuse_all
from tests.recording.trained_by import Task, begun, trained_by

import dualform
from dualform.recording.keep import Summaries

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of two processes."""
    folder = tmp_path_factory.mktemp("two")
    trained_by(2, train_all, folder)
    return folder


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of four processes."""
    folder = tmp_path_factory.mktemp("four")
    trained_by(4, train_all, folder)
    return folder


BY_ROW = [name for name, loop in LOOPS.items() if not isinstance(loop.keep, Summaries)]
SUMMARIZED = [name for name in LOOPS if name not in BY_ROW]


@pytest.mark.parametrize("name", BY_ROW)
def test_two_processes_record_what_one_does(name: str, two: Path, tmp_path: Path) -> None:
    check_equal(name, two / name, tmp_path / "one")


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in FOUR if name in BY_ROW])
def test_four_processes_record_what_one_does(name: str, four: Path, tmp_path: Path) -> None:
    check_equal(name, four / name, tmp_path / "one")


@pytest.mark.parametrize("name", SUMMARIZED)
def test_summaries_of_two_processes_are_in_the_same_bases(name: str, two: Path) -> None:
    check_summaries(two / name, 2)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in FOUR if name in SUMMARIZED])
def test_summaries_of_four_processes_are_in_the_same_bases(name: str, four: Path) -> None:
    check_summaries(four / name, 4)


def check_summaries(path: Path, of: int) -> None:
    """Summaries of all processes add up to the gradient that all used, in bases of them all."""
    run = dualform.open(path)
    ledger, audit = run.source.ledger, run.audit()
    assert run.steps == STEPS
    assert list(ledger.check()) == []
    assert {book.granularity for book in audit.books} == {"row"}
    checked = [book.remainder for book in audit.books if not np.isnan(book.remainder)]
    assert len(checked) > 4
    assert max(checked) <= 1e-6  # gradients in bases are kept in 32 bits
    summarized = [stream for stream in ledger.info.streams if any(stream.bases)]
    ranks = [
        {shard.rank for shard in ledger.shards if f"{stream.name}/segments" in shard.file}
        for stream in summarized
    ]
    assert set(range(of)) in ranks


def check_equal(name: str, together: Path, alone: Path) -> None:
    """Holds a run of several processes against that of one, which is made for it."""
    loop, data = LOOPS[name], LOOPS[name].inputs()
    data = data.to(loop.dtype) if data.is_floating_point() else data
    model, tolerance = train(name, 0, 1, alone), TOLERANCE[loop.dtype]
    one, two = dualform.open(alone), dualform.open(together)
    assert two.steps == one.steps == STEPS
    assert list(two.source.ledger.check()) == []
    assert not two.source.ledger.unfinished
    audits = one.audit(), two.audit()
    # what 32 bits round of a weight, relative to its change, is as much as in one process
    assert audits[1].remainder <= max(tolerance, 1.5 * audits[0].remainder)
    assert audits[0].coverage == audits[1].coverage
    for own, other in zip(audits[0].books, audits[1].books, strict=True):
        assert (own.name, own.granularity, own.rows) == (other.name, other.granularity, other.rows)
    for part, weight in two.state_dict().items():
        torch.testing.assert_close(weight, model.state_dict()[part], rtol=tolerance, atol=tolerance)
    if loop.ids is None:
        assert sorted(two.ids) == list(range(STEPS * BATCH))
        return
    assert two.samples.labels == one.samples.labels
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
        assert gap <= tolerance * np.abs(expected.values).max(), read


def test_what_cannot_be_one_run_is_refused_in_all_processes(tmp_path: Path) -> None:
    trained_by(2, refuse_all, tmp_path)
    assert dualform.open(tmp_path / "at last").steps == 1


@pytest.mark.parametrize(
    "tasks",
    [(killed_1_at_5, killed_0_at_7), (killed_1_at_5_in_parts, killed_0_at_7_in_parts)],
    ids=["whole", "in parts"],
)
def test_a_killed_process_leaves_a_run_that_any_number_goes_on_with(
    tasks: tuple[Task, Task], tmp_path: Path
) -> None:
    for task, of, victim, readable in zip(tasks, (2, 3), (1, 0), (3, 6), strict=True):
        processes = begun(task, of, tmp_path)
        for process in processes:
            process.join()
        assert processes[victim].exitcode == -signal.SIGKILL
        assert dualform.open(tmp_path / "run").steps == readable
    to_the_end(0, 1, tmp_path)
    run = dualform.open(tmp_path / "run")
    assert run.steps == 9
    assert list(run.source.ledger.check()) == []
    assert run.audit().coverage == 1.0
    assert run.audit().remainder <= 1e-12
    alone = tmp_path / "alone"
    to_the_end(0, 1, alone)
    model, data = start(LOOPS["AdamW"]), LOOPS["AdamW"].inputs().double()
    answers = []
    for each in (dualform.open(alone / "run"), run):
        model.load_state_dict(each.state_dict())
        answers.append(each.explain(model, data[:2], target=0))
    at = [answers[1].ids.index(sample) for sample in answers[0].ids]
    gap = np.abs(answers[1].values[at] - answers[0].values).max()
    assert gap <= 1e-12 * np.abs(answers[0].values).max()


@pytest.mark.long
@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("step", range(STEPS_OF_VICTIMS))
@pytest.mark.parametrize("task", [killed_as_said, killed_as_said_in_parts])
def test_any_process_may_be_killed_at_any_time(
    task: Task, rank: int, step: int, tmp_path: Path
) -> None:
    """Before each step; what was committed is what both have committed at the last checkpoint."""
    (tmp_path / "killed").write_text(json.dumps([rank, step]))
    for process in begun(task, 2, tmp_path):
        process.join()
    readable = 3 * (step // 3)
    assert dualform.open(tmp_path / "run").steps == readable
    for left in (tmp_path / "killed", *tmp_path.glob("problem-*")):
        left.unlink()
    trained_by(2, task, tmp_path)
    run = dualform.open(tmp_path / "run")
    assert run.steps == STEPS_OF_VICTIMS
    assert list(run.source.ledger.check()) == []
    assert run.audit().remainder <= 1e-12


def test_training_goes_on_whatever_becomes_of_a_recording(tmp_path: Path) -> None:
    trained_by(2, fail_save_and_leave, tmp_path)
    assert dualform.open(tmp_path / "saved").source.ledger.marks[4] == "checkpoint"
    assert dualform.open(tmp_path / "full").steps == 0
