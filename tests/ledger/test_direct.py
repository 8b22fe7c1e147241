"""Files written past the page cache: the bytes are all there, whatever their lengths."""

from __future__ import annotations

import errno
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dualform.ledger import direct
from dualform.ledger.direct import BLOCK, write_new

LENGTHS = st.lists(
    st.one_of(st.integers(0, 300), st.integers(-2, 2).map(lambda more: BLOCK + more)), max_size=12
)


def random_bytes(lengths: list[int]) -> list[Tensor]:
    return [torch.randint(0, 256, (length,), dtype=torch.uint8) for length in lengths]


def joined(chunks: list[Tensor]) -> bytes:
    return b"".join(bytes(chunk.tolist()) for chunk in chunks)


@given(LENGTHS, st.integers(1, 3))
def test_what_is_written_is_what_was_given(lengths: list[int], blocks: int) -> None:
    chunks = random_bytes(lengths)
    path = Path(tempfile.mkdtemp()) / "file"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "STAGE_BYTES", blocks * BLOCK)
        length, checksum = write_new(path, chunks)
    assert path.read_bytes() == joined(chunks)
    assert (length, checksum) == (sum(lengths), zlib.crc32(joined(chunks)))


def refusing(function: Any, refused: Any) -> Any:
    """The system's function, where it refuses what is direct."""

    def call(*args: Any) -> Any:
        if refused(*args):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return function(*args)

    return call


def is_direct(descriptor: int, data: Any) -> bool:
    import fcntl

    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & direct.DIRECT)


@pytest.mark.skipif(not direct.DIRECT, reason="this system has no direct writes to refuse")
@pytest.mark.parametrize("at", ["open", "write"])
def test_systems_without_direct_writes(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = {"open": lambda path, flags, mode: flags & direct.DIRECT, "write": is_direct}[at]
    monkeypatch.setattr(os, at, refusing(getattr(os, at), refused))
    chunks = random_bytes([5000, 7])
    assert write_new(tmp_path / "file", chunks) == (5007, zlib.crc32(joined(chunks)))
    assert (tmp_path / "file").read_bytes() == joined(chunks)


def test_a_disk_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write_new(tmp_path / "file", random_bytes([10]))
    assert not (tmp_path / "file").exists()


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "file", random_bytes([10]))
    assert (tmp_path / "file").read_bytes() == b"mine"
