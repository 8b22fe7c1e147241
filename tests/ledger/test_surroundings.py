"""A run where the system is not as usual: folders that cannot be written, clocks that jump."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import dualform
from dualform.errors import LedgerError
from dualform.ledger import Ledger
from dualform.testing import tiny_run

NOBODY = 65534


@pytest.fixture
def read_only() -> Iterator[Path]:
    """A folder with a run, of which nothing can be written, not even by its owner."""
    folder = Path(tempfile.mkdtemp())
    run, _, _ = tiny_run()
    shutil.copytree(run.path, folder / "run")
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield folder
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)
    shutil.rmtree(folder)


def as_nobody(work: Callable[[], None]) -> int:
    """What a process without rights ends with: 0 if nothing went wrong."""
    child = os.fork()
    if not child:
        try:
            if not os.getuid():  # who may write anything
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            work()
        except BaseException as error:
            print(repr(error))
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def record(path: Path) -> None:
    """Six steps, with a checkpoint behind each other one."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, path) as recorder:
        for step in range(6):
            model(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 2:
                recorder.checkpoint()


def test_a_run_that_cannot_be_written_is_read(read_only: Path) -> None:
    """And whatever would write says so; nothing of the run is another."""
    path = read_only / "run"
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}

    def work() -> None:
        run = dualform.open(path)
        assert run.audit().remainder < 1e-5
        assert not run.check()
        for write in (
            lambda: record(read_only / "other"),
            lambda: dualform.compact(path, keep="half"),
            lambda: dualform.describe(path, [0], labels=[1]),
        ):
            with pytest.raises(
                LedgerError, match=r"cannot write to .*Permission denied.*; (cho|mou)"
            ):
                write()

    assert not as_nobody(work)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_a_clock_that_jumps_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path / "usual")
    draw = random.Random(0)
    monkeypatch.setattr(time, "time", lambda: draw.choice([-1e9, 0.0, 1e9, 1e12]))
    record(tmp_path / "jumping")
    ledgers = [Ledger(tmp_path / name) for name in ("usual", "jumping")]
    usual, jumping = ([s.path.read_bytes() for s in ledger.shards] for ledger in ledgers)
    assert usual == jumping
    assert len(usual) == 3
    assert not [*ledgers[1].check()]
