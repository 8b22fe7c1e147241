"""The files of a run folder: only plain ones are read, and small ones are written whole or not."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import stat
from collections.abc import Callable
from functools import partial
from io import RawIOBase
from pathlib import Path
from typing import Any

from dualform.errors import CorruptError, LedgerError
from dualform.ledger.object_path import ObjectPath

ASIDE = ".exchange"
"""Behind the name of a folder: the other one, while both exchange their names."""
KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISREG, "a file"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
)


def open_plain(path: Path) -> RawIOBase:
    """Opens a file of a run for reading, unbuffered; what is no plain file is refused.

    A run may come from a stranger: a pipe would wait forever, and a link lead anywhere.

    >>> open_plain(Path("no/run.json"))
    Traceback (most recent call last):
    dualform.errors.CorruptError: 'no/run.json' is missing; restore it from a copy of the run.
    """
    return opener(path)()


def opener(path: Path) -> Callable[[], RawIOBase]:
    """Opens a file of a run as often as it is called; of an object, the one that is there now."""
    if not isinstance(path, ObjectPath):
        return partial(_open_plain, path)
    try:
        return path.found().open
    except FileNotFoundError as error:
        raise _missing(path) from error


def _open_plain(path: Path) -> RawIOBase:
    require(path, "a file")
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise LedgerError(f"cannot read '{path}': {error.strerror}.") from error


def is_there(path: Path) -> bool:
    """Whether there is anything at a path, also a link that leads nowhere."""
    return path.exists() if isinstance(path, ObjectPath) else os.path.lexists(path)


def require(path: Path, expected: str) -> None:
    """Refuses what is missing or is not what is expected here: "a file" or "a folder".

    >>> require(Path("/dev/null"), "a file")
    Traceback (most recent call last):
    dualform.errors.CorruptError: '/dev/null' is a device and not a file; a run has only plain files
    and folders. Copy the run again, with `cp -rL` where it has links.
    """
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _missing(path) from error
    except LedgerError:
        raise
    except (OSError, ValueError) as error:  # the latter for names that no file can have
        raise LedgerError(f"cannot read '{path}': {error}.") from error
    found = next((name for is_kind, name in KINDS if is_kind(mode)), "a device")
    if found != expected:
        raise CorruptError(
            f"'{path}' is {found} and not {expected}; a run has only plain files and folders. "
            "Copy the run again, with `cp -rL` where it has links."
        )


def _missing(path: Path) -> CorruptError:
    return CorruptError(f"'{path}' is missing; restore it from a copy of the run.")


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says; whatever is wrong with it is a ValueError.

    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: it says 'a' twice
    """
    try:
        return json.loads(text, object_pairs_hook=_each_once)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it says '{next(n for n in names if names.count(n) > 1)}' twice")
    return found


def write_durably(path: Path, text: str) -> None:
    """Writes a small file so that it is either wholly there after a crash, or not at all."""
    if isinstance(path, ObjectPath):
        path.write_text(text)
        return
    draft = path.with_name(path.name + ".draft")
    draft.unlink(missing_ok=True)
    try:
        with draft.open("x", encoding="utf-8") as file:  # anew: never through a link
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def exchange(one: Path, other: Path) -> None:
    """Two folders beside each other take each other's name, at once where the system can.

    Linux can, on most file systems. Elsewhere it takes three renames; `finish_exchange` repairs
    what a process leaves that is killed between them.

    >>> import tempfile; folder = Path(tempfile.mkdtemp())
    >>> one, other = folder / "one", folder / "other"
    >>> one.mkdir(); other.mkdir(); (one / "file").touch()
    >>> exchange(one, other); [entry.name for entry in other.iterdir()]
    ['file']
    """
    if not _exchange_at_once(one, other):
        aside = _aside(other)
        one.rename(aside)
        other.rename(one)
        aside.rename(other)
    sync_folder(one.parent)


def finish_exchange(one: Path, other: Path) -> bool:
    """Undoes an exchange by renames that did not come to its second one, or does the third.

    Returns whether there was anything to do.
    """
    aside = _aside(other)
    if not aside.exists():
        return False
    aside.rename(other if one.exists() else one)
    sync_folder(one.parent)
    return True


def _aside(other: Path) -> Path:
    return other.with_name(other.name + ASIDE)


def _exchange_at_once(one: Path, other: Path) -> bool:
    """By Linux's `renameat2` with the flag RENAME_EXCHANGE; False where that cannot be."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    here, at_once = -100, 2
    return bool(renameat2(here, os.fsencode(one), here, os.fsencode(other), at_once) == 0)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable (POSIX; elsewhere the file system sees to it)."""
    if os.name != "posix" or isinstance(folder, ObjectPath):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_folder(folder: Path) -> None:
    """Removes a folder with all that is in it, as far as that can be."""
    if isinstance(folder, ObjectPath):
        folder.delete_all()
    else:
        shutil.rmtree(folder, ignore_errors=True)
