"""Paths of runs in object storage: what the ledger does with a folder, done with a bucket.

Everything above says `Path`. Whatever is not done here is refused with an error, and does not
happen on a disk instead.
"""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Generator, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, urlsplit

from dualform.errors import LedgerError
from dualform.ledger.object_copies import RemoteObject
from dualform.ledger.object_store import SETTINGS, WHOLE, ObjectStore, Version, connect


def run_path(given: str | os.PathLike[str]) -> Path:
    """The path of a run: a folder of this machine, or one in object storage.

    >>> run_path("runs/digits"), run_path("file:///data/run"), run_path("s3://bucket/run")
    (PosixPath('runs/digits'), PosixPath('/data/run'), ObjectPath('s3://bucket/run'))
    >>> run_path("ftp://host/run")
    Traceback (most recent call last):
    dualform.errors.LedgerError: 'ftp://host/run' begins with 'ftp://'; a run is in a folder, or at
    file://, gs://, s3://.
    """
    if isinstance(given, ObjectPath):
        return given
    if isinstance(given, Path) and given.parts[:1] in [(f"{one}:",) for one in SETTINGS]:
        return ObjectPath(given)  # what pathlib makes of a URL
    if not isinstance(given, str | os.PathLike):
        raise LedgerError(
            f"path={given!r} is no path; give the run's folder as a str or a pathlib.Path."
        )
    text = os.fspath(given)
    scheme, mark, rest = text.partition("://")
    if not mark or not scheme.isalnum():
        return Path(text)
    if scheme == "file":
        return Path(unquote(urlsplit(text).path))
    if scheme not in SETTINGS:
        known = ", ".join(f"{one}://" for one in sorted(["file", *SETTINGS]))
        raise LedgerError(
            f"'{text}' begins with '{scheme}://'; a run is in a folder, or at {known}."
        )
    name, _, folder = rest.partition("/")
    if not name or not folder.strip("/"):
        example = f"{scheme}://{name or 'bucket'}/run"
        raise LedgerError(f"'{text}' names no folder in a bucket, such as '{example}'.")
    return ObjectPath(text)


if TYPE_CHECKING:
    LocalPath = Path
else:
    LocalPath = type(Path())  # there is one for each system


class ObjectPath(LocalPath):
    """The place of an object, or of a folder of them: `s3://bucket/folder/name`."""

    def __str__(self) -> str:
        scheme, *rest = self.parts
        return f"{scheme}//{'/'.join(rest)}"

    def __repr__(self) -> str:
        return f"ObjectPath({str(self)!r})"

    def __fspath__(self) -> str:
        raise LedgerError(
            f"'{self}' is in object storage, and this is done on a disk only: copy the run's "
            "folder to one, such as by `aws s3 cp --recursive`, and give the copy."
        )

    @property
    def _store(self) -> ObjectStore:
        return connect(self.parts[0].removesuffix(":"), self.parts[1])

    @property
    def key(self) -> str:
        """What the bucket calls it."""
        return "/".join(self.parts[2:])

    def absolute(self) -> ObjectPath:
        """Itself: a URL means the same everywhere."""
        return self

    def resolve(self, strict: bool = False) -> ObjectPath:
        """Itself: there are no links."""
        return self

    def found(self) -> RemoteObject:
        """The object as it is now, to be read in ranges."""
        return RemoteObject.find(self._store, self.key)

    def open(self, mode: str = "r", *_: Any, **options: Any) -> Any:
        """The object as a file that is read, as it is now."""
        if set(mode) - set("rbt"):
            raise LedgerError(
                f"'{self}' cannot be opened to write ('{mode}'): objects are put whole."
            )
        file = self.found().open()
        return file if "b" in mode else TextIOWrapper(cast(Any, file), encoding="utf-8")

    def write_bytes(self, data: Any) -> int:
        """Puts the object, in place of one that may be there."""
        return self.put([data])

    def write_text(self, data: str, *_: Any, **options: Any) -> int:
        """Puts a text, in place of an object that may be there."""
        return self.put([data.encode()])

    def put(self, chunks: Sequence[bytes | memoryview]) -> int:
        """Puts the object, in place of one that may be there."""
        self._store.put(self.key, chunks)
        return sum(map(len, chunks))

    def put_new(self, chunks: Sequence[bytes | memoryview]) -> int:
        """Puts the object; where it is not too large for that, only if there is none."""
        length = sum(map(len, chunks))
        if length > WHOLE:
            return self.put(chunks)
        self.create(b"".join(chunks))
        return length

    def create(self, data: bytes) -> Version:
        """Puts the object where there is none."""
        return self._store.create(self.key, data)

    def replace_version(self, data: bytes, version: Version) -> Version:
        """Puts the object in place of a version of it, and of no other."""
        return self._store.replace(self.key, data, version)

    def read_version(self) -> tuple[bytes, Version]:
        """The bytes of a small object, and which version it is."""
        data, found = self._store.begin(self.key)
        return data, found.version

    def read_bytes(self) -> bytes:
        """The bytes of a small object."""
        return self.read_version()[0]

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: folders are there when something is in them."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Deletes the object."""
        self._store.delete([self.key])

    def delete_all(self) -> None:
        """Deletes everything below it."""
        self._store.delete(self._store.under(self.key))

    def iterdir(self) -> Generator[ObjectPath, None, None]:
        """What is in the folder, by name."""
        files, folders = self._store.entries(self.key)
        yield from (self / name for name in (*files, *folders))

    def glob(self, pattern: str, **_: Any) -> Generator[ObjectPath, None, None]:
        """What is in the folder by some names, or in folders below it."""
        name, *below = pattern.split("/", 1)
        for one in self.iterdir():
            if fnmatch.fnmatchcase(one.name, name):
                yield from one.glob(below[0]) if below else [one]

    def lstat(self) -> os.stat_result:
        """What is there: an object, or else a folder."""
        try:
            size, kind = self._store.find(self.key).size, stat.S_IFREG
        except FileNotFoundError:
            if not any(self._store.entries(self.key)):
                raise
            size, kind = 0, stat.S_IFDIR
        return os.stat_result((kind | 0o444, 0, 0, 1, 0, 0, size, 0, 0, 0))

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """What is there: an object, or else a folder."""
        return self.lstat()

    def exists(self, **_: Any) -> bool:
        """Whether there is an object or a folder."""
        return self.is_file() or self.is_dir()

    def is_file(self, **_: Any) -> bool:
        """Whether there is an object."""
        try:
            self._store.find(self.key)
        except FileNotFoundError:
            return False
        return True

    def is_dir(self, **_: Any) -> bool:
        """Whether there is anything below it."""
        return any(self._store.entries(self.key))

    def is_symlink(self) -> bool:
        """Never: there are no links."""
        return False
