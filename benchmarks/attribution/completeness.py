"""Do whole-network explanations add up? `python -m benchmarks.attribution.completeness`.

Every query of the tasks, with the measured output as target: how far initial share, samples and
remainder miss the output, relative to what training changed in it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

import dualform
from benchmarks.attribution.tasks import TASKS, Task
from benchmarks.attribution.trained import Trained
from dualform.evaluate import completeness

HEADER = "| task | median | worst | queries | seconds |\n|---|---|---|---|---|"


def line(task: Task, runs: Path) -> str:
    """A line of the table."""
    trained, (x, y) = Trained.of(task, runs), task.queries()

    def output(out: Tensor, label: Tensor) -> Tensor:
        return task.output(out, label).sum()

    began = time.perf_counter()
    explanation = dualform.open(trained.ledger).explain(trained.model(), x, (output, y))
    found = completeness(explanation.completeness)
    seconds = time.perf_counter() - began
    return f"| {task.name} | {found.median:.3%} | {found.worst:.3%} | {len(x)} | {seconds:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(HEADER)
    for name in options.tasks:
        print(line(TASKS[name], options.runs), flush=True)


if __name__ == "__main__":
    main()
