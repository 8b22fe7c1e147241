"""What `dualform.plan` foretells against real runs: `python -m benchmarks.planning`.

A real run is timed in turns with the same training without a recorder. Each turn ends with a
checkpoint, so that all it takes to write its steps is inside.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

import dualform
from benchmarks.timing import Comparison, compare
from dualform.errors import DualformWarning
from dualform.recording.spot_checks import EVERY


class Words(nn.Module):
    """A small transformer over words."""

    def __init__(self, width: int = 64, words: int = 500) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(self.table(x)))
        return found


class Series(nn.Module):
    """An LSTM, whose last output is classified."""

    def __init__(self, inputs: int = 16, width: int = 64) -> None:
        super().__init__()
        self.body = nn.LSTM(inputs, width, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x)[0][:, -1])
        return found


def mlp(*widths: int) -> nn.Module:
    """Linear layers with ReLU between them."""
    pairs = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*[layer for pair in pairs for layer in pair][:-1])


def conv() -> nn.Module:
    """Two convolutions and a linear layer, for 16 × 16 images."""
    first = (nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU())
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(32 * 36, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "MLP 64-128-10": (lambda: mlp(64, 128, 10), lambda: torch.randn(64, 64)),
    "MLP 784-800-800-10": (lambda: mlp(784, 800, 800, 10), lambda: torch.randn(64, 784)),
    "ConvNet": (conv, lambda: torch.randn(16, 3, 16, 16)),
    "transformer": (Words, lambda: torch.randint(0, 500, (8, 16))),
    "LSTM": (Series, lambda: torch.randn(16, 20, 16)),
}


Trained: TypeAlias = tuple[Callable[[], None], torch.optim.Optimizer]
"""A training step, and its optimizer."""


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def steps_of(model: nn.Module, batches: list[Tensor]) -> Trained:
    """A training on some batches, in turns."""
    optimizer, turn = optimizer_of(model), itertools.cycle(batches)

    def step() -> None:
        optimizer.zero_grad()
        model(next(turn)).square().mean().backward()
        optimizer.step()

    return step, optimizer


def real(
    make: Callable[[], nn.Module],
    batch: Callable[[], Tensor],
    keep: str,
    seconds: float,
    turns: int,
) -> Comparison:
    """A recorded training in turns with one that is not; times are those of a step."""
    batches = [batch() for _ in range(16)]
    plain, _ = steps_of(make(), batches)
    model = make()
    recorded, optimizer = steps_of(model, batches)
    with (
        tempfile.TemporaryDirectory() as folder,
        dualform.record(model, optimizer, Path(folder) / "run", keep=keep) as recorder,
    ):
        for _ in range(EVERY + 2):  # the first steps have more spot checks than later ones
            recorded()
        recorder.checkpoint()
        start = time.perf_counter()
        for _ in range(10):
            plain()
        count = max(20, int(10 * seconds / (time.perf_counter() - start)))

        def run_plain() -> None:
            for _ in range(count):
                plain()

        def run_recorded() -> None:
            for _ in range(count):
                recorded()
            recorder.checkpoint()

        found = compare(run_recorded, run_plain, turns)
    return Comparison(found.seconds / count, found.reference / count, found.ratio, found.spread)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--keep", nargs="+", default=["rows", "summaries"])
    parser.add_argument("--seconds", type=float, default=0.5, help="a plain turn takes so long")
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    warnings.simplefilter("ignore", DualformWarning)
    print("model | keep | plan: × plain, s a step | run: × plain, s a step | error: ×, seconds")
    for name in options.models:
        make, batch = MODELS[name]
        torch.manual_seed(0)
        model = make()
        foretold = dualform.plan(model, batch(), optimizer=optimizer_of(model))
        for keep in options.keep:
            costs, found = (
                foretold.policies[keep],
                real(make, batch, keep, options.seconds, options.turns),
            )
            assert costs.ratio is not None
            assert costs.seconds is not None
            off = (costs.ratio / found.ratio - 1, costs.seconds / found.seconds - 1)
            print(
                f"{name} | {keep} | {costs.ratio:.2f}, {costs.seconds:.5f} | {found.ratio:.2f} "
                f"({found.spread[0]:.2f}–{found.spread[1]:.2f}), {found.seconds:.5f} | "
                f"{off[0]:+.0%}, {off[1]:+.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
