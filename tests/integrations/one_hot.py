"""Data whose features say which sample it is, so that recorded ids can be held against the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import dualform

COUNT, CLASSES = 22, 3
X, Y = torch.eye(COUNT, dtype=torch.float64), torch.arange(COUNT) % CLASSES
"""In double precision, so that no remainder is large against a small change by chance."""


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """Items as most torch code has them."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]


class Columns(Dataset[dict[str, Any]]):
    """Items as transformers has them, with a column that the model does not take."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": X[index], "labels": Y[index], "text": f"sample {index}"}


class Net(nn.Module):
    """Two layers and some chance; it keeps a diary of the samples it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(COUNT, 8), nn.Linear(8, CLASSES)
        self.double()
        self.diary: list[list[int]] = []

    @property
    def seen(self) -> list[int]:
        return [index for ids in self.diary for index in ids]

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        if torch.is_grad_enabled():
            self.diary.append(x.argmax(1).tolist())
        logits = self.last(F.dropout(torch.tanh(self.first(x)), 0.1, self.training))
        return logits if labels is None else {"loss": F.cross_entropy(logits, labels)}


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def check_run(path: Path, net: Net, accumulate: int = 1, layer: str = "first") -> dualform.Run:
    """Every row has the id of the sample its key shows, in the step that sample was trained in."""
    run = dualform.open(path)
    audit = run.audit()
    assert audit.remainder <= 1e-6, audit
    assert audit.coverage == 1.0, audit
    ids = sorted(set(net.seen))
    assert run.ids == ids
    reading = run.revisit(ids)[layer]
    visits = reading.keys_only().values  # one-hot keys: x·q counts the rows of q's sample
    assert (visits == torch.tensor([net.seen.count(i) for i in ids]).diag().numpy()).all()
    if accumulate:
        trained = {(i, 1 + at // accumulate) for at, ids in enumerate(net.diary) for i in ids}
        assert {(row.id, row.step) for row in reading.rows(10_000).rows} == trained
    return run
