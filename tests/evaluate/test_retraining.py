"""Retraining: the same truth however it is interrupted, in however many processes."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from filelock import FileLock
from tests.evaluate import tasks
from tests.evaluate.tasks import (
    SAMPLES,
    StackedRidge,
    counted_ridge,
    fails_with_seed_1,
    ridge,
    slow_ridge,
    total,
)

from dualform.errors import EvaluationError, RetrainingError
from dualform.evaluate import GroundTruth, Retraining
from dualform.evaluate.retraining import describe
from dualform.evaluate.workers import Job, train_all


def results(folder: Path) -> dict[str, int]:
    """The finished trainings, and when each was written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("subset-*.npy")}


def works(process: psutil.Process) -> bool:
    """Whether a process still does something: those nobody waits for remain as zombies."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def expected(truth: GroundTruth) -> np.ndarray:
    """What the ridge regression gives for each subset, straight away."""
    return np.stack([ridge(np.flatnonzero(members), 0) for members in truth.members])


def test_truth_is_what_the_task_gives_for_the_members(tmp_path: Path) -> None:
    truth = Retraining(ridge, SAMPLES, tmp_path, subsets=6, seeds=2, workers=0).run()
    assert truth.members.sum(1).tolist() == [SAMPLES // 2] * 6
    assert len({members.tobytes() for members in truth.members}) == 6
    np.testing.assert_array_equal(truth.outputs, expected(truth))
    np.testing.assert_array_equal(truth.runs[:, 0], truth.runs[:, 1])
    loaded = GroundTruth.load(tmp_path / "truth.npz")
    np.testing.assert_array_equal(loaded.members, truth.members)
    np.testing.assert_array_equal(loaded.runs, truth.runs)


def test_every_sample_is_as_likely_to_be_left_out(tmp_path: Path) -> None:
    """4,000 subsets of a quarter: how often each is in lies within 5 standard deviations."""
    members = Retraining(ridge, 40, tmp_path, subsets=4000, fraction=0.25).members
    assert (members.sum(1) == 10).all()
    spread = np.sqrt(0.25 * 0.75 / 4000)
    assert np.abs(members.mean(0) - 0.25).max() < 5 * spread
    together = (members.T.astype(float) @ members) / 4000
    pairs = together[np.triu_indices(40, 1)]
    assert np.abs(pairs - 0.25 * 9 / 39).max() < 5 * np.sqrt(0.058 * 0.942 / 4000)


def test_workers_give_the_same_truth(tmp_path: Path) -> None:
    here = Retraining(ridge, SAMPLES, tmp_path / "here", subsets=5, workers=0).run()
    there = Retraining(ridge, SAMPLES, tmp_path / "there", subsets=5, workers=2).run()
    np.testing.assert_array_equal(here.members, there.members)
    np.testing.assert_array_equal(here.runs, there.runs)


def test_a_task_that_trains_many_at_once_is_given_many(tmp_path: Path) -> None:
    task = StackedRidge()
    truth = Retraining(task, SAMPLES, tmp_path, subsets=4, seeds=2).run()
    assert task.stacks == [3, 3, 2]
    np.testing.assert_array_equal(truth.outputs, expected(truth))
    jobs = [Job(str(at), np.arange(20 + at % 2), 0) for at in range(5)]
    found: dict[str, np.ndarray] = {}
    train_all(task, jobs, lambda job, outputs: found.update({job.name: outputs}), 2)
    assert task.stacks[3:] == [3, 2]  # those with as many samples
    for job in jobs:
        np.testing.assert_array_equal(found[job.name], ridge(job.ids, 0))
    with pytest.raises(RetrainingError, match=r"subset 0, seed 2: Awkward: 4 and 5\. 8 of 12 trai"):
        Retraining(task, SAMPLES, tmp_path, subsets=4, seeds=3).run()


def test_killed_in_the_middle_it_goes_on(tmp_path: Path) -> None:
    """After kill -9 the workers leave, what was finished stays, and only the rest is trained."""
    with subprocess.Popen([sys.executable, "-m", "tests.evaluate.victim", str(tmp_path)]) as victim:
        while len(results(tmp_path)) < 5:
            assert victim.poll() is None
            time.sleep(0.02)
        workers = psutil.Process(victim.pid).children(recursive=True)
        victim.kill()
    assert len(workers) >= 2
    deadline = time.monotonic() + 30
    while any(map(works, workers)):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.05)
    kept = results(tmp_path)
    assert 5 <= len(kept) < 200
    truth = Retraining(slow_ridge, SAMPLES, tmp_path, subsets=6, seeds=2, workers=0).run()
    assert {name: when for name, when in results(tmp_path).items() if name in kept} == kept
    np.testing.assert_array_equal(truth.outputs, expected(truth))


def test_more_subsets_and_seeds_train_only_what_is_new(tmp_path: Path) -> None:
    log = tmp_path / "log"
    task = functools.partial(counted_ridge, log=log)
    few = Retraining(task, SAMPLES, tmp_path / "f", subsets=3, seeds=1, workers=0).run()
    assert len(log.read_text().splitlines()) == 3
    more = Retraining(task, SAMPLES, tmp_path / "f", subsets=4, seeds=2, workers=0).run()
    assert len(log.read_text().splitlines()) == 8
    np.testing.assert_array_equal(more.members[:3], few.members)
    np.testing.assert_array_equal(more.runs[:3, :1], few.runs)


def test_a_failing_training_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    retraining = Retraining(fails_with_seed_1, SAMPLES, tmp_path, subsets=4, seeds=2, workers=2)
    with pytest.raises(RetrainingError, match=r"subset \d, seed 1: Awkward: 4 and 5\. ") as raised:
        retraining.run()
    assert "in fails_with_seed_1" in str(raised.value.__cause__)
    kept = results(tmp_path)
    assert f"{len(kept)} of 8 trainings are kept in '{tmp_path}'; run again" in str(raised.value)
    assert kept
    assert all(name.endswith("seed-0.npy") for name in kept)
    for name in kept:
        subset = int(re.findall(r"\d+", name)[0])
        ids = np.flatnonzero(retraining.members[subset])
        np.testing.assert_array_equal(np.load(tmp_path / name), ridge(ids, 0))


def test_a_worker_that_dies_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RetrainingError, match=r"subset 0, seed 0: its process was ended by SIGKI"):
        Retraining(tasks.dies, SAMPLES, tmp_path, subsets=1, seeds=1, workers=1).run()


def test_scripts_without_a_main_guard_are_told(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from dualform.evaluate import Retraining\n"
        "from tests.evaluate.tasks import ridge\n"
        "Retraining(ridge, 60, 'folder', subsets=1, seeds=1, workers=1).run()\n"
    )
    command = [sys.executable, str(script)]
    known = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env=known
    )
    assert (
        'needs its main part under `if __name__ == "__main__":`' in result.stderr.splitlines()[-1]
    )


def test_other_settings_are_refused(tmp_path: Path) -> None:
    Retraining(ridge, SAMPLES, tmp_path, subsets=1, seeds=1, workers=0).run()
    other = functools.partial(ridge, noise=0.5)
    with pytest.raises(EvaluationError) as raised:
        Retraining(other, SAMPLES, tmp_path, fraction=0.25, workers=0).run()
    assert str(raised.value) == (
        f"'{tmp_path}' has trainings with other settings: task='tests.evaluate.tasks:ridge"
        "(noise=0.5)' (there 'tests.evaluate.tasks:ridge'), fraction=0.25 (there 0.5); use another "
        "folder, or the settings it was begun with."
    )


def test_two_at_a_time_are_refused(tmp_path: Path) -> None:
    with FileLock(tmp_path / "lock"), pytest.raises(EvaluationError, match="another process is"):
        Retraining(ridge, SAMPLES, tmp_path, workers=0).run()


def test_numbers_of_queries_must_agree(tmp_path: Path) -> None:
    """Found where results are kept; the workers are gone even while the error is handled."""
    with pytest.raises(RetrainingError, match="seed 1: the task returned 2 numbers, and 1 before"):
        Retraining(tasks.growing, SAMPLES, tmp_path, workers=1).run()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([[1.0]], r"the task returned shape \(1, 1\); expected one finite number a query"),
        ([1.0, float("nan")], r"the task returned \[ ?1\. nan\]; expected one finite"),
        ("words", "ValueError: could not convert string to float"),
    ],
)
def test_outputs_must_be_numbers(tmp_path: Path, outputs: object, message: str) -> None:
    with pytest.raises(RetrainingError, match=message):
        Retraining(lambda ids, seed: outputs, SAMPLES, tmp_path, workers=0).run()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 1}, "samples=1: give at least 2"),
        ({"subsets": 0}, "subsets=0: give at least 1"),
        ({"seeds": 0}, "seeds=0: give at least 1"),
        ({"fraction": 1.0}, "fraction=1.0 of 60 samples is 60; give a share that leaves some in"),
        ({"fraction": 0.001}, "fraction=0.001 of 60 samples is 0; give a share"),
    ],
)
def test_settings_that_make_no_sense(
    tmp_path: Path, settings: dict[str, float], message: str
) -> None:
    with pytest.raises(EvaluationError, match=re.escape(message)):
        Retraining(ridge, **{"samples": SAMPLES, "folder": tmp_path, **settings})  # type: ignore


def test_tasks_that_cannot_travel(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"cannot be sent to worker processes .* workers=0"):
        Retraining(lambda ids, seed: 0.0, SAMPLES, tmp_path, workers=1).run()
    with pytest.raises(EvaluationError, match="workers=-1: give a number of processes"):
        Retraining(ridge, SAMPLES, tmp_path / "other", workers=-1).run()


def test_tasks_in_words() -> None:
    task = functools.partial(functools.partial(ridge, noise=0.5), seed=3, ids=np.arange(3))
    assert describe(task) == "tests.evaluate.tasks:ridge(noise=0.5, seed=3)"
    assert json.dumps(describe(total)) == '"tests.evaluate.tasks:total"'


def test_files_that_are_no_ground_truth(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", values=[1.0])
    (tmp_path / "text.npz").write_text("words")
    for name in ("other.npz", "text.npz"):
        with pytest.raises(EvaluationError, match=f"{name}' is no ground truth"):
            GroundTruth.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        GroundTruth.load(tmp_path / "none.npz")
    with pytest.raises(EvaluationError, match=r"members of shape \(2, 3\) and runs of shape \(1,"):
        GroundTruth(np.ones((2, 3), dtype=bool), np.zeros((1, 1, 1)))
