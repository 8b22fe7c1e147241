"""kill -9 at random moments, on real processes: nothing committed is lost."""

from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import Path

import pytest
from tests.ledger.crash_victim import fresh, main
from tests.processes import started

import dualform
from dualform.errors import RunLockedError


def run_and_kill(path: Path, mode: str, delay: float, side_by_side: int = 0) -> int:
    """Runs a victim and kills it `delay` seconds into training; returns the step it promised."""
    with started(main, path, mode == "resume", side_by_side) as (victim, printed):
        begun = printed.readline()
        assert begun.startswith("started"), "the victim died before it could be killed"
        killer = threading.Timer(delay, victim.kill)
        killer.start()
        promised = [int(begun.split()[1])]
        promised += [int(line.split()[1]) for line in printed if line.endswith("\n")]
        killer.join()
    assert victim.exitcode == -signal.SIGKILL
    return promised[-1]


def crash_loop(folder: Path, kills: int, seed: int) -> None:
    """Kills one run again and again, each time going on from the last checkpoint."""
    moments = random.Random(seed)
    path, mode = folder / "run", "new"
    for _ in range(kills):
        side_by_side = moments.choice([0, 3])
        promised = run_and_kill(path, mode, moments.uniform(0.0, 0.25), side_by_side)
        run = dualform.open(path)
        assert run.steps >= promised
        assert run.check() == []
        if promised:
            audit = run.audit()
            assert audit.measured_at >= promised
            assert audit.remainder <= 1e-5, audit  # grows with the number of float32 steps
        mode = "resume" if (folder / "state.pt").exists() else "new"


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_random_moments(seed: int, tmp_path: Path) -> None:
    crash_loop(tmp_path, kills=6, seed=seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 150))
def test_killed_a_thousand_times(seed: int, tmp_path: Path) -> None:
    crash_loop(tmp_path, kills=20, seed=seed)


def test_a_second_process_is_turned_away(tmp_path: Path) -> None:
    """While one process records, another gets an error; after its death, the run is free."""
    with started(main, tmp_path / "run", False, 0) as (first, printed):
        while not printed.readline().startswith("step"):
            time.sleep(0.01)
        with pytest.raises(RunLockedError, match="another process is recording into"):
            dualform.record(*fresh(), tmp_path / "run", resume=True).__enter__()
        first.kill()
    assert run_and_kill(tmp_path / "run", "resume", 0.3) > 0
