"""Files that are written side by side are committed in order, and none after one that failed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from dualform.errors import LedgerError
from dualform.ledger import Ledger, LedgerWriter, RunInfo, ShardBlock, writer
from dualform.ledger.commit_queue import CommitQueue, Record

PATIENCE = 30.0


class Disk:
    """A disk that takes its time: each write ends when it is told to."""

    def __init__(self, count: int) -> None:
        self.may_end = [threading.Event() for _ in range(count)]
        self.begun = [threading.Event() for _ in range(count)]
        self.log: list[Record] = []

    def begin(self, queue: CommitQueue, number: int) -> None:
        queue.begin(lambda: self._write(number), self.log.append)

    def _write(self, number: int) -> Record:
        self.begun[number].set()
        assert self.may_end[number].wait(PATIENCE)
        return {"file": number}


def test_commits_come_in_order_whichever_write_ends_first() -> None:
    queue, disk = CommitQueue(3), Disk(3)
    for number in range(3):
        disk.begin(queue, number)
    assert all(begun.wait(PATIENCE) for begun in disk.begun)  # side by side
    disk.may_end[2].set()
    disk.may_end[1].set()
    assert disk.log == []
    disk.may_end[0].set()
    queue.wait()
    assert disk.log == [{"file": number} for number in range(3)]
    queue.close()


@pytest.mark.parametrize("side_by_side", [0, 1, 2])
def test_too_many_have_to_wait(side_by_side: int) -> None:
    queue, disk = CommitQueue(side_by_side), Disk(side_by_side + 1)
    for number in range(side_by_side):
        disk.begin(queue, number)
    with ThreadPoolExecutor(1) as other:
        one_more = other.submit(disk.begin, queue, side_by_side)
        with pytest.raises(TimeoutError):  # a begin that does not wait returns in microseconds
            one_more.result(0.5)
        assert disk.log == []
        disk.may_end[0].set()
        one_more.result(PATIENCE)
    assert disk.log == [{"file": 0}]
    for may_end in disk.may_end:
        may_end.set()
    queue.wait()
    queue.close()


@pytest.mark.parametrize("side_by_side", [0, 1, 3])
def test_many_in_a_hurry(side_by_side: int) -> None:
    """Writes that end at any moment, also just when somebody begins to wait for them."""
    queue, log = CommitQueue(side_by_side), list[Record]()
    for number in range(3000):
        queue.begin(lambda number=number: {"file": number}, log.append)
    queue.wait()
    queue.close()
    assert [record["file"] for record in log] == list(range(3000))


@pytest.mark.parametrize("side_by_side", [0, 3])
def test_nothing_is_committed_after_a_write_that_failed(
    side_by_side: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = writer.write_tensors

    def failing(path: Path, arrays: Any) -> tuple[int, int]:
        if path.name == "00000002.safetensors":
            raise OSError(5, "Input/output error")
        return whole(path, arrays)

    monkeypatch.setattr(writer, "SIDE_BY_SIDE", side_by_side)
    monkeypatch.setattr(writer, "write_tensors", failing)
    log = LedgerWriter.create(tmp_path / "run", RunInfo(), {"w": torch.zeros(1)})

    def write_four() -> None:
        for step in range(1, 5):
            log.append(ShardBlock(step, step, {"fc/keys": [torch.ones(3, 2)]}))
            log.pass_on()
        log.flush()

    with pytest.raises(LedgerError, match=r"Input/output error.*readable up to step [01]\."):
        write_four()
    with pytest.raises(LedgerError):
        log.flush()
    log.abandon()
    assert Ledger(tmp_path / "run").last_step == 1
