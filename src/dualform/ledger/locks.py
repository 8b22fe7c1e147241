"""Who records: the lock of a rank, which nobody else takes while its process lives."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout

from dualform.errors import LedgerError, RunLockedError
from dualform.ledger.files import require
from dualform.ledger.object_lock import ObjectLock
from dualform.ledger.object_path import ObjectPath

LOCK = re.compile(r"writer-(0|[1-9][0-9]*)\.lock")
"""What a rank's lock is called."""


class RankLock(Protocol):
    """What a writer holds while it records."""

    def claim(self, folder: str) -> None:
        """Says which folder the holder is about to write into."""

    def release(self) -> None:
        """Lets others record."""


def lock_run(path: Path) -> RankLock:
    """The lock of rank 0, while no other rank records; refused while any does."""
    lock = lock_rank(path, 0)
    try:
        found = [LOCK.fullmatch(entry.name) for entry in path.iterdir()]
        others = [rank for match in found if match is not None and (rank := int(match[1]))]
        with ThreadPoolExecutor(max(1, len(others))) as pool:  # each may have to be watched
            list(pool.map(lambda rank: lock_rank(path, rank).release(), others))
    except BaseException:
        lock.release()
        raise
    return lock


def lock_rank(path: Path, rank: int) -> RankLock:
    """The lock of a rank; refused while another process has it."""
    file = path / f"writer-{rank}.lock"
    lock = ObjectLock(file) if isinstance(file, ObjectPath) else _DiskLock(file)
    try:
        lock.acquire()
    except Timeout:
        by = f" as rank {rank}" if rank else ""
        raise RunLockedError(
            f"another process is recording into '{path}'{by}; wait for it or choose another path."
        ) from None
    except LedgerError:
        raise
    except OSError as error:
        raise LedgerError(
            f"cannot write to '{path}': {error.strerror}; choose another path, or mount its disk "
            "so that it can be written."
        ) from error
    return lock


class _DiskLock:
    """A lock that the system frees when its process ends."""

    def __init__(self, file: Path) -> None:
        if os.path.lexists(file):
            require(file, "a file")  # taking it would empty what a link leads to
        self._lock = FileLock(file, thread_local=False)

    def acquire(self) -> None:
        self._lock.acquire(timeout=0)

    def claim(self, folder: str) -> None:
        """Nothing: a process that has lost its lock is dead."""

    def release(self) -> None:
        self._lock.release()
