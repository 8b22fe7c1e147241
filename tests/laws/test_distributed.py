"""Every case is recorded by two processes as it is by one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.cases import CASES
from tests.laws.distributed import DTYPE, fit_all, optimizer_of
from tests.laws.grid import tolerance
from tests.recording.trained_by import trained_by

import dualform
from dualform.recording.bookkeeping import NOISY


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes have recorded all of them."""
    made = tmp_path_factory.mktemp("cases")
    trained_by(2, fit_all, made)
    return made


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_its_books_balance(name: str, folder: Path) -> None:
    case, run = CASES[name], dualform.open(folder / str(list(CASES).index(name)))
    assert list(run.source.ledger.check()) == []
    for book in run.audit().books:
        if book.reason != NOISY:
            wanted = case.reason(book.name)
            assert book.reason.startswith(wanted or ""), book
            assert book.granularity != "step" or wanted is not None, book
            is_noise = case.noise and re.search(case.noise, book.name)
            assert is_noise or book.remainder <= tolerance(optimizer_of(name), DTYPE), book


@pytest.mark.long
def test_training_is_the_same(folder: Path) -> None:
    for rank in range(2):
        assert json.loads((folder / f"problems-{rank}.json").read_text()) == {}
