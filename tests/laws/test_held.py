"""Where calls are dear, pages hold what layers made, and do not copy it: the ledger is the same."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from tests.cases.layers import CASES
from tests.laws.grid import problem
from tests.told import told
from torch import Tensor, nn

import dualform
from dualform.ledger import Ledger

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")


def hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records as on a GPU from here on."""
    for name in ("pages", "gradients"):
        module = importlib.import_module(f"dualform.recording.{name}")
        monkeypatch.setattr(module, "calls_are_dear", lambda tensor: True)


def rows(path: Path) -> dict[str, Tensor]:
    """All keys, values and segments of a run."""
    ledger = Ledger(path)
    names = {name for shard in ledger.shards for name in shard.file.arrays if "/" in name}
    return {name: ledger.column(name) for name in sorted(names)}


@pytest.mark.parametrize("case", CASES)
def test_held_rows_are_the_copied_ones(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("copied", "held"):
        problem(case, torch.float32).train("SGD, Nesterov", tmp_path / name)
        hold(monkeypatch)
    copied, held = rows(tmp_path / "copied"), rows(tmp_path / "held")
    assert copied.keys() == held.keys()
    assert all(torch.equal(copied[name], held[name]) for name in copied)


class Overwriting(nn.Module):
    """Keeps what its first layer made, for the loop to change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = torch.tanh(self.first(x))
        return self.second(self.hidden)


def trained(path: Path, overwritten: str) -> dualform.Audit:
    """The books of a loop that changes its input, or what a layer made, before it steps."""
    model = Overwriting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, data = torch.empty(6, 4), torch.randn(8, 6, 4)
    with told(path), dualform.record(model, optimizer, path):
        for batch in data:
            x.copy_(batch)
            model(x).square().sum().backward()
            if overwritten:
                (x if overwritten == "input" else model.hidden.detach()).zero_()
            optimizer.step()
            optimizer.zero_grad()
    return dualform.open(path).audit()


def test_what_the_loop_fills_again_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(monkeypatch)
    audit = trained(tmp_path / "run", "input")
    assert audit.coverage == 1.0
    assert audit.remainder <= 1e-6


def test_what_is_changed_while_it_is_held_goes_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(monkeypatch)
    lines = {book.name: book for book in trained(tmp_path / "run", "hidden").books}
    assert lines["first.weight"].granularity == "row"
    assert lines["second.weight"].granularity == "step"
    assert "not the sum of the rows" in lines["second.weight"].reason
    assert max(book.remainder for book in lines.values()) <= 1e-6
