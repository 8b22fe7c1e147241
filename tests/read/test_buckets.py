"""Records in the order of samples, by way of a temporary file: the same, in little memory."""

from __future__ import annotations

import errno
import gc
import shutil
import tempfile
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from tests.read.test_growing import KEPT, influence, near, record
from torch import Tensor

import dualform
from dualform.errors import ReadingError
from dualform.ledger import Ledger
from dualform.read.engine import ShardRange
from dualform.read.grouping import BySample
from dualform.read.progress import watched
from dualform.read.samples_matrix import buckets, folds, group_sums, matrix, visits
from dualform.read.samples_matrix.buckets import TemporaryDisk
from dualform.read.samples_matrix.matrix import SamplesMatrix
from dualform.read.samples_matrix.visits import Arrays, Reused, Visits, room_of

GATHERED = 1 << 11
"""So little that records come in many parts."""
ROUNDING = 1e-5
"""Columns are held in float32."""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[IO[bytes]]]:
    """The temporary files that are made, in a folder in which they leave nothing."""
    folder, made, make = tmp_path / "temporary", list[IO[bytes]](), tempfile.TemporaryFile
    folder.mkdir()

    def making(*given: Any, **named: Any) -> IO[bytes]:
        made.append(make(*given, **named))
        return made[-1]

    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(tempfile, "TemporaryFile", making)
    yield made
    gc.collect()
    assert all(file.closed for file in made)
    assert list(folder.glob("dualform-*")) == []


def with_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few samples, from records in many parts."""
    monkeypatch.setattr(matrix, "COLUMN_BYTES", 1 << 12)
    monkeypatch.setattr(folds, "GATHERED_BYTES", GATHERED)
    monkeypatch.setattr(visits, "WINDOW_BYTES", 512)
    monkeypatch.setattr(visits, "CACHED_BYTES", 512)


@pytest.mark.parametrize("keep", KEPT)
def test_many_parts_are_one(
    keep: str, tmp_path: Path, files: list[IO[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, where as many visits meet in one product."""
    record(tmp_path / "run", KEPT[keep], "SGD", True)
    source = dualform.open(tmp_path / "run").source
    monkeypatch.setattr(visits, "CACHED_BYTES", 1)

    def columns() -> list[Tensor]:
        found = SamplesMatrix(source.accounting, BySample(source.numbers))
        return [columns.values.clone() for columns in found.columns()]

    one = columns()
    assert files == []  # what fits into memory stays there
    monkeypatch.setattr(folds, "GATHERED_BYTES", GATHERED)
    assert all(map(torch.equal, columns(), one))
    together = {frozenset(book.terms) for book in source.ledger.info.books}
    assert len(files) == sum(map(len, together))


@pytest.mark.parametrize("keep", KEPT)
def test_what_is_held(
    keep: str, tmp_path: Path, files: list[IO[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much as is said, and a visit of each stream; the rest is on disk, twice at most."""
    model, x = record(tmp_path / "run", KEPT[keep], "SGD", True)
    expected = influence(tmp_path / "run", model, x)
    with_little_memory(monkeypatch)
    held, written, call, write = list[int](), list[int](), Reused.__call__, TemporaryDisk.write

    def noting(self: Reused, arrays: Arrays) -> list[Tensor]:
        held.append(room_of(arrays))
        return call(self, arrays)

    def writing(self: TemporaryDisk, at: int, rows: Tensor) -> None:
        written.append(rows.nbytes)
        write(self, at, rows)

    monkeypatch.setattr(Reused, "__call__", noting)
    monkeypatch.setattr(TemporaryDisk, "write", writing)
    near(influence(tmp_path / "run", model, x), expected, ROUNDING)
    ledger = Ledger(tmp_path / "run")
    shards = ShardRange.of(ledger, 1, ledger.last_step)
    seen = [Visits(shards, stream) for stream in ledger.info.streams]
    total = sum(own.nbytes for own in seen)
    assert total > 4 * GATHERED
    assert 0 < max(held) <= GATHERED + sum(own.room_for(1) for own in seen)
    assert total <= sum(written) <= 2 * total


def test_nothing_is_left_after_an_error(
    tmp_path: Path, files: list[IO[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While records are spread, while they are added up, and where a watcher cancels."""
    model, x = record(tmp_path / "run", "rows", "SGD", True)
    with_little_memory(monkeypatch)

    def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    for module, name in ((buckets, "pieces"), (group_sums, "add_segments")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, broken)
            with pytest.raises(RuntimeError, match="broken"):
                influence(tmp_path / "run", model, x)
        assert files
        assert all(file.closed for file in files)
    with watched(broken), pytest.raises(RuntimeError, match="broken"):
        influence(tmp_path / "run", model, x)
    assert len(files) == 3


def test_nothing_is_left_where_nobody_goes_on(
    tmp_path: Path, files: list[IO[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path / "run", "rows", "SGD", True)
    source = dualform.open(tmp_path / "run").source
    with_little_memory(monkeypatch)
    found = SamplesMatrix(source.accounting, BySample(source.numbers))
    blocks = found.blocks([found.whole(found.books[0])])
    next(blocks)
    assert [file.closed for file in files] == [False]
    del blocks
    assert files[0].closed


Usage = namedtuple("Usage", "free")


def test_no_room_on_the_disk(
    tmp_path: Path, files: list[IO[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before anything is written."""
    model, x = record(tmp_path / "run", "rows", "SGD", True)
    with_little_memory(monkeypatch)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(1000))
    message = r"the records of '.' together by sample takes .* MB .*; '.*temporary' has 0.0 MB free"
    with pytest.raises(ReadingError, match=message):
        influence(tmp_path / "run", model, x)
    assert files == []


def test_a_file_that_was_cut(files: list[IO[bytes]]) -> None:
    with TemporaryDisk(3, "three numbers") as disk:
        files[0].truncate(1)
        with pytest.raises(ReadingError, match="of three numbers was cut"):
            disk.read(0, torch.zeros(3, dtype=torch.uint8))


class FullFile:
    """A file on a disk that somebody else fills meanwhile."""

    closed = False

    def seek(self, at: int) -> None:
        pass

    def truncate(self, size: int) -> None:
        pass

    def write(self, content: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        self.closed = True


def test_the_disk_fills_up(monkeypatch: pytest.MonkeyPatch) -> None:
    file = FullFile()
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: file)
    with TemporaryDisk(3, "three numbers") as disk:
        with pytest.raises(ReadingError, match="bring three numbers together"):
            disk.write(0, torch.zeros(3))
        assert not file.closed
    assert file.closed
