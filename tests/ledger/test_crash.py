"""kill -9 at random moments, on real processes: nothing committed is lost."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import dualform

VICTIM = Path(__file__).with_name("crash_victim.py")


def run_and_kill(path: Path, mode: str, delay: float, side_by_side: int = 0) -> int:
    """Runs a victim and kills it `delay` seconds into training; returns the step it promised."""
    command = [sys.executable, str(VICTIM), str(path), mode, str(side_by_side)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        started = victim.stdout.readline()
        assert started.startswith("started"), "the victim died before it could be killed"
        killer = threading.Timer(delay, victim.kill)
        killer.start()
        promised = [int(started.split()[1])]
        promised += [int(line.split()[1]) for line in victim.stdout if line.endswith("\n")]
        killer.join()
    assert victim.returncode == -signal.SIGKILL
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
@pytest.mark.parametrize("seed", range(100, 110))
def test_killed_two_hundred_times(seed: int, tmp_path: Path) -> None:
    crash_loop(tmp_path, kills=20, seed=seed)


def test_a_second_process_is_turned_away(tmp_path: Path) -> None:
    """While one process records, another gets an error; after its death, the run is free."""
    command = [sys.executable, str(VICTIM), str(tmp_path / "run")]
    with subprocess.Popen([*command, "new", "0"], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        while not first.stdout.readline().startswith("step"):
            time.sleep(0.01)
        second = subprocess.run(
            [*command, "resume", "0"], capture_output=True, text=True, check=False
        )
        assert "RunLockedError: another process is recording into" in second.stderr
        first.kill()
    assert run_and_kill(tmp_path / "run", "resume", 0.3) > 0
