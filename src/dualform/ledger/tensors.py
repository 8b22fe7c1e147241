"""Safetensors files, read in ranges.

The `safetensors` package maps whole files. A ledger runs through mapped files in ranges that are
let go behind. The bytes are plain safetensors.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from io import FileIO, RawIOBase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from zlib_ng import zlib_ng  # CRC-32 as in zlib, several times as fast

from dualform.errors import CorruptError
from dualform.ledger.files import opener, parse_json
from dualform.ledger.object_copies import ObjectFile

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class ArrayPlace:
    """Where one array lies in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one step along the first axis."""
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return self.dtype.itemsize * math.prod(self.shape)


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor, without a copy where it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def pieces(rows: Tensor) -> NDArray[np.void]:
    """(rows,): each row of a contiguous CPU tensor as one piece, in the same memory.

    Numpy copies pieces in any order faster than it, or torch, copies rows of numbers.

    >>> found = torch.zeros(2, 3)
    >>> copied = pieces(torch.eye(3)).take([2, 0], out=pieces(found), mode="clip")
    >>> found
    tensor([[0., 0., 1.],
            [1., 0., 0.]])
    """
    size = rows.dtype.itemsize * math.prod(rows.shape[1:])
    if not size:
        return np.empty(len(rows), "V0")
    found: NDArray[np.void] = rows.flatten(1).view(torch.uint8).numpy().view(f"V{size}")[:, 0]
    return found


def in_index(name: str, dtype: torch.dtype) -> bool:
    """Whether an array says where others lie and how they count, so that it must not be wrong.

    >>> in_index("fc/segments", torch.int64), in_index("fc/keys", torch.float32)
    (True, False)
    """
    return not dtype.is_floating_point or name in ("hyper", "factors")


class TensorFile:
    """One safetensors file, opened for reading ranges of rows.

    >>> import tempfile; path = Path(tempfile.mkdtemp()) / "x.safetensors"
    >>> from dualform.ledger.tensor_writing import write_tensors
    >>> length, checksum = write_tensors(path, {"keys": [torch.eye(2), torch.ones(1, 2)]})
    >>> TensorFile(path).read("keys", 1, 3)
    tensor([[0., 1.],
            [1., 1.]])
    """

    def __init__(
        self, path: Path, index_crc32: int | None = None, nbytes: int | None = None
    ) -> None:
        self.path, self.open = path, opener(path)
        with self.open() as file:
            self.nbytes = _size(file)
            if nbytes not in (None, self.nbytes):
                raise CorruptError(
                    f"'{path}' has {self.nbytes:,} bytes, its log says {nbytes:,}; "
                    "restore the file from a copy of the run."
                )
            try:
                header, self.arrays = _parse(file)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise CorruptError(f"'{path}' is not a safetensors file: {error}.") from error
            if index_crc32 not in (None, self._index_checksum(file, header)):
                raise CorruptError(
                    f"'{path}' is altered: its index's checksum does not match; "
                    "restore the file from a copy of the run."
                )

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def array(self, name: str) -> ArrayPlace:
        """Where an array lies; a file that lacks it is damaged."""
        if name not in self.arrays:
            raise CorruptError(
                f"'{self.path}' has no array '{name}'; restore the file from a copy of the run."
            )
        return self.arrays[name]

    def _index_checksum(self, file: RawIOBase, header: bytes) -> int:
        checksum = int(zlib_ng.crc32(header))
        for name, place in self.arrays.items():
            if in_index(name, place.dtype):
                checksum = _continued(checksum, file, place.offset, place.nbytes)
        return checksum

    def rows(self, name: str) -> int:
        """How long an array is along its first axis; 0 where the file does not have it."""
        return self.arrays[name].shape[0] if name in self.arrays else 0

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows `start` to `stop` of an array, in memory of their own."""
        place = self.array(name)
        shape = place.shape
        if stop is not None or start:
            shape = ((shape[0] if stop is None else stop) - start, *shape[1:])
        buffer = torch.empty(shape, dtype=place.dtype)
        self.read_into(buffer, name, [(0, (start, start + (shape[0] if shape else 1)))])
        return buffer

    def read_all(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Some arrays by name, each in memory of its own."""
        places = {name: self.array(name) for name in names}
        found = {name: torch.empty(p.shape, dtype=p.dtype) for name, p in places.items()}
        with self.open() as file:
            for name, array in found.items():
                file.seek(places[name].offset)
                self._fill(file, raw(array))
        return found

    def read_into(
        self, rows: Tensor, name: str, spans: Iterable[tuple[int, tuple[int, int]]]
    ) -> None:
        """Some ranges of an array's rows into memory that is there, each from a place on.

        >>> import tempfile; path = Path(tempfile.mkdtemp()) / "x.safetensors"
        >>> from dualform.ledger.tensor_writing import write_tensors
        >>> length, checksum = write_tensors(path, {"keys": [torch.arange(6)]})
        >>> rows = torch.zeros(4, dtype=torch.long)
        >>> TensorFile(path).read_into(rows, "keys", [(2, (0, 2)), (0, (4, 6))])
        >>> rows
        tensor([4, 5, 0, 1])
        """
        place, target = self.array(name), raw(rows)
        size = place.row_bytes
        with self.open() as file:
            for at, (start, stop) in spans:
                file.seek(place.offset + start * size)
                self._fill(file, target[at * size : (at + stop - start) * size])

    def reads(
        self, rows: Tensor, name: str, start: int, piece_bytes: int
    ) -> Iterator[Callable[[], None]]:
        """Calls that read an array's rows from `start` on into memory, side by side.

        Each reads some bytes at once, and spends hardly any time in Python.
        """
        place, target = self.array(name), raw(rows)
        begin = place.offset + start * place.row_bytes
        for at in range(0, len(target), piece_bytes):
            yield partial(self._read_piece, begin + at, target[at : at + piece_bytes])

    def _read_piece(self, offset: int, target: memoryview) -> None:
        with self.open() as file:
            if isinstance(file, FileIO) and hasattr(os, "posix_fadvise"):  # all of it at once
                os.posix_fadvise(file.fileno(), offset, len(target), os.POSIX_FADV_WILLNEED)
            file.seek(offset)
            self._fill(file, target)

    def _fill(self, file: RawIOBase, target: memoryview) -> None:
        while target:
            count = file.readinto(target)
            if not count:
                raise CorruptError(f"'{self.path}' ends before its arrays do.")
            target = target[count:]

    def mapped(self, *, in_order: bool = True) -> MappedFile:
        """The file in memory as it is read: for running through it, or for going to and fro."""
        return MappedFile(self, in_order)

    def checksum(self) -> int:
        """CRC-32 of the whole file."""
        with self.open() as file:
            return _continued(0, file, 0, _size(file))


class MappedFile:
    """A mapped file whose rows are views, read ahead by the system and let go behind."""

    def __init__(self, file: TensorFile, in_order: bool) -> None:
        self._file = file
        ends = max((place.offset + place.nbytes for place in file.arrays.values()), default=0)
        with file.open() as opened:  # copy-on-write, so that torch takes it as writable
            self._copy = opened.copy if isinstance(opened, ObjectFile) else None
            if _size(opened) < ends:
                raise CorruptError(f"'{file.path}' ends before its arrays do.")
            self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        if in_order and hasattr(mmap, "MADV_SEQUENTIAL"):  # other systems manage by themselves
            self._map.madvise(mmap.MADV_SEQUENTIAL)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of an array, as a view that is valid until they are let go."""
        place = self._file.array(name)
        offset, shape = place.offset + start * place.row_bytes, (stop - start, *place.shape[1:])
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=place.dtype)
        if self._copy is not None:  # the next rows come while these are used
            nbytes = count * place.dtype.itemsize
            left = place.offset + place.nbytes - offset - nbytes
            self._copy.fetch(offset, offset + nbytes, min(nbytes, left))
        flat = torch.frombuffer(self._map, dtype=place.dtype, count=count, offset=offset)
        return flat.view(shape)

    def let_go(self, name: str, start: int, stop: int) -> None:
        """Frees the memory of rows that were used."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        place = self._file.array(name)
        first = (place.offset + start * place.row_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        last = (place.offset + stop * place.row_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


def _continued(checksum: int, file: RawIOBase, offset: int, count: int) -> int:
    """CRC-32 of so many bytes of a file, behind what it already is of."""
    file.seek(offset)
    while count and (piece := file.read(min(count, 4 << 20))):
        checksum = int(zlib_ng.crc32(piece, checksum))
        count -= len(piece)
    return checksum


def _size(file: RawIOBase) -> int:
    return file.seek(0, os.SEEK_END)


def _parse(file: RawIOBase) -> tuple[bytes, dict[str, ArrayPlace]]:
    """Reads and validates a header: a run folder may come from a stranger, or have suffered.

    Returns the bytes before the arrays, and where each array lies.
    """
    size = _size(file)
    file.seek(0)
    if size < 8:
        raise ValueError(f"it has {size} bytes")
    first = file.read(8)
    (length,) = struct.unpack("<Q", first)
    if length > min(size - 8, MAX_HEADER):
        raise ValueError(f"its header claims {length:,} bytes")
    text = file.read(length)
    header = parse_json(text)
    header.pop("__metadata__", None)
    arrays = {name: _place(name, item, 8 + length, size) for name, item in header.items()}
    ends = 8 + length
    for name, place in sorted(arrays.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if place.offset != ends:
            raise ValueError(f"array '{name}' does not begin where the one before it ends")
        ends += place.nbytes
    return first + text, arrays


def _place(name: str, item: dict[str, Any], base: int, size: int) -> ArrayPlace:
    start, end = item["data_offsets"]
    place = ArrayPlace(DTYPES[item["dtype"]], tuple(item["shape"]), base + start)
    if any(type(length) is not int or length < 0 for length in place.shape):
        raise ValueError(f"array '{name}' has shape {place.shape}")
    if math.prod(length or 1 for length in place.shape) * place.dtype.itemsize >= 1 << 63:
        raise ValueError(f"array '{name}' has shape {place.shape}, which nothing can have")
    whole = type(start) is int and type(end) is int
    if not whole or start < 0 or base + end > size or end - start != place.nbytes:
        raise ValueError(f"array '{name}' does not lie within the file")
    return place
