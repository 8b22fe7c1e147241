"""The commit logs of a run: lines that seal themselves, each naming the seal before it.

A process that is killed leaves at most half a line at the end of its log, and that half does not
count. Everything else that does not fit is damage: a line that was altered or is missing, or a log
that is shorter than its writer, or a later one, says.
"""

from __future__ import annotations

import errno
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any, TypeAlias

from dualform.errors import CorruptError
from dualform.ledger.files import (
    is_there,
    open_plain,
    parse_json,
    require,
    sync_folder,
    write_durably,
)
from dualform.ledger.format import FOLDER, LOG_FILE
from dualform.ledger.object_log import ObjectLog, read_lines
from dualform.ledger.object_path import ObjectPath

END = re.compile(r"end-(0|[1-9][0-9]*)\.json")
"""What a writer calls the note of how far it went: by its rank."""

Record: TypeAlias = dict[str, Any]
Damage: TypeAlias = tuple[Path, str]
"""A file that is not as it was written, and what is wrong with it, in words."""


def writer_folders(path: Path) -> list[Path]:
    """The folders of a run's writers, by session and rank; a copy by another name is none.

    >>> from dualform.testing import tiny_run
    >>> [folder.name[:17] for folder in writer_folders(tiny_run()[0].path)]
    ['writer-0001-rank0']
    """
    found = [entry for entry in path.glob("writer-*") if FOLDER.fullmatch(entry.name)]
    return sorted(found, key=lambda folder: (*session_and_rank(folder), folder.name))


def session_and_rank(folder: Path) -> tuple[int, int]:
    """The session a writer's folder is of, counted from 1, and the writer's rank, from 0."""
    match = FOLDER.fullmatch(folder.name)
    assert match is not None
    return int(match[1]), int(match[2])


def end_file(rank: int) -> str:
    """Where the writer of a rank notes how far it went."""
    return f"end-{rank}.json"


def seal_line(record: Record) -> str:
    """One line of a log: the record as JSON, ending in the CRC-32 of what precedes.

    >>> open_line(seal_line({"kind": "rows"}).encode())
    {'kind': 'rows', 'line_crc32': 2257187317}
    """
    body = json.dumps(record, separators=(",", ":"))[:-1]
    return f'{body},"line_crc32":{zlib.crc32(body.encode())}}}\n'


def open_line(line: bytes) -> Record | None:
    """The record of a log line with its seal, or None where the line is torn or altered."""
    body, mark, checksum = line.rpartition(b',"line_crc32":')
    if not mark or checksum != b"%d}\n" % zlib.crc32(body):
        return None
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


@dataclass(frozen=True)
class Head:
    """How far a log goes: its folder, how many lines it has, and the seal of the last."""

    folder: str
    lines: int = 0
    seal: int = 0


class LogWriter:
    """A new log that lines are appended to, each durable before the next.

    >>> import tempfile; folder = Path(tempfile.mkdtemp())
    >>> log = LogWriter(folder, {"rank": 0, "step": 0}, after=None)
    >>> log.append({"kind": "weights", "step": 0}); log.close()
    >>> [record["kind"] for record in read_log(folder).records]
    ['start', 'weights']
    """

    def __init__(self, folder: Path, start: Mapping[str, Any], after: Head | None) -> None:
        self.head = Head(folder.name)
        self._run, self._rank = folder.parent, int(start["rank"])
        self._file = ObjectLog(folder) if isinstance(folder, ObjectPath) else _LogFile(folder)
        before = None if after is None else asdict(after)
        try:
            self._append({"kind": "start", **start, "after": before})
            sync_folder(folder)
        except BaseException:
            self.close()
            raise

    def append(self, record: Record) -> None:
        """Adds a line behind the others; where that fails, the log is as before."""
        self._append({**record, "after": self.head.seal})

    def end(self) -> None:
        """Notes in the run how far this log went, now that nothing will follow."""
        if self._file.end():
            write_durably(self._run / end_file(self._rank), seal_line(asdict(self.head)))

    def close(self) -> None:
        """Gives the file back."""
        self._file.close()

    def _append(self, record: Record) -> None:
        line = seal_line(record)
        self._file.append(line.encode())
        seal = json.loads(line)["line_crc32"]
        self.head = replace(self.head, lines=self.head.lines + 1, seal=seal)


