"""What was read of objects, in temporary files: a block is fetched once, and then mapped.

The files have no names, so that nothing stays of them. Of those that were read longest ago so many
are let go that the others keep within a bound.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from io import RawIOBase
from threading import Lock
from typing import Any

from dualform.ledger.object_store import FoundObject, ObjectStore

BLOCK = 1 << 20
"""Bytes that are fetched together or not at all."""
REQUEST = 8 << 20
"""Bytes that one request asks for at most."""
SIDE_BY_SIDE = 16
"""Requests that are under way at a time, at most."""
KEPT, KEPT_FILES = 4 << 30, 200
"""Bytes that stay in temporary files, and how many of those there are, at most."""


class CopiedObject:
    """The blocks of an object that were fetched, where they lie in it."""

    def __init__(self, store: ObjectStore, key: str, found: FoundObject) -> None:
        self._store, self._key, self._found = store, key, found
        self.size = found.size
        self.descriptor = _unnamed(self.size)
        weakref.finalize(self, os.close, self.descriptor)
        self._blocks: dict[int, Future[None]] = {}
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """How many bytes were fetched, up to whole blocks."""
        return len(self._blocks) * BLOCK

    def fill(self, begin: bytes) -> None:
        """Keeps the first bytes, which were fetched already."""
        os.pwrite(self.descriptor, begin, 0)
        whole = -(-len(begin) // BLOCK) if len(begin) == self.size else len(begin) // BLOCK
        done: Future[None] = Future()
        done.set_result(None)
        self._blocks |= dict.fromkeys(range(whole), done)

    def fetch(self, start: int, stop: int, ahead: int = 0) -> None:
        """Returns when some bytes lie in the file; begins to fetch so many behind them."""
        stop, end = min(stop, self.size), min(stop + ahead, self.size)
        wanted = range(start // BLOCK, -(-stop // BLOCK))
        with self._lock:
            missing = [b for b in range(wanted.start, -(-end // BLOCK)) if b not in self._blocks]
            for first, last in _runs(missing):
                under_way = _threads().submit(self._fetch, first, last)
                self._blocks |= dict.fromkeys(range(first, last), under_way)
            awaited = {self._blocks[block] for block in wanted}
        for one in awaited:
            one.result()

    def _fetch(self, first: int, last: int) -> None:
        """Fetches some blocks; those that do not come are asked for again the next time."""
        start, stop = first * BLOCK, min(last * BLOCK, self.size)
        try:
            data = memoryview(self._store.read(self._key, start, stop, self._found))
            while data:
                written = os.pwrite(self.descriptor, data, stop - len(data))
                data = data[written:]
        except BaseException:
            with self._lock:
                for block in range(first, last):
                    self._blocks.pop(block, None)
            raise


@dataclass(frozen=True)
class RemoteObject:
    """An object as it was found, which is read from wherever its blocks are."""

    store: ObjectStore
    key: str
    found: FoundObject

    @classmethod
    def find(cls, store: ObjectStore, key: str) -> RemoteObject:
        """An object as it is now."""
        begin, found = store.begin(key, BLOCK)
        remote = cls(store, key, found)
        _copies.of(remote).fill(begin)
        return remote

    def open(self) -> ObjectFile:
        """The object as a file."""
        return ObjectFile(_copies.of(self))


class ObjectFile(RawIOBase):
    """An object as a file that is read: its blocks are fetched when they are asked for."""

    def __init__(self, copy: CopiedObject) -> None:
        self.copy = copy
        self._at = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def fileno(self) -> int:
        """The temporary file, in which only the blocks are right that were fetched."""
        return self.copy.descriptor

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Goes to a place."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.copy.size}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """The place where it is read on."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Reads on, as far as there is room."""
        count = max(0, min(len(buffer), self.copy.size - self._at))
        self.copy.fetch(self._at, self._at + count)
        read = os.preadv(self.copy.descriptor, [memoryview(buffer)[:count]], self._at)
        self._at += read
        return read


class _Copies:
    """The objects that were read last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[ObjectStore, str, str], CopiedObject] = OrderedDict()
        self._lock = Lock()

    def of(self, remote: RemoteObject) -> CopiedObject:
        """What was fetched of an object."""
        name = (remote.store, remote.key, str(remote.found))
        with self._lock:
            if name not in self._kept:
                self._kept[name] = CopiedObject(remote.store, remote.key, remote.found)
            self._kept.move_to_end(name)
            while len(self._kept) > 1 and self._too_many:
                self._kept.popitem(last=False)
            return self._kept[name]

    @property
    def _too_many(self) -> bool:
        kept = self._kept.values()
        return len(kept) > KEPT_FILES or sum(copy.nbytes for copy in kept) > KEPT


_copies = _Copies()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(SIDE_BY_SIDE, "dualform-objects")


def _unnamed(size: int) -> int:
    """A file that goes when it is closed, with room that takes no space yet."""
    descriptor, path = tempfile.mkstemp(prefix="dualform-")
    os.unlink(path)
    os.ftruncate(descriptor, size)
    return descriptor


def _runs(blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Neighbors together, as many as one request asks for.

    >>> list(_runs([0, 1, 5]))
    [(0, 2), (5, 6)]
    """
    first = last = -1
    for block in blocks:
        if block != last or (last - first) * BLOCK >= REQUEST:
            if last > first:
                yield first, last
            first = last = block
        last = block + 1
    if last > first:
        yield first, last
