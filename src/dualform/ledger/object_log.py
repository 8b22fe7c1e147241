"""A log in object storage, where nothing can be appended: each line is an object.

They are numbered, and each is created only where there is none yet. So of two writers of one log
the second fails, and whoever takes a run over puts an object where the next line would be.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dualform.errors import LedgerError, RunLockedError
from dualform.ledger.files import open_plain
from dualform.ledger.format import FOLDER, LOG_FILE
from dualform.ledger.object_copies import SIDE_BY_SIDE
from dualform.ledger.object_path import ObjectPath
from dualform.ledger.object_store import TakenError

LINE = re.compile(r"commits-([0-9]{8,})\.jsonl")
"""What the object of a line is called: by its number, from 1."""
CLOSED = b"closed"
"""What is put in place of a line by who takes a run over; it is no line, since no line ends it."""


class ObjectLog:
    """A new log, line by line, and as one object when nothing will follow."""

    def __init__(self, folder: ObjectPath) -> None:
        self._folder = folder
        self._lines: list[bytes] = []
        self._broken = False

    def append(self, line: bytes) -> None:
        """Adds a line; where that fails, none is added any more."""
        number = len(self._lines) + 1
        try:
            (self._folder / f"commits-{number:08d}.jsonl").create(line)
        except TakenError as error:
            self._broken = True
            raise RunLockedError(
                f"another process has taken over '{self._folder.parent}', since the lock of this "
                "one was not renewed for a while"
            ) from error
        except LedgerError:
            self._broken = True
            raise
        self._lines.append(line)

    def end(self) -> bool:
        """Puts the log as one object, which is read faster; not where a line may be missing."""
        if not self._broken:
            (self._folder / LOG_FILE).create(b"".join(self._lines))
        return not self._broken

    def close(self) -> None:
        """Nothing: every line is durable."""


def read_lines(folder: Path) -> list[bytes]:
    """What the objects of a log's lines say, in order; a copied run has them as files."""
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        return list(pool.map(_read, _line_files(folder)))


def _line_files(folder: Path) -> list[Path]:
    found = [entry for entry in folder.glob("commits-*.jsonl") if LINE.fullmatch(entry.name)]
    return sorted(found, key=lambda entry: int(entry.name[8:-6]))


def _read(file: Path) -> bytes:
    if isinstance(file, ObjectPath):
        return file.read_bytes()
    with open_plain(file) as opened:
        return opened.read()


def close_log(run: ObjectPath, folder: str) -> None:
    """Sees to it that nothing is added to a log any more."""
    if not FOLDER.fullmatch(folder):
        raise LedgerError(f"the lock of '{run}' names no folder of a writer: {folder!r}.")
    log = run / folder
    while True:
        there = _line_files(log)
        if there and _read(there[-1]) == CLOSED:
            return
        try:
            (log / f"commits-{len(there) + 1:08d}.jsonl").create(CLOSED)
        except TakenError:
            continue  # its writer is not dead, and has added a line meanwhile
