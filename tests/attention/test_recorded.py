"""Training of a derived layer is recorded like any other: the two memories of a transformer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.told import told
from torch import Tensor, nn

import dualform
from dualform import attention


class Net(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.attention = attention.MultiheadAttention(16, 4, batch_first=True, kind=kind, **options)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(x, x, x, need_weights=False)
        return self.out(y.mean(1))


DERIVED = attention.Primal(keys=(attention.RmsNorm(),), normalizer=lambda p: 1 + p.sum(-1, True))


@pytest.mark.parametrize("kind", ["batch_norm", "scaled_heads", "linear", "entmax", DERIVED])
def test_every_parameter_is_booked_by_row(kind: Any, tmp_path: Path) -> None:
    audit = trained(Net(kind), tmp_path)
    assert audit.coverage == 1
    assert audit.remainder < 1e-12


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("batch_norm", {"beta": nn.Parameter(torch.ones(4, 1, 1))}),
        ("entmax", {"alpha": nn.Parameter(torch.full((4, 1, 1), 1.5))}),
    ],
)
def test_what_a_kind_learns_is_booked(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    audit = trained(Net(kind, **options), tmp_path)
    assert audit.remainder < 1e-12
    assert {f"attention.{name}" for name in options} <= {book.name for book in audit.books}


def trained(net: nn.Module, tmp_path: Path) -> dualform.Audit:
    torch.manual_seed(0)
    net = net.double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with told(tmp_path / "run"), dualform.record(net, optimizer, tmp_path / "run"):
        for _ in range(3):
            x, y = torch.randn(8, 10, 16).double(), torch.randint(3, (8,))
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return dualform.open(tmp_path / "run").audit()
