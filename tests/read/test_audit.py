"""What an audit says of remainders: how much of them rounding of the weights can be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.cases.optimizers import OPTIMIZERS
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import dualform
from dualform.read.audit import SUSPECT
from dualform.testing import Loop, train


def audited(
    make: type[Optimizer], lr: float, seed: int, path: Path, dtype: torch.dtype = torch.float32
) -> dualform.Audit:
    """Of a model whose weights are large next to what training changes."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    x, y = torch.randn(10, 6).to(dtype), torch.randn(10, 3).to(dtype)
    train(model, make(model.parameters(), lr=lr), x, y, Loop(steps=40), path)
    return dualform.open(path).audit()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("make", "lr"), [(SGD, 1e-4), (AdamW, 1e-5)])
def test_little_change_is_left_to_rounding(
    make: type[Optimizer], lr: float, seed: int, tmp_path: Path
) -> None:
    """Remainders are far over 1e-6, and all of them within what rounding can leave."""
    audit = audited(make, lr, seed, tmp_path / "run")
    assert audit.remainder > 5 * SUSPECT
    assert not audit.beyond_rounding
    assert "rounding of the stored weights can be all of it" in repr(audit)
    assert audit.to_dict()["books"][0]["rounding"] == audit.books[0].rounding


def test_rounding_is_of_the_weights_own_precision(tmp_path: Path) -> None:
    single, double = (
        audited(SGD, 0.05, 0, tmp_path / str(dtype), dtype)
        for dtype in (torch.float32, torch.float64)
    )
    for one, other in zip(single.books, double.books, strict=True):
        assert one.rounding == pytest.approx(2.0**29 * other.rounding, rel=1e-3)


def test_a_unit_in_the_last_place(tmp_path: Path) -> None:
    """`n · |ulp(W)| / |W_T - W_0|`, for weights whose last place is known."""
    weight = nn.Parameter(torch.tensor([[1.5, -3.0, 0.0]]))
    model = nn.Linear(3, 1, bias=False)
    model.weight = weight
    optimizer = SGD(model.parameters(), lr=0.5)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for step in range(4):
            recorder.samples([step])
            model(torch.tensor([[0.0, 0.25, 0.0]])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    (book,) = dualform.open(tmp_path / "run").audit().books
    places = Tensor([2.0**-23, 2.0**-22, 0.0]).norm()
    assert book.rounding == pytest.approx(float(places) * 4 / 0.5, rel=1e-6)


@pytest.mark.skipif("Muon" not in OPTIMIZERS, reason="torch has Muon from 2.9 on")
def test_other_remainders_are_not(tmp_path: Path) -> None:
    """What bfloat16 leaves of Muon's steps is more."""
    torch.manual_seed(0)
    model = nn.Linear(6, 8, bias=False)
    optimizer = OPTIMIZERS["Muon"](model.parameters())
    train(model, optimizer, torch.randn(10, 6), torch.randn(10, 8), Loop(), tmp_path / "run")
    audit = dualform.open(tmp_path / "run").audit()
    assert audit.beyond_rounding == list(audit.books)
    named = ", ".join(book.name for book in audit.books[:3])
    assert f"more than rounding of the stored weights can be: {named}" in repr(audit)


def test_a_remainder_is_the_rounding_of_all_steps_added_up(tmp_path: Path) -> None:
    """Of SGD with momentum: each weight is rounded, and each momentum, which goes on to count."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 5))
    rate, momentum, data = 0.01, 0.5, torch.randn(200, 30)
    optimizer = SGD(model.parameters(), lr=rate, momentum=momentum)
    rounded = {name: torch.zeros_like(p).double() for name, p in model.named_parameters()}
    buffers = {name: torch.zeros_like(p).double() for name, p in model.named_parameters()}
    with dualform.record(model, optimizer, tmp_path / "run", strict=True) as recorder:
        for _ in range(400):
            ids = torch.randint(200, (16,))
            recorder.samples(ids)
            optimizer.zero_grad()
            (model(data[ids]) - data[ids, :5]).square().mean().backward()
            before = {name: p.detach().double() for name, p in model.named_parameters()}
            optimizer.step()
            for name, p in model.named_parameters():
                now = optimizer.state[p]["momentum_buffer"].double()
                assert p.grad is not None
                off = now - (momentum * buffers[name] + p.grad.double())
                rounded[name] += p.detach().double() - (before[name] - rate * now)
                rounded[name] -= rate * off / (1 - momentum)
                buffers[name] = now
    for book in dualform.open(tmp_path / "run").audit().books:
        found = float(rounded[book.name].norm()) / book.change
        assert book.remainder == pytest.approx(found, rel=0.02), book.name
