"""One method in a process of its own: its scores, its seconds, and its peak of memory.

`python -m benchmarks.attribution.method TASK METHOD SCORES.npy` prints all but the scores as JSON:
seconds by the clock and of the processor, which on a busy machine differ, and megabytes. Loading
data, model and libraries is not counted.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.attribution import ours
from benchmarks.attribution.data import QUERIES
from benchmarks.attribution.peers import PEERS, peer
from benchmarks.attribution.tasks import TASKS
from benchmarks.attribution.trained import Trained

METHODS = (*ours.OURS, *PEERS)


@dataclass(frozen=True)
class Cost:
    """What a call took."""

    seconds: float
    processor: float
    megabytes: float


def measured(
    task: str, method: str, runs: Path, threads: int, queries: int
) -> tuple[NDArray[np.float64], Cost]:
    """Runs the method in a new process."""
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "scores.npy"
        command = [sys.executable, "-m", __name__, task, method, str(path), "--runs", str(runs)]
        command += ["--threads", str(threads), "--queries", str(queries)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{method} on {task} failed:\n{done.stderr}")
        return np.load(path), Cost(**json.loads(done.stdout.splitlines()[-1]))


def run(trained: Trained, method: str) -> NDArray[np.float64]:
    """Scores of one of ours, or of a peer at the settings chosen for the task."""
    if method in ours.OURS:
        return ours.scores(trained, method)
    module = peer(method)
    with tempfile.TemporaryDirectory() as work:
        return module.scores(trained, Path(work), **module.BEST[trained.task.name])


def resident() -> float:
    """Megabytes that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("path", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--queries", type=int, default=QUERIES)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    trained = Trained.of(TASKS[options.task], options.runs).asking(options.queries)
    trained.task.measure(trained.model())
    if options.method in PEERS:
        peer(options.method)
    before, began, worked = resident(), time.perf_counter(), time.process_time()
    found = run(trained, options.method)
    seconds, processor = time.perf_counter() - began, time.process_time() - worked
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    np.save(options.path, found)
    cost = {"seconds": seconds, "processor": processor, "megabytes": peak - before}
    print(json.dumps(cost))


if __name__ == "__main__":
    main()
