"""Random damage to a run: every read ends in an error of ours, in the right answer, or is named.

As many mutations as wanted, from a seed: python -m tests.ledger.fuzz 5000 0
The same by somebody who makes all seals fit again: python -m tests.ledger.fuzz 5000 0 --forged
"""

from __future__ import annotations

import random
import resource
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tests.ledger.mutations import ACCIDENTS, FORGERIES, seal_again
from torch import Tensor, nn

import dualform
from dualform.errors import DualformError
from dualform.recording.recorder import Recorder

PATIENCE = 60
"""Seconds of a processor after which a read counts as hanging; ten times as many by the clock."""
MEMORY = 256 << 20
"""Bytes that a read may take beyond what the process has; the run has some 60,000."""


class Twice(nn.Module):
    """Two layers with the same keys, which come again in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.one(x).tanh() * self.other(x)
        return found


def record_run(path: Path) -> nn.Module:
    """A run of two sessions with everything in it: rows, residuals, weights, ids, samples.

    Returns the model.
    Keys are stored once, by one of two streams and in one of three shards.
    """
    torch.manual_seed(0)
    model = nn.Sequential(Twice(), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x = torch.randn(3, 8)
    for keep in ("rows", "int8"):
        with Recorder(model, optimizer, path, resume=path.exists(), keep=keep) as recorder:
            recorder.describe(["ant", "bee", "cat"], labels=[0, 1, 0], previews=["a", "b", "c"])
            for _ in range(3):
                recorder.samples(["ant", "bee", "cat"])
                model(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.checkpoint()
    return model


def read_everything(path: Path) -> dict[str, Any]:
    """What a user may ask of a run, as plain values that can be compared."""
    run = dualform.open(path)
    run.samples.preview("ant")  # nothing vouches for it: it may say anything
    reading = run.revisit(["bee"])
    return {
        "steps": run.steps,
        "ids": run.ids,
        "audit": str(run.audit().to_dict()),
        "weights": {name: w.tolist() for name, w in run.state_dict().items()},
        "subtracted": {name: w.tolist() for name, w in run.subtract(["ant"]).items()},
        "evidence": {layer: reading[layer].check.lines(0) for layer in run.layers},
    }


def ask_the_model(path: Path, model: nn.Module) -> None:
    """What a user may ask about an output of the model."""
    run, x = dualform.open(path), torch.ones(2, 8)
    for layer in run.layers:
        run.spotlight(model, x)[layer].top(2)
    run.explain(model, x, target=1)
    run.influence(model, x, target=1)


@contextmanager
def in_time_and_memory() -> Iterator[None]:
    """Ends what takes too long or too much, by an error that is none of ours."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"a read did not end in {PATIENCE} seconds")

    signals = (signal.SIGPROF, signal.SIGALRM)
    before = [signal.signal(one, stop) for one in signals]
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    signal.setitimer(signal.ITIMER_PROF, PATIENCE)
    signal.alarm(10 * PATIENCE)
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        for one, handler in zip(signals, before, strict=True):
            signal.signal(one, handler)


def outcome(path: Path, whole: dict[str, Any]) -> str:
    """What became of reading a damaged run; anything but these is an error that gets out."""
    with in_time_and_memory():
        try:
            found = read_everything(path)
        except DualformError:
            return "refused"
        if found == whole:
            return "right"
        return "named" if dualform.open(path).check() else "silently wrong"


def forged_outcome(path: Path, model: nn.Module) -> str:
    """What became of reading a run whose seals fit: nobody can say what would be right."""
    with in_time_and_memory():
        try:
            read_everything(path)
            ask_the_model(path, model)
        except DualformError:
            return "refused"
        return "answered"


def fuzz(count: int, seed: int, *, forged: bool = False) -> Counter[str]:
    """Damages a copy of a run that often, and counts what came of it."""
    draw, outcomes = random.Random(seed), Counter[str]()
    with TemporaryDirectory() as folder:
        original, path = Path(folder) / "run", Path(folder) / "copy"
        model = record_run(original)
        whole = read_everything(original)
        ask_the_model(original, model)
        files = sorted(p.relative_to(original) for p in original.rglob("*") if p.stat().st_size)
        files = [file for file in files if (original / file).is_file()]
        shutil.copytree(original, path)
        for number in range(count):
            file = draw.choice(files)
            mutate = draw.choice(FORGERIES if forged else ACCIDENTS)
            (path / file).write_bytes(mutate((original / file).read_bytes(), draw))
            if forged:
                seal_again(path, path / file)
            try:
                found = forged_outcome(path, model) if forged else outcome(path, whole)
                assert found != "silently wrong"
            except Exception as error:
                error.add_note(f"mutation {number} of seed {seed}: {mutate.__name__} of {file}")
                raise
            outcomes[found] += 1
            for changed in files if forged else [file]:
                (path / changed).write_bytes((original / changed).read_bytes())
    return outcomes


if __name__ == "__main__":
    print(fuzz(int(sys.argv[1]), int(sys.argv[2]), forged="--forged" in sys.argv))
