"""Gradients of 16-bit kernels, found again from their rows to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.cases.optimizers import OPTIMIZERS
from torch import Tensor, nn
from torch.nn import functional as F

import dualform
from dualform.ledger import Ledger
from dualform.optimizers import StateRule, apply
from dualform.read.coefficients import Accounting
from dualform.read.engine import RowReader
from dualform.read.seen import replayed_gradients
from dualform.read.step_gradients import is_rounded, kernel_dtype, rounded_gradients, step_gradients
from dualform.read.weights import balance, initial_part

STEPS, SIGNS = 6, [name for name in ("Rprop", "Lion") if name in OPTIMIZERS]


class Twice(nn.Module):
    """One weight three times in a forward pass: its gradients are added up in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Parts(nn.Module):
    """Parts of one weight: each is cast by itself, and widened before it is added."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 12) / 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = F.linear(torch.tanh(F.linear(x, self.weight[:12])), self.weight[6:18])
        return found


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 7)),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (3, 4)), nn.Conv1d(3, 9, 3, padding=1)),
    "twice": Twice,
    "parts": Parts,
    "norm": lambda: nn.Sequential(nn.Linear(12, 20), nn.LayerNorm(20)),
}


def trained(
    name: str, optimizer: str, accumulate: int, path: Path
) -> tuple[Ledger, dict[str, list[Tensor]]]:
    """A run under autocast, and the gradients that its optimizer saw."""
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(32, 12)
    made = OPTIMIZERS[optimizer](model.parameters())
    seen: dict[str, list[Tensor]] = {key: [] for key, _ in model.named_parameters()}
    with dualform.record(model, made, path) as recorder:
        for _ in range(STEPS):
            for ids in torch.randperm(32)[:16].chunk(accumulate):
                recorder.samples(ids)
                with torch.autocast("cpu", torch.bfloat16):
                    output = model(x[ids])
                (output.float() - 1).square().mean().backward()
            for key, parameter in model.named_parameters():
                assert parameter.grad is not None
                seen[key].append(parameter.grad.double().clone())
            made.step()
            made.zero_grad()
    return Ledger(path), seen


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", ["linear", "convolution", "twice", "parts"])
def test_what_a_kernel_rounded(name: str, accumulate: int, tmp_path: Path) -> None:
    """One use, several in a backward pass, parts, micro-batches: the same bits, nearly always."""
    ledger, seen = trained(name, "Rprop", accumulate, tmp_path / "run")
    for book in ledger.info.books:
        assert is_rounded(ledger, book)
        found = rounded_gradients(RowReader(ledger), book, 1, STEPS)
        plain = step_gradients(RowReader(ledger), book, 1, STEPS)
        true = torch.stack(seen[book.name])
        same, exact = (torch.stack([g[t] for t in sorted(g)]) == true for g in (found, plain))
        assert same.double().mean() > 0.99 > 0.9 > exact.double().mean()
        gap = torch.stack([found[t] for t in sorted(found)]) - true
        assert gap.abs().max() <= 2**-7 * true.abs().max()


def test_what_no_kernel_rounds(tmp_path: Path) -> None:
    """Normalizations have 16-bit rows and gradients of 32; tables and float32 rows neither."""
    ledger, _ = trained("norm", "Rprop", 1, tmp_path / "run")
    dtypes = {
        book.name: kernel_dtype(ledger, book, stream)
        for book in ledger.info.books
        for stream in book.terms
    }
    cast, plain = dict.fromkeys(("0.weight", "0.bias"), torch.bfloat16), ("1.weight", "1.bias")
    assert dtypes == cast | dict.fromkeys(plain)


@pytest.mark.parametrize("optimizer", SIGNS)
@pytest.mark.parametrize("name", ["linear", "twice", "parts"])
def test_signs_are_those_of_what_was_seen(optimizer: str, name: str, tmp_path: Path) -> None:
    """Coefficients times sums of rows are the books, and the books are the weights."""
    ledger, _ = trained(name, optimizer, 2, tmp_path / "run")
    accounting = Accounting(ledger, STEPS)
    assert isinstance(accounting.rule, StateRule)
    for book in ledger.info.books:
        total = initial_part(accounting, book)
        for span in accounting.spans([book]):
            found = span.coefficients[book.name].operators
            for step, gradient in step_gradients(
                accounting.reader, book, span.first, span.last
            ).items():
                total = total + apply(found[step], gradient)
        whole, initial = balance(accounting, book)
        assert (total - whole).abs().max() <= 1e-12
        kept = ledger.weights(STEPS)[book.name].double()
        assert (kept - whole).norm() <= 1e-6 * (kept - initial).norm()
        _, ratios = replayed_gradients(RowReader(ledger), accounting.rule, book, 1, STEPS)
        assert len(ratios) == STEPS


@pytest.mark.parametrize("optimizer", ["Adam", "Adagrad"])
def test_others_are_replayed_from_the_rows(optimizer: str, tmp_path: Path) -> None:
    """What 16 bits took from a gradient is their remainder, and small."""
    ledger, _ = trained("linear", optimizer, 1, tmp_path / "run")
    rule = Accounting(ledger, STEPS).rule
    assert isinstance(rule, StateRule)
    assert all(
        not replayed_gradients(RowReader(ledger), rule, b, 1, 2)[1] for b in ledger.info.books
    )
    assert 1e-5 < dualform.open(tmp_path / "run").audit().remainder < 1e-2
