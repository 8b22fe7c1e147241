"""Safetensors files, written in parts.

The `safetensors` package writes whole arrays. A ledger writes each array in the parts it arrived
in, and takes the checksum while the disk works. The bytes are plain safetensors.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import torch
from torch import Tensor
from zlib_ng import zlib_ng  # CRC-32 as in zlib, several times as fast

from dualform.ledger.files import sync_folder
from dualform.ledger.object_path import ObjectPath
from dualform.ledger.tensors import CODES, in_index, raw


@dataclass(frozen=True)
class Awaited:
    """An array that is there when it is written: so one of several is in memory at a time.

    >>> awaited = Awaited((2, 3), torch.float32, lambda: torch.ones(2, 3))
    >>> awaited.nbytes, awaited.take().shape
    (24, torch.Size([2, 3]))
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    take: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return self.dtype.itemsize * math.prod(self.shape)

    def cpu(self) -> Awaited:
        """Itself: it comes into main memory."""
        return self


Array: TypeAlias = Tensor | Awaited


def write_tensors(path: Path, arrays: Mapping[str, Sequence[Array]]) -> tuple[int, int]:
    """Writes each array as the concatenation of its parts, durably; returns (bytes, CRC-32).

    The file must not exist. If anything fails it is removed again.
    """
    parts = [part for parts in arrays.values() for part in parts]
    known = [part for part in parts if isinstance(part, Tensor)]
    if len(known) < len(parts):
        return _write_awaited(path, arrays)
    chunks = [_header(arrays), *map(raw, known)]
    if isinstance(path, ObjectPath):
        return path.put_new(chunks), _checksum(chunks)
    with _new_file(path) as descriptor:
        for chunk in chunks:
            _write_all(descriptor, chunk)
        checksum = _sync_and_sum(descriptor, chunks)
    return sum(map(len, chunks)), checksum


def _write_awaited(path: Path, arrays: Mapping[str, Sequence[Array]]) -> tuple[int, int]:
    """The same where some are awaited: each is summed while it is in memory, and let go."""
    if isinstance(path, ObjectPath):
        return _put_awaited(path, arrays)
    length, checksum = 0, 0
    with _new_file(path) as descriptor:
        for chunk in _chunks(arrays):
            _write_all(descriptor, chunk)
            length, checksum = length + len(chunk), zlib_ng.crc32(chunk, checksum)
        os.fsync(descriptor)
    return length, int(checksum)


@contextmanager
def _new_file(path: Path) -> Iterator[int]:
    """A file that did not exist, to be written; removed again if that fails."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        yield descriptor
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    sync_folder(path.parent)


def _put_awaited(path: ObjectPath, arrays: Mapping[str, Sequence[Array]]) -> tuple[int, int]:
    """The same for an object, by way of a file: it may have to be put again, and is taken once."""
    with TemporaryDirectory(prefix="dualform-") as folder:
        file = Path(folder, "arrays")
        written = _write_awaited(file, arrays)
        with (
            file.open("rb") as opened,
            mmap(opened.fileno(), 0, access=ACCESS_READ) as mapped,
            memoryview(mapped) as view,
        ):
            path.put_new([view])
        return written


def _chunks(arrays: Mapping[str, Sequence[Array]]) -> Iterator[memoryview]:
    yield _header(arrays)
    for parts in arrays.values():
        for part in parts:
            yield raw(part if isinstance(part, Tensor) else part.take())


def index_checksum(arrays: Mapping[str, Sequence[Array]]) -> int:
    """CRC-32 of what a reader finds its way by: the header, then all arrays of the index."""
    checksum = zlib_ng.crc32(_header(arrays))
    for name, parts in arrays.items():
        if in_index(name, parts[0].dtype):
            for part in parts:
                assert isinstance(part, Tensor)  # awaited are weights, which are no index
                checksum = zlib_ng.crc32(raw(part), checksum)
    return int(checksum)


def _header(arrays: Mapping[str, Sequence[Array]]) -> memoryview:
    described, offset = {}, 0
    for name, parts in arrays.items():
        shape = list(parts[0].shape)
        if len(parts) > 1:
            shape[0] = sum(part.shape[0] for part in parts)
        end = offset + sum(part.nbytes for part in parts)
        code = CODES[parts[0].dtype]
        described[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)  # data starts aligned, so that mapped readers see it so
    return memoryview(struct.pack("<Q", len(text)) + text)


def _write_all(descriptor: int, chunk: memoryview) -> None:
    while chunk:
        chunk = chunk[os.write(descriptor, chunk) :]


def _sync_and_sum(descriptor: int, chunks: Sequence[memoryview]) -> int:
    """Takes the checksum while the disk is busy making the file durable."""
    with ThreadPoolExecutor(1) as pool:
        synced = pool.submit(os.fsync, descriptor)
        checksum = _checksum(chunks)
        synced.result()
    return checksum


def _checksum(chunks: Sequence[memoryview]) -> int:
    checksum = 0
    for chunk in chunks:
        checksum = int(zlib_ng.crc32(chunk, checksum))
    return checksum
