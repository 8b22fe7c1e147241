"""Replayed forward, a book is what its coefficients, found going back, say of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.cases.optimizers import OPTIMIZERS
from torch import Tensor, nn

import dualform
from dualform.ledger import Book, Ledger
from dualform.optimizers import apply
from dualform.read import forward
from dualform.read.coefficients import Accounting
from dualform.read.forward import Forward
from dualform.read.step_gradients import step_gradients
from dualform.read.weights import balance, initial_part

STATEFUL = [name for name in OPTIMIZERS if not name.startswith("SGD")]
STEPS = 9


def recorded(optimizer: str, path: Path) -> Ledger:
    """A run with weights kept on the way, gone on with by an optimizer that remembers nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))
    model = model.double()
    x, y = torch.randn(10, 4).double(), torch.randn(10, 3).double()
    for resume in (False, True):
        made = OPTIMIZERS[optimizer](model.parameters())
        with dualform.record(model, made, path, resume=resume) as recorder:
            for step in range(STEPS):
                ids = torch.randint(0, 10, (4,))
                recorder.samples(ids)
                (model(x[ids]) - y[ids]).square().sum().backward()
                made.step()
                made.zero_grad()
                if step == 3:
                    recorder.checkpoint()
    return Ledger(path)


def going_back(
    accounting: Accounting, book: Book, samples: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What the rows add up to by their coefficients, and the first value's part."""
    total = torch.zeros(book.shape, dtype=torch.float64)
    for span in accounting.spans([book]):
        found = span.coefficients[book.name].operators
        gradients = step_gradients(accounting.reader, book, span.first, span.last, samples)
        for step, gradient in gradients.items():
            total += apply(found[step], gradient)
    return total, initial_part(accounting, book)


@pytest.mark.parametrize("optimizer", STATEFUL)
def test_forward_is_going_back(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all samples and for some, at the end and in between, for one step and for a mean."""
    monkeypatch.setattr(forward, "BLOCK", 5)
    monkeypatch.setattr(forward, "GRADIENT_BYTES", 8 * 24 * 2)
    ledger, some = recorded(optimizer, tmp_path / "run"), torch.tensor([1, 4, 7])
    assert ledger.kept_steps[:3] != [0, 2 * STEPS]
    mean = [0.0] * 5 + [1 / (2 * STEPS - 4)] * (2 * STEPS - 4)
    for until, shares in ((2 * STEPS, ()), (6, ()), (2 * STEPS, mean)):
        accounting = Accounting(ledger, until, shares=shares)
        for book in ledger.info.books:
            rows, initial = going_back(accounting, book)
            part, _ = going_back(accounting, book, some)
            whole, left, chosen = Forward(accounting, book, some).sums()
            size = float((rows + initial).abs().max())
            for found, expected in ((whole, rows + initial), (left, initial), (chosen, part)):
                assert float((found - expected).abs().max()) <= 1e-12 * max(1.0, size)


def test_numbers_are_operators_too(tmp_path: Path) -> None:
    """Under a rule of numbers, the same sum by operators is the sum of the book."""
    accounting = Accounting(recorded("SGD, Nesterov", tmp_path / "run"), 2 * STEPS)
    for book in accounting.ledger.info.books:
        rows, initial = going_back(accounting, book)
        whole, left = balance(accounting, book)
        assert torch.equal(left, initial)
        torch.testing.assert_close(rows + initial, whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "Adagrad", "RMSprop"])
def test_books_that_are_joined_add_up_to_what_each_does_alone(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three have the same steps; the last has its own learning rate, and joins later."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)]).double()
    groups = [{"params": [*model[0].parameters(), *model[1].parameters()]}]
    made = getattr(torch.optim, optimizer)(
        [*groups, {"params": [*model[2].parameters()], "lr": 0.03}], lr=0.01
    )
    with dualform.record(model, made, tmp_path / "run") as recorder:
        for step in range(STEPS):
            model[2].requires_grad_(step > 2)
            recorder.samples(torch.arange(5))
            model(torch.randn(5, 4).double()).square().sum().backward()
            made.step()
            made.zero_grad()
            if step == 5:
                recorder.checkpoint()
    ledger, some = Ledger(tmp_path / "run"), torch.tensor([1, 3])
    accounting, books = Accounting(ledger, STEPS), ledger.info.books
    alone = {book.name: Forward(accounting, book, some).sums() for book in books}
    groups_made: list[list[str]] = []

    class Counted(forward.JoinedBooks):
        def __init__(self, joined: Sequence[Forward]) -> None:
            groups_made.append([one.book.name for one in joined])
            super().__init__(joined)

    monkeypatch.setattr(forward, "JoinedBooks", Counted)
    for book, totals in forward.forward_totals(accounting, books, some):
        for one, other in zip(alone[book.name], totals, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-13, atol=1e-15)
    assert groups_made == [["0.weight", "1.weight"], ["2.weight"]]
