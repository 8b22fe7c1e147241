"""Runs of several shards, and what each read gives: what engines are compared by."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.cases.optimizers import OPTIMIZERS
from tests.told import told
from torch import Tensor, nn

from dualform.ledger.codecs import CODECS
from dualform.read import Run
from dualform.read.engine import BlockSum, Serial, ShardRange
from dualform.read.samples_matrix import block_sums
from dualform.recording.recorder import Recorder

KINDS = ["SGD, Nesterov", "AdamW, amsgrad", "Lion", "Muon", "Shampoo", "SOAP"]
KINDS = [name for name in KINDS if name in OPTIMIZERS]
"""Coefficients that are numbers, one for each element, of signs, and made of matrices."""
LOSSY = ("AdamW, amsgrad", "SOAP")
"""Recorded with entries that leave a residual."""
READS = ("audit", "spotlight", "timeline", "explain", "influence", "suspicion", "state_dict")
READS += ("revisit", "rows", "keys_only", "memory", "subtract", "fisher", "tracin", "zoom")
STEPS, SAMPLES = 12, 8


class Small(nn.Module):
    """A table, a convolution and a matrix that is used twice."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 6)
        self.conv = nn.Conv1d(2, 3, 2, bias=bias)
        self.mix = nn.Linear(6, 6, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.table(x).tanh()
        seen = self.conv(seen.reshape(-1, 2, 3)).flatten(1)
        return self.mix(self.mix(seen).tanh())[:, :3]


class InPieces(Serial):
    """Cuts sums over blocks, and sends each piece and what it gives."""

    def __init__(self, pieces: int = 3) -> None:
        self._pieces = pieces
        self.cut: list[tuple[type, int]] = []
        """What was cut, and in how many pieces."""

    def sum_blocks(self, asked: BlockSum[Any], shards: Sequence[ShardRange]) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(block_sums, "LEAST_GROUPS", 1)
            pieces = asked.cut(self._pieces)
        self.cut.append((type(asked), len(pieces)))
        found = [sent(sent(piece).total(sent(list(shards)))) for piece in pieces]
        return reduce(asked.merge, found)


def sent(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


Made = tuple[Path, nn.Module, Tensor]


def recorded(optimizer: str, path: Path) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    narrow = optimizer == "Lion"
    x, y = torch.randint(0, 5, (SAMPLES,)), torch.randn(SAMPLES, 3)
    model: nn.Module = Small(bias=True)
    if optimizer in ("Muon", "Shampoo", "SOAP"):  # which take matrices
        model, x = (
            nn.Sequential(nn.Linear(4, 3, False), nn.Tanh(), nn.Linear(3, 3, False)),
            (torch.randn(SAMPLES, 4)),
        )
    if narrow:
        model, y = model.float(), y.float()
    made = OPTIMIZERS[optimizer](list(model.parameters()))
    codec = "bfloat16" if optimizer in LOSSY else "exact"
    with told(path), Recorder(model, made, path, keep=CODECS[codec].policy) as recorder:
        for step in range(STEPS):
            ids = (torch.arange(3) + 3 * step) % SAMPLES
            recorder.samples(ids)
            with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
                out = model(x[ids])
            (out - y[ids]).square().sum().backward()
            made.step()
            made.zero_grad()
            if step == 6:  # weights that somebody changes are booked by step
                with torch.no_grad():
                    next(model.parameters())[0].add_(0.01)
            if step % 3 == 2:
                recorder.checkpoint()
    return model.eval(), x


def answers(run: Run, model: nn.Module, x: Tensor, read: str) -> Any:
    """What a read gives, as an array; remainders are relative already, and are left so."""
    asked = x[:2]
    layer = run.layers[-1]
    numbers = {
        "audit": lambda: [1 + book.remainder for book in run.audit().books],
        "spotlight": lambda: np.concatenate(
            [reading.samples().values for reading in run.spotlight(model, asked).values()], 1
        ),
        "timeline": lambda: run.timeline(model, asked, by="epoch").values,
        "explain": lambda: run.explain(model, asked, 1).values,
        "influence": lambda: run.influence(model, asked, 1).values,
        "fisher": lambda: run.influence(model, asked, 1, method="fisher").values,
        "tracin": lambda: run.influence(model, asked, 1, method="tracin").values,
        "suspicion": lambda: run.suspicion().values,
        "state_dict": lambda: flat(run.at(STEPS - 1).state_dict()),
        "subtract": lambda: flat(run.subtract([0, 3])),
        "revisit": lambda: run.revisit([1, 4])[layer].samples().values,
        "rows": lambda: [row.value for row in run.spotlight(model, asked)[layer].rows(4)],
        "keys_only": lambda: run.spotlight(model, asked)[layer].keys_only().values,
        "memory": lambda: run.spotlight(model, asked)[layer].memory().values.sum(0).numpy(),
        "zoom": lambda: (
            run.zoom([1], model, lambda net, ids: net(x[ids]).square().sum(), steps=[1])
            .contributions(run.spotlight(model, asked)[layer])
            .check.stored
        ),
    }
    return np.asarray(numbers[read](), dtype=float)


def flat(weights: dict[str, Tensor]) -> Any:
    return torch.cat([w.double().flatten() for _, w in sorted(weights.items())]).numpy()


def close(found: Any, expected: Any, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


def offered(optimizer: str) -> list[str]:
    """Rows with a number each are what `memory` is made of."""
    return [read for read in READS if read != "memory" or optimizer.startswith("SGD")]
