"""The two folders of a compaction: the run, and beside it the run as it was before.

The new run is written beside the old one, into the folder `RUN.before-compact`, and marked. Then
the two folders exchange their names. So one glance says where a compaction stands, whenever its
process was killed:

- The mark is in `RUN`: it is the compacted run. `RUN.before-compact` is the old one, until it is
  confirmed. If that has no `run.json`, it was confirmed, and is being deleted.
- The mark is in `RUN.before-compact`: that is a copy which never took the run's place, or did so no
  longer. It may be deleted.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualform.errors import CorruptError, LedgerError, NotARunError, RunLockedError
from dualform.ledger import Ledger, run_path
from dualform.ledger.files import (
    exchange,
    finish_exchange,
    open_plain,
    parse_json,
    sync_folder,
    write_durably,
)
from dualform.ledger.format import BEFORE_COMPACT, COMPACTED_FILE, RUN_FILE, describe
from dualform.ledger.locks import lock_run


@dataclass(frozen=True)
class Folders:
    """The folder of a run, and the one beside it.

    >>> Folders.of("runs/digits").before.name
    'digits.before-compact'
    """

    run: Path
    before: Path

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Folders:
        """Those of a path; where that is a link, or has no name, beside what it leads to."""
        run = Path(os.fspath(run_path(path)))  # refused of one in object storage
        if os.path.islink(run) or run.name in ("", ".."):
            run = Path(os.path.realpath(run))
        return cls(run, run.with_name(run.name + BEFORE_COMPACT))

    @property
    def is_compacted(self) -> bool:
        """Whether the run is a compacted one that was not confirmed."""
        return (self.run / COMPACTED_FILE).exists()

    @property
    def can_undo(self) -> bool:
        """Whether the old run is still there."""
        return self.is_compacted and (self.before / RUN_FILE).exists()

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """While nobody records into the run; what a killed process left is put right first.

        Gives whether there was anything to put right.
        """
        repaired = finish_exchange(self.run, self.before)
        if not (self.run / RUN_FILE).exists():
            raise NotARunError(f"'{self.run}' is not a dualform run: {describe(self.run)}.")
        try:
            lock = lock_run(self.run)
        except RunLockedError as error:
            raise RunLockedError(
                f"another process is recording into '{self.run}', or compacts it; "
                "a run can be compacted when its recording has ended."
            ) from error
        try:
            yield repaired
        finally:
            lock.release()

    def mark(self) -> dict[str, Any]:
        """What the compaction noted in the run."""
        with open_plain(self.run / COMPACTED_FILE) as file:
            try:
                return dict(parse_json(file.readall()))
            except (ValueError, TypeError) as error:
                raise CorruptError(f"'{self.run / COMPACTED_FILE}' is damaged: {error}.") from error

    def begin(self, mark: dict[str, Any]) -> Path:
        """An empty folder for the copy, with its mark; what a killed compaction left is deleted."""
        self._delete_copy()
        self.before.mkdir()
        write_durably(self.before / COMPACTED_FILE, json.dumps(mark, indent=1))
        return self.before

    def exchange(self) -> None:
        """The copy takes the run's place, and the run the copy's."""
        exchange(self.run, self.before)

    def give_up(self) -> None:
        """Deletes the copy; the run is as it was."""
        self._delete_copy()

    def undo(self) -> None:
        """The old run takes its place again; the compacted one is deleted."""
        if not self.can_undo:
            self._delete_copy()
            raise LedgerError(
                f"there is nothing to undo: '{self.run}' was not compacted, or that was confirmed."
            )
        if Ledger(self.run).session.number != self.mark()["session"]:
            raise LedgerError(
                f"recording went on in '{self.run}' after it was compacted; the old run in "
                f"'{self.before}' lacks these steps. Confirm the compaction (--confirm), or move "
                "the old run to another path to read it."
            )
        self.exchange()
        self._delete_copy()

    def confirm(self) -> int:
        """Deletes the old run; returns the bytes of what its logs named."""
        if not self.is_compacted:
            self._delete_copy()
            raise LedgerError(
                f"there is nothing to confirm: '{self.run}' was not compacted, or that was "
                "confirmed."
            )
        freed = int(self.mark()["bytes_before"])
        (self.before / RUN_FILE).unlink(missing_ok=True)  # first: what is left is no run
        if self.before.exists():
            shutil.rmtree(self.before)
        (self.run / COMPACTED_FILE).unlink()
        sync_folder(self.run)
        return freed

    def _delete_copy(self) -> None:
        """Deletes a copy that is not in the run's place; anything else there is refused."""
        if not os.path.lexists(self.before) or self.is_compacted:
            return
        names = {entry.name for entry in self.before.iterdir()}
        if COMPACTED_FILE not in names and names - {COMPACTED_FILE + ".draft"}:
            raise LedgerError(
                f"'{self.before}' is in the way: no compaction made it; {describe(self.before)}. "
                "Move it to another path."
            )
        (self.before / RUN_FILE).unlink(missing_ok=True)
        entries = [entry for entry in self.before.iterdir() if entry.name != COMPACTED_FILE]
        for entry in entries:  # the mark goes last: until then it is known as a copy
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        shutil.rmtree(self.before)
