"""Random damage to a run: every read ends in an error of ours, in the right answer, or is named.

As many mutations as wanted, from a seed: python -m tests.ledger.fuzz 5000 0
"""

from __future__ import annotations

import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import dualform
from dualform.errors import DualformError
from dualform.recording.recorder import Recorder

PATIENCE = 20
"""Seconds after which a read counts as hanging."""


class Twice(nn.Module):
    """Two layers with the same keys, which come again in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.one(x).tanh() * self.other(x)
        return found


def record_run(path: Path) -> None:
    """A run of two sessions with everything in it: rows, residuals, weights, ids, samples.

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


def flip_a_bit(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]


def change_bytes(data: bytes, draw: random.Random) -> bytes:
    at, count = draw.randrange(len(data)), draw.randint(1, 16)
    return data[:at] + draw.randbytes(len(data[at : at + count])) + data[at + count :]


def zero_bytes(data: bytes, draw: random.Random) -> bytes:
    at, count = draw.randrange(len(data)), draw.randint(1, 64)
    return data[:at] + bytes(len(data[at : at + count])) + data[at + count :]


def insert_bytes(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.randbytes(draw.randint(1, 8)) + data[at:]


def remove_bytes(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data))
    return data[:at] + data[at + draw.randint(1, 64) :]


def repeat_bytes(data: bytes, draw: random.Random) -> bytes:
    at, count = draw.randrange(len(data)), draw.randint(1, 64)
    return data[: at + count] + data[at : at + count] + data[at + count :]


def change_a_digit(data: bytes, draw: random.Random) -> bytes:
    """A number of a header or a description becomes another: the text stays JSON."""
    places = [at for at, byte in enumerate(data[:2000]) if 48 <= byte < 58]
    if not places:
        return flip_a_bit(data, draw)
    at = draw.choice(places)
    return data[:at] + str(draw.randrange(10)).encode() + data[at + 1 :]


def cut_off(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


MUTATIONS: list[Callable[[bytes, random.Random], bytes]] = [
    flip_a_bit,
    change_bytes,
    zero_bytes,
    insert_bytes,
    remove_bytes,
    repeat_bytes,
    change_a_digit,
    cut_off,
]


@contextmanager
def in_time() -> Iterator[None]:
    """Ends what takes too long, by an error."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"a read did not end in {PATIENCE} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(path: Path, whole: dict[str, Any]) -> str:
    """What became of reading a damaged run; anything but these is an error that gets out."""
    with in_time():
        try:
            found = read_everything(path)
        except DualformError:
            return "refused"
        if found == whole:
            return "right"
        return "named" if dualform.open(path).check() else "silently wrong"


def fuzz(count: int, seed: int) -> Counter[str]:
    """Damages a copy of a run that often, and counts what came of it."""
    draw, outcomes = random.Random(seed), Counter[str]()
    with TemporaryDirectory() as folder:
        original = Path(folder) / "run"
        record_run(original)
        whole = read_everything(original)
        files = sorted(p.relative_to(original) for p in original.rglob("*") if p.stat().st_size)
        files = [file for file in files if (original / file).is_file()]
        path = shutil.copytree(original, Path(folder) / "copy")
        for number in range(count):
            file, mutate = draw.choice(files), draw.choice(MUTATIONS)
            data = (original / file).read_bytes()
            (path / file).write_bytes(mutate(data, draw))
            try:
                found = outcome(path, whole)
            except Exception as error:
                error.add_note(f"mutation {number} of seed {seed}: {mutate.__name__} of {file}")
                raise
            assert found != "silently wrong", f"mutation {number}: {mutate.__name__} of {file}"
            outcomes[found] += 1
            (path / file).write_bytes(data)
    return outcomes


if __name__ == "__main__":
    print(fuzz(int(sys.argv[1]), int(sys.argv[2])))
