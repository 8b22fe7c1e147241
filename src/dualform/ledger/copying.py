"""A copy of a run folder in which some shards are written anew.

The copy has the same sessions, ranks, steps, notes and marks; its logs are sealed anew. Files that
stay as they are become links to the same bytes, where the file system has links: committed files
never change.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from dualform.ledger.files import require, sync_folder
from dualform.ledger.format import (
    COMPACTED_FILE,
    FOLDER,
    INITIAL_FILE,
    RUN_FILE,
    SAMPLES_FOLDER,
    Declaration,
)
from dualform.ledger.locks import LOCK
from dualform.ledger.log import END, Head, Log, LogWriter, Record
from dualform.ledger.reader import Ledger
from dualform.ledger.sessions import Commit, Shard
from dualform.ledger.shared_keys import SharedKeys
from dualform.ledger.writer import write_vouched

SEALS = ("after", "line_crc32")


class NewShard(NamedTuple):
    """What is written in place of a shard: its arrays, and the streams that its line declares."""

    arrays: Mapping[str, Sequence[Tensor]]
    streams: Sequence[Declaration]


def copy_run(
    ledger: Ledger,
    to: Path,
    rewrite: Callable[[Shard], NewShard] | None = None,
    *,
    until: int | None = None,
    without: Collection[Path] = (),
) -> None:
    """Writes a copy of a run into a folder that is there; `run.json` comes last.

    `rewrite` is asked for each shard, log by log; without it, all stay as they are. In what it
    gives, every stream has its keys. Those that are there already are left out again.

    A copy `until` a step has what was recorded up to it, `without` some files that may be missing.
    It notes no end: recording did not end there.

    >>> import tempfile; from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run()
    >>> copy = Path(tempfile.mkdtemp())
    >>> copy_run(Ledger(run.path), copy)
    >>> Ledger(copy).last_step, list(Ledger(copy).check())
    (6, [])
    """
    _copy_what_no_log_names(ledger.path, to)
    _link(ledger.path / INITIAL_FILE, to / INITIAL_FILE)
    last: dict[int, LogWriter] = {}
    for log, commits in ledger.writers():
        assert log.start is not None
        if until is not None:
            if int(log.start["step"]) > until:
                continue
            commits = [c for c in commits if _begins(c) <= until and c.path not in without]
        rank = int(log.start["rank"])
        before = last[rank].head if rank in last else None
        last[rank] = _copy_log(log, commits, to / log.folder.name, before, rewrite)
    for rank, writer in last.items():
        if until is None and ledger.has_ended(rank):
            writer.end()
    _copy(ledger.path / RUN_FILE, to / RUN_FILE)
    sync_folder(to)


def _begins(commit: Commit) -> int:
    """The first step that a file speaks of."""
    return commit.first if isinstance(commit, Shard) else commit.step


def _copy_log(
    log: Log,
    commits: Sequence[Commit],
    folder: Path,
    before: Head | None,
    rewrite: Callable[[Shard], NewShard] | None,
) -> LogWriter:
    folder.mkdir()
    assert log.start is not None
    keys, shards = SharedKeys(), [commit for commit in commits if isinstance(commit, Shard)]
    repeating = {name for shard in shards for name in shard.repeating}
    writer = LogWriter(folder, _unsealed(log.start), before)
    for commit in commits:
        record, file = _unsealed(commit.record), folder / commit.path.name
        if rewrite is None or not isinstance(commit, Shard):
            _link(commit.path, file)
        else:
            new = rewrite(commit)
            arrays = {name: list(parts) for name, parts in new.arrays.items()}
            record.pop("same_keys", None)
            if same_keys := keys.leave_out(arrays, new.streams, repeating):
                record["same_keys"] = same_keys
            streams = [declared.to_json() for declared in new.streams]
            record |= {**write_vouched(file, arrays), "streams": streams}
        sync_folder(folder)
        writer.append(record)
    writer.close()
    return writer


def _unsealed(record: Record) -> Record:
    return {name: value for name, value in record.items() if name not in SEALS}


def _copy_what_no_log_names(run: Path, to: Path) -> None:
    """Samples, and whatever else a user may have put into the folder."""
    ours = {RUN_FILE, INITIAL_FILE, COMPACTED_FILE, SAMPLES_FOLDER}
    for entry in run.iterdir():
        if entry.name not in ours and not any(p.fullmatch(entry.name) for p in (LOCK, END, FOLDER)):
            if entry.is_dir() and not entry.is_symlink():
                shutil.copytree(entry, to / entry.name, symlinks=True)
            else:
                _copy(entry, to / entry.name)
    (to / SAMPLES_FOLDER).mkdir()
    if (run / SAMPLES_FOLDER).is_dir():
        for page in sorted((run / SAMPLES_FOLDER).iterdir()):
            _link(page, to / SAMPLES_FOLDER / page.name)
        sync_folder(to / SAMPLES_FOLDER)


def _link(file: Path, to: Path) -> None:
    """The same bytes by another name; a copy, where the file system has no links."""
    require(file, "a file")
    try:
        os.link(file, to)
    except OSError:
        _copy(file, to)


def _copy(file: Path, to: Path) -> None:
    shutil.copy2(file, to, follow_symlinks=False)
    if not to.is_symlink():
        with to.open("rb") as copied:
            os.fsync(copied.fileno())
