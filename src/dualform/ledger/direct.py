"""Writing large files past the page cache.

A run is written once, while training needs the processor and the memory. Through the page cache a
gigabyte costs up to two seconds of the processor, and pushes training data out of memory; past it,
where the system can, the disk takes the bytes by itself.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from zlib_ng import zlib_ng  # CRC-32 as in zlib, several times as fast

BLOCK = 4096
"""What disks take at least: direct writes have whole blocks."""
STAGE_BYTES = 4 << 20
DIRECT: int = getattr(os, "O_DIRECT", 0)


def write_new(path: Path, chunks: Iterable[Tensor]) -> tuple[int, int]:
    """Writes bytes to a new file, durably; returns how many, and their CRC-32.

    The file must not exist. If anything fails it is removed again.

    >>> import tempfile; path = Path(tempfile.mkdtemp()) / "bytes"
    >>> write_new(path, [torch.tensor([100, 117], dtype=torch.uint8)])
    (2, 1613183471)
    >>> path.read_bytes()
    b'du'
    """
    descriptor = _create(path)
    try:
        stage = Stage(descriptor)
        for chunk in chunks:
            stage.take(chunk)
        stage.finish()
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return stage.length, stage.checksum


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    path.unlink(missing_ok=True)  # some systems create what they then refuse to open
    return os.open(path, flags, 0o644)


class Stage:
    """Collects bytes in aligned memory, and gives them to a file a few megabytes at a time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory = mmap.mmap(-1, STAGE_BYTES)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._filled = 0
        self.length = self.checksum = 0

    def take(self, chunk: Tensor) -> None:
        """Adds bytes; torch copies them, and leaves the interpreter to others meanwhile."""
        done, size = 0, chunk.numel()
        while done < size:
            part = chunk[done : done + STAGE_BYTES - self._filled]
            end = self._filled + part.numel()
            self._bytes[self._filled : end].copy_(part)
            done, self._filled = done + part.numel(), end
            if end == STAGE_BYTES:
                self._pass_on()

    def finish(self) -> None:
        """Writes the rest, as whole blocks, cuts the file to its length and makes it durable."""
        self._pass_on()
        os.ftruncate(self._descriptor, self.length)
        os.fsync(self._descriptor)

    def _pass_on(self) -> None:
        view = memoryview(self._memory)
        self.checksum = zlib_ng.crc32(view[: self._filled], self.checksum)
        self.length += self._filled
        whole = view[: -(-self._filled // BLOCK) * BLOCK]
        while whole:
            whole = whole[self._write(whole) :]
        self._filled = 0

    def _write(self, view: memoryview) -> int:
        try:
            return os.write(self._descriptor, view)
        except OSError as error:
            if error.errno != errno.EINVAL or not DIRECT:
                raise
        import fcntl  # only where there are direct writes

        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~DIRECT)
        return os.write(self._descriptor, view)