class _LogFile:
    """A log on a disk: one file, to which lines are appended."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def append(self, line: bytes) -> None:
        """Adds a line; where that fails, the log is as before."""
        size = os.fstat(self._file).st_size
        try:
            if os.write(self._file, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, size)
            os.lseek(self._file, size, os.SEEK_SET)
            raise

    def end(self) -> bool:
        """Whether what it says is all that was written: always."""
        return True

    def close(self) -> None:
        """Gives the file back."""
        os.close(self._file)


@dataclass
class Log:
    """What one writer's log says: the records of its whole lines, and what is wrong with them."""

    folder: Path
    records: list[Record] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """The log's file."""
        return self.folder / LOG_FILE

    @property
    def start(self) -> Record | None:
        """Its first record, unless that is lost; without it the others mean nothing."""
        first = self.records[0] if self.records else {}
        return first if first.get("kind") == "start" else None

    @property
    def commits(self) -> list[Record]:
        """The records behind the start."""
        return [record for record in self.records[1:] if record.get("kind") != "start"]

    @property
    def head(self) -> Head:
        """How far it goes."""
        seal = self.records[-1]["line_crc32"] if self.records else 0
        return Head(self.folder.name, len(self.records), seal)

    def is_wrong(self, problem: str) -> None:
        """Remembers that something is."""
        self.damage.append((self.path, f"'{self.path}' {problem}."))


def read_log(folder: Path) -> Log:
    """Every whole line of a log; lines that are altered, missing or misplaced are damage."""
    require(folder, "a folder")
    log = Log(folder)
    before: Record | None = None
    for number, line in enumerate(_whole_lines(log), 1):
        record = open_line(line)
        if record is None:
            log.is_wrong(f"is altered: the seal of line {number} does not fit")
        elif (record.get("kind") == "start") != (number == 1):
            log.is_wrong(
                f"has lost or misplaced lines: line {number} is of the kind '{record.get('kind')}'"
            )
        elif before is not None and not _follows(record, before):
            log.is_wrong(f"has lost a line: line {number} does not follow the one before it")
        if record is not None:
            log.records.append(record)
        before = record
    return log


def _whole_lines(log: Log) -> Iterator[bytes]:
    """The lines that were written to their end; what a killed process left of one is left out."""
    if is_there(log.path):
        with BufferedReader(open_plain(log.path)) as file:
            yield from (line for line in file if line.endswith(b"\n"))
    elif parts := read_lines(log.folder):
        lines = (line for part in parts for line in BytesIO(part))
        yield from (line for line in lines if line.endswith(b"\n"))
    elif any(log.folder.glob("*.safetensors")):
        log.is_wrong("is missing, and files that it vouched for are there")


def _follows(record: Record, before: Record) -> bool:
    """Whether a record names the seal of the one before it."""
    return bool(record.get("after") == before["line_crc32"])


@dataclass(frozen=True)
class Logs:
    """All logs of a run, by session and rank, and what is wrong with them.

    >>> from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run()
    >>> logs = Logs.read(run.path)
    >>> len(logs.logs), logs.ends[0] == logs.head(0), logs.damage
    (1, True, [])
    """

    logs: list[Log]
    damage: list[Damage]
    ends: dict[int, Head]
    """How far the last writer of each rank says it went, if one could say so."""

    def head(self, rank: int) -> Head | None:
        """How far the last log of a rank goes that says how it starts."""
        own = [log for log in self.logs if session_and_rank(log.folder)[1] == rank and log.start]
        return own[-1].head if own else None

    @classmethod
    def read(cls, path: Path) -> Logs:
        """Reads every log, and compares it with what its end and later starts say of it."""
        damage: list[Damage] = []
        ends = _read_ends(path, damage)  # first: a writer may end while its log is read
        logs = [read_log(folder) for folder in writer_folders(path)]
        witnesses = [(path / end_file(rank), head) for rank, head in ends.items()]
        earlier = [(log.path, _earlier(log)) for log in logs]
        witnesses += [(witness, head) for witness, head in earlier if head is not None]
        for log in logs:
            damage += log.damage
        for witness, head in witnesses:
            damage += _compared(path, logs, witness, head)
        return cls(logs, damage, ends)


def _read_ends(path: Path, damage: list[Damage]) -> dict[int, Head]:
    found: dict[int, Head] = {}
    for file in sorted(path.glob("end-*.json")):
        match = END.fullmatch(file.name)
        if match is None:
            continue
        with open_plain(file) as opened:
            record = open_line(opened.readall())
        if record is None:
            damage.append((file, f"'{file}' is altered: its seal does not fit."))
        else:
            found[int(match[1])] = _head(record, file)
    return found


def _earlier(log: Log) -> Head | None:
    """What a writer found of the one before it, when it began."""
    found = (log.start or {}).get("after")
    return None if found is None else _head(found, log.path)


def _head(record: Any, witness: Path) -> Head:
    try:
        return Head(str(record["folder"]), int(record["lines"]), int(record["seal"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"'{witness}' has a senseless record: {error!r}.") from error


def _compared(path: Path, logs: list[Log], witness: Path, head: Head) -> Iterator[Damage]:
    """What a log lacks of what was once seen of it."""
    log = next((log for log in logs if log.folder.name == head.folder), None)
    file = path / head.folder / LOG_FILE
    if log is None:
        yield file, f"'{file}' is missing, and '{witness}' names it."
    elif not log.damage and log.head != head:
        counted = f"{log.head.lines} lines where '{witness}' counted {head.lines}"
        other = f"not the lines that '{witness}' names"
        has = counted if log.head.lines != head.lines else other
        yield file, f"'{file}' has {has}."
