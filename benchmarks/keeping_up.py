"""Do reads keep up with runs? `python -m benchmarks.keeping_up` asks runs that grow.

A small network learns random data, each sample several times, until so many *visits* were recorded:
as rows, and as summaries. For each run are printed the seconds of

- one scan: every byte read through the engine, and added up;
- `explain` and `influence` for a few queries;
- the algebra alone: the same products, Gram matrices and inverses, on data in memory;

then how often the time of `scan + algebra` the reads take, and the most memory they took. Each read
is done in a process of its own. `--visits 1e4 1e5 1e6 1e7`, `--seconds cpu` where others are busy.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dualform
from dualform.ledger import Ledger, Stream
from dualform.read.engine import Fold, RowReader, ShardRange
from dualform.read.scan import chunks
from dualform.recording.keep import Keep

WIDTHS, EPOCHS, QUERIES = (48, 32, 4), 4, 4
POLICIES: dict[str, Keep] = {
    "rows": "rows",
    "summaries": dualform.summaries(8, 16, "half", "steps"),
}
MAKE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}
READS = ("scan", "explain", "influence", "algebra")


def network() -> nn.Module:
    """The same each time."""
    torch.manual_seed(0)
    inputs, hidden, outputs = WIDTHS
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def samples_of(visits: int) -> int:
    """How many samples there are: each is visited a few times."""
    return visits // EPOCHS


def inputs(count: int) -> Tensor:
    """Random inputs, the same each time."""
    return torch.randn(count, WIDTHS[0], generator=torch.Generator().manual_seed(1))


def record(path: Path, visits: int, policy: str, optimizer: str) -> None:
    """A run of so many visits, by batches that grow with it: about a hundred steps."""
    model, x = network(), inputs(samples_of(visits))
    stepper, y = MAKE[optimizer](model.parameters()), (x[:, 0] > 0).long()
    batch = max(64, visits // 100)
    with dualform.record(model, stepper, path, keep=POLICIES[policy]) as recorder:
        for _ in range(EPOCHS):
            for ids in torch.randperm(len(x)).split(batch):
                recorder.samples(ids)
                F.cross_entropy(model(x[ids]), y[ids]).backward()
                stepper.step()
                stepper.zero_grad()
    torch.save(model.state_dict(), path / "model.pt")


@dataclass(frozen=True)
class Sizes(Fold[float]):
    """The sum of everything that some streams have: reads every byte, and does little."""

    fed_by: tuple[Stream, ...]

    @property
    def streams(self) -> list[str]:
        """All of them."""
        return [stream.name for stream in self.fed_by]

    def start(self) -> float:
        """Nothing."""
        return 0.0

    def fold(self, partial: float, shard: ShardRange) -> float:
        """Adds up a shard."""
        for stream in self.fed_by:
            for chunk in chunks(shard, stream):
                partial += float(chunk.values.sum()) + float(chunk.keys.sum())
        return partial

    def merge(self, one: float, other: float) -> float:
        """The sum."""
        return one + other


def scan(path: Path, visits: int) -> None:
    """One scan."""
    ledger = Ledger(path)
    RowReader(ledger).reduce(Sizes(ledger.info.streams), ledger.last_step)


def ask(read: str, path: Path, visits: int) -> None:
    """One of the reads, of a run opened anew."""
    model = network()
    model.load_state_dict(torch.load(path / "model.pt"))
    getattr(dualform.open(path), read)(model, inputs(QUERIES))


def algebra(path: Path, visits: int) -> None:
    """What reads compute, of data in memory: every sample's matrix, its Grams, and the products."""
    for outputs, wide in ((WIDTHS[1], WIDTHS[0]), (WIDTHS[2], WIDTHS[1])):
        grams, asked = torch.zeros(outputs, wide, wide), torch.randn(QUERIES, outputs, wide)
        each = 1 << 12
        a, b = torch.randn(each, EPOCHS, outputs), torch.randn(each, EPOCHS, wide)
        for _ in range(-(-samples_of(visits) // each)):
            C = a.mT @ b
            lines = C.transpose(0, 1)
            grams.baddbmm_(lines.mT, lines)
            C.flatten(1) @ asked.flatten(1).T
        for K in grams:
            torch.linalg.inv(K + torch.eye(wide))


def most_memory() -> float:
    """The most that this process has had, in MB: not its parent, as `getrusage` would have it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM"))


def worker(read: str, path: Path, visits: int) -> None:
    """Does one read, and prints its seconds, those of processors, and the most memory."""
    work = {"scan": scan, "algebra": algebra}
    began, used = time.perf_counter(), time.process_time()
    if read in work:
        work[read](path, visits)
    else:
        ask(read, path, visits)
    seconds, used = time.perf_counter() - began, time.process_time() - used
    print(seconds, used, most_memory())


def measured(read: str, path: Path, visits: int) -> tuple[float, float, float]:
    """The same, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.keeping_up", "--worker", read, str(path)]
    done = subprocess.run(
        [*command, "--visits", str(visits)], check=True, capture_output=True, text=True
    )
    seconds, used, peak = map(float, done.stdout.split())
    return seconds, used, peak


def main() -> None:
    """Prints a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--visits", type=float, nargs="*", default=[1e4, 1e5, 1e6])
    parser.add_argument("--optimizer", choices=MAKE, default="sgd")
    parser.add_argument("--policies", nargs="*", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--seconds", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.worker[0], Path(given.worker[1]), int(given.visits[0]))
        return
    print(f"load {os.getloadavg()[0]:.1f}; {given.seconds} seconds, {given.optimizer}")
    print("kept as | visits | GB |", " | ".join(READS), "| explain ×, influence × | peak MB")
    for policy in given.policies:
        for visits in map(int, given.visits):
            path = Path(tempfile.mkdtemp(dir=given.folder)) / "run"
            record(path, visits, policy, given.optimizer)
            found = {read: measured(read, path, visits) for read in READS}
            clock = 0 if given.seconds == "wall" else 1
            took = {read: numbers[clock] for read, numbers in found.items()}
            least = took["scan"] + took["algebra"]
            stored = dualform.open(path).nbytes / 1e9
            print(f"{policy} | {visits:.0e} | {stored:.2f} |",
                  " | ".join(f"{took[read]:.2f}" for read in READS),
                  f"| {took['explain'] / least:.1f}, {took['influence'] / least:.1f} |",
                  ", ".join(f"{found[read][2]:.0f}" for read in READS), flush=True)  # fmt: skip
            shutil.rmtree(path.parent)


if __name__ == "__main__":
    main()
