"""Training of a derived layer is recorded like any other: the two memories of a transformer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform import attention


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attention = attention.MultiheadAttention(16, 4, batch_first=True, kind=kind)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(x, x, x, need_weights=False)
        return self.out(y.mean(1))


@pytest.mark.parametrize("kind", ["batch_norm", "scaled_heads", "linear"])
def test_every_parameter_is_booked_by_row(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net(kind).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with dualform.record(net, optimizer, tmp_path / "run"):
        for _ in range(3):
            x, y = torch.randn(8, 10, 16).double(), torch.randint(3, (8,))
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    audit = dualform.open(tmp_path / "run").audit()
    assert audit.coverage == 1
    assert audit.remainder < 1e-12
