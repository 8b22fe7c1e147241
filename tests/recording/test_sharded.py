"""Models of which each process has a part of every parameter are recorded whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.recording.sharded_loops import FOUR, LOOPS, SAMPLES, STEPS, train_all
from tests.recording.trained_by import trained_by

import dualform


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes have recorded every loop."""
    made = tmp_path_factory.mktemp("sharded")
    trained_by(2, train_all, made)
    return made


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where four processes have recorded some of them."""
    made = tmp_path_factory.mktemp("four")
    trained_by(4, train_all, made)
    return made


@pytest.mark.parametrize("name", LOOPS)
def test_its_books_balance(name: str, folder: Path) -> None:
    check_balance(name, folder)


@pytest.mark.long
@pytest.mark.parametrize("name", FOUR)
def test_its_books_balance_in_four_processes(name: str, four: Path) -> None:
    check_balance(name, four)


def check_balance(name: str, folder: Path) -> None:
    """Holds a run against the model whose training it is of."""
    loop, run = LOOPS[name], dualform.open(folder / name)
    assert run.steps == STEPS
    assert list(run.source.ledger.check()) == []
    assert set(run.ids) == set(range(SAMPLES))
    trained = torch.load(folder / f"{name}.pt")
    for part, weight in run.state_dict().items():
        assert torch.equal(weight, trained[part]), part
    audit = run.audit()
    by_step = {book.name for book in audit.books if "step" in book.granularity}
    assert by_step == set(loop.by_step)
    assert loop.by_step or audit.coverage == 1.0
    assert audit.remainder <= loop.tolerance
