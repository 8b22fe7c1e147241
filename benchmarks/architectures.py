"""Whole architectures: `python -m benchmarks.architectures [--device cuda] [--folder DIR]`.

For each, a training step with recording against one without, and what a visit of a sample takes on
disk; then, of one recorded epoch under AdamW, an exact read and an audit against that epoch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from tests.cases.architectures import LanguageModel, Residual, ViT, gpt2
from torch import Tensor, nn

import dualform
from benchmarks.timing import Comparison, compare

QUERIES = 8
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 800), nn.ReLU(), nn.Linear(800, 800), nn.ReLU(), nn.Linear(800, 10)
    )


class ResNet(nn.Module):
    """A stem, three residual blocks of 16, 32 and 64 channels, and a head on their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16))
        self.blocks = nn.Sequential(Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


class GPT2(nn.Module):
    """GPT-2 as transformers has it: 4 layers of 256, 1,000 words, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt2(1000, places=64, width=256, layers=4, heads=4, spread=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(input_ids=x).logits


def vit() -> nn.Module:
    return ViT(width=64, heads=4, layers=4, places=65, classes=10, spread=0.02)


def lstm() -> nn.Module:
    return LanguageModel(dropout=0.0, words=1000, sizes=(128, 256), layers=1)


@dataclass(frozen=True)
class Workload:
    """A model, the shape of a sample, and how many make a batch."""

    make: Callable[[], nn.Module]
    sample: tuple[int, ...]
    batch: int
    steps: int
    """How many make an epoch: every batch of the data once."""
    words: int = 0
    """For language models: samples are words, and the next one is the target."""

    def data(self, device: str) -> tuple[Tensor, Tensor]:
        shape = (self.steps, self.batch)
        if self.words:
            drawn = torch.randint(0, self.words, (*shape, self.sample[0] + 1), device=device)
            return drawn[..., :-1], drawn[..., 1:]
        return (
            torch.randn(*shape, *self.sample, device=device),
            torch.randint(0, 10, shape, device=device),
        )

    def queries(self, device: str) -> Tensor:
        """What makes eight queries of the last layer: samples, or the words of one sample."""
        if self.words:
            return torch.randint(0, self.words, (1, QUERIES), device=device)
        return torch.randn(QUERIES, *self.sample, device=device)


WORKLOADS = {
    "MLP 784-800-800-10": Workload(mlp, (784,), 64, 32),
    "ResNet, 9 convolutions": Workload(ResNet, (3, 32, 32), 32, 8),
    "ViT, 4 layers × 64": Workload(vit, (3, 32, 32), 16, 8),
    "LSTM, 256": Workload(lstm, (32,), 16, 12, words=1000),
    "GPT-2, 4 layers × 256": Workload(GPT2, (32,), 8, 6, words=1000),
}


class Training:
    """A model with its optimizer and data; an epoch is one call."""

    def __init__(self, workload: Workload, optimizer: str, device: str) -> None:
        torch.manual_seed(0)
        self.model = workload.make().to(device).train()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.inputs, self.targets = workload.data(device)
        self.ids = torch.arange(workload.steps * workload.batch).split(workload.batch)
        self.device = device

    def epoch(self, recorder: dualform.Recorder | None = None) -> None:
        for x, y, ids in zip(self.inputs, self.targets, self.ids, strict=True):
            if recorder is not None:
                recorder.samples(ids)
            loss = F.cross_entropy(self.model(x).flatten(0, -2), y.flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        sync(self.device)


def overhead(
    workload: Workload, optimizer: str, device: str, turns: int, epochs: int, folder: Path
) -> tuple[Comparison, float, dualform.Run]:
    """Two identical trainings in turns, one recorded: the ratio, bytes a visit, the run."""
    plain, recorded = (Training(workload, optimizer, device) for _ in range(2))
    with dualform.record(recorded.model, recorded.optimizer, folder / "run") as recorder:

        def run_plain() -> None:
            for _ in range(epochs):
                plain.epoch()

        def run_recorded() -> None:
            for _ in range(epochs):
                recorded.epoch(recorder)
            # or else the other side would pay for what is not yet written
            recorder._steps.stages.delivery.wait()

        run_plain()
        run_recorded()
        result = compare(run_recorded, run_plain, turns)
        visits = recorder.step * workload.batch
    run = dualform.open(folder / "run", device)
    return result, run.nbytes / visits, run


@dataclass(frozen=True)
class Reads:
    """Seconds of an epoch without recording, of an exact read of its run, and of an audit."""

    epoch: float
    read: float
    audit: float
    remainder: float
    coverage: float


def reads(workload: Workload, device: str, turns: int, folder: Path) -> Reads:
    """Records one epoch under AdamW, and reads it; medians of turns, each on a run opened anew."""
    plain, recorded = (Training(workload, "AdamW", device) for _ in range(2))
    with dualform.record(recorded.model, recorded.optimizer, folder / "run") as recorder:
        recorded.epoch(recorder)
    x = workload.queries(device)

    def read() -> None:
        reading = dualform.open(folder / "run", device).spotlight(recorded.model, x).last
        assert len(reading.names) == QUERIES
        reading.samples()

    audits: list[dualform.Audit] = []

    def audit() -> None:
        audits.append(dualform.open(folder / "run", device).audit())

    plain.epoch()
    times = [[seconds(work) for work in (plain.epoch, read, audit)] for _ in range(turns)]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    return Reads(*medians, audits[0].remainder, audits[0].coverage)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def sync(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


@contextmanager
def temporary(parent: str | None) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def report(name: str, workload: Workload, options: argparse.Namespace) -> None:
    for optimizer in OPTIMIZERS:
        with temporary(options.folder) as folder:
            result, size, run = overhead(
                workload, optimizer, options.device, options.turns, options.epochs, folder
            )
            print(
                f"{name}, {optimizer}: step × {result}, "
                f"{result.reference / options.epochs / workload.steps * 1e3:,.1f} ms without, "
                f"{size / 1e3:,.0f} kB a visit of a sample, {run.steps} steps",
                flush=True,
            )
    with temporary(options.folder) as folder:
        found = reads(workload, options.device, options.reads, folder)
    print(
        f"{name}, an epoch of {workload.steps} steps under AdamW ({found.epoch:.2f} s): "
        f"read of {QUERIES} queries × {found.read / found.epoch:.2f}, "
        f"audit × {found.audit / found.epoch:.2f}, remainder {found.remainder:.1e}, "
        f"{found.coverage:.1%} by row",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", default=None, help="where the runs are written")
    parser.add_argument("--turns", type=int, default=7, help="with and without recording")
    parser.add_argument("--epochs", type=int, default=1, help="how many make a turn")
    parser.add_argument("--reads", type=int, default=3, help="reads and audits of an epoch")
    parser.add_argument("--only", default="", help="a part of the architectures' names")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name, workload in WORKLOADS.items():
        if options.only not in name:
            continue
        if workload.make is GPT2 and find_spec("transformers") is None:
            print(f"{name}: left out, transformers is not installed", flush=True)
            continue
        report(name, workload, options)


if __name__ == "__main__":
    main()
