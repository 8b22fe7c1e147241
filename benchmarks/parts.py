"""What the parts of recording take of the processor, by thread: `python -m benchmarks.parts`.

Each part is timed by the clock of its own thread, so a busy machine counts less. Parts that are
parts of others are indented. Timing takes a few microseconds a call: add nothing up.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dualform
from benchmarks.recording import MODELS, make_step, policy
from dualform.ledger import shared_keys, writer
from dualform.recording import (
    bookkeeping,
    delivery,
    gradients,
    pages,
    reconcile,
    recorder,
    reduction,
    step_recorder,
    watch,
)

PARTS: dict[str, tuple[object, str]] = {
    "training: names of samples": (recorder.Recorder, "samples"),
    "training: a pass begins": (watch.Watch, "begin_pass"),
    "training: a call is seen": (watch.Watch, "see"),
    "training: errors have come": (watch.Watch, "_backward"),
    "training:   summaries": (reduction.Reducer, "reduce"),
    "training:   copies": (pages.Page, "put"),
    "training: before the step": (recorder.Recorder, "_before_step"),
    "training:   probes": (gradients.GradientProbes, "take"),
    "training: after the step": (recorder.Recorder, "_after_step"),
    "training:   hand-over": (step_recorder.StepRecorder, "hand_over"),
    "writer: a hand-over": (delivery.Delivery, "_deliver"),
    "writer:   rows against probes": (bookkeeping, "find_factors"),
    "writer:   weights against rows": (bookkeeping.Bookkeeper, "_unaccounted"),
    "writer:     rows, probed": (reconcile.Reconciler, "_parts"),
    "writer:   keys that are known": (shared_keys.SharedKeys, "leave_out"),
    "files: a shard": (writer.LedgerWriter, "_write"),
}


def timed(work: Callable[..., Any], taken: dict[str, float], name: str) -> Callable[..., Any]:
    """The same, with what it takes added up."""

    @functools.wraps(work)
    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        try:
            return work(*args, **kwargs)
        finally:
            taken[name] += time.thread_time() - start

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="784-800-800-10", choices=list(MODELS))
    parser.add_argument("--keep", default="auto")
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    taken: dict[str, float] = defaultdict(float)
    for name, (owner, attribute) in PARTS.items():
        setattr(owner, attribute, timed(getattr(owner, attribute), taken, name))
    step, model, optimizer = make_step(MODELS[options.model], 64, "cpu")
    ids = torch.arange(64)
    with tempfile.TemporaryDirectory() as folder:
        path, keep = Path(folder) / "run", policy(options.keep)
        with dualform.record(model, optimizer, path, keep=keep) as recording:
            for count in (130, options.steps):  # early steps have more spot checks
                taken.clear()
                for _ in range(count):
                    recording.samples(ids)
                    step()
                recording.checkpoint()
    for name in PARTS:
        print(f"{name:34s} {taken[name] / options.steps * 1e6:8,.0f} µs a step")


if __name__ == "__main__":
    main()
