"""Reading a run folder: what the logs vouch for, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dualform.errors import CorruptError, LedgerError, UnknownStepError
from dualform.ledger.files import require
from dualform.ledger.format import INITIAL_FILE, RUN_FILE, Declaration, RunInfo, read_info
from dualform.ledger.log import LOG_FILE, Damage, Head, Log, Logs, Record
from dualform.ledger.tensors import TensorFile


@dataclass(frozen=True)
class Commit:
    """A committed file: its log record, and the file opened."""

    path: Path
    record: Record

    @property
    def step(self) -> int:
        """The last step the file speaks of."""
        return int(self.record["last" if self.record["kind"] == "rows" else "step"])

    @cached_property
    def file(self) -> TensorFile:
        """The arrays, after a look at the length and the header."""
        require(self.path, "a file")
        size = self.path.stat().st_size
        if size != self.record["bytes"]:
            raise CorruptError(
                f"'{self.path}' has {size:,} bytes, its log says {self.record['bytes']:,}; "
                "restore the file from a copy of the run."
            )
        return TensorFile(self.path, self.record.get("index_crc32"))


@dataclass
class _Writer:
    """What one writer committed."""

    start: Record
    commits: list[Commit] = field(default_factory=list)

    @property
    def step(self) -> int:
        """The step after which it began."""
        return int(self.start["step"])

    def truncate(self, step: int) -> None:
        """Drops what lies beyond the step a later writer resumed from."""
        self.commits = [commit for commit in self.commits if commit.step <= step]


class Ledger:
    """A run folder, opened for reading: shards of rows, weights at some steps, small columns.

    It holds what was committed when it was opened; open it again to see more of a live run. A run
    whose logs are damaged is refused, unless `damaged` asks for what is left of it.

    >>> from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run()
    >>> ledger = Ledger(run.path)
    >>> ledger.last_step, ledger.kept_steps, ledger.column("0/keys").shape
    (6, [0, 6], torch.Size([24, 4]))
    """

    def __init__(self, path: Path, *, damaged: bool = False) -> None:
        self.path = path
        info = read_info(path)
        logs = Logs.read(path)
        self.unfinished = logs.unfinished
        """Whether the last writer noted no end: it was killed, or is at work."""
        self.head: Head | None = logs.last.head if logs.last else None
        """How far the last log goes."""
        self._writers = _valid_writers(path, logs)
        commits = [commit for writer in self._writers for commit in writer.commits]
        shards = [commit for commit in commits if commit.record["kind"] == "rows"]
        self.shards = list(itertools.takewhile(_follows(), shards))
        self.info: RunInfo = info.declared(self._declarations())
        kept = [commit for commit in commits if commit.record["kind"] == "weights"]
        self._weights = {commit.step: commit for commit in kept if commit.step <= self.last_step}
        self.damage: list[Damage] = [
            *logs.damage,
            *self._altered_info(info),
            *self._missing_steps(shards[len(self.shards) :]),
        ]
        """What is wrong with the logs and with what they vouch for, as far as that is known."""
        if self.damage and not damaged:
            raise self._refusal()

    @property
    def last_step(self) -> int:
        """The last step that is committed."""
        return max((shard.step for shard in self.shards), default=0)

    @property
    def starts(self) -> list[dict[str, Any]]:
        """What each writer noted when it began."""
        return [writer.start for writer in self._writers]

    @property
    def notes(self) -> list[dict[str, Any]]:
        """Remarks made while recording, in order."""
        return [note for shard in self.shards for note in shard.record["notes"]]

    @property
    def nbytes(self) -> int:
        """Bytes of everything committed."""
        committed = [*self.shards, *self._weights.values()]
        return sum(int(commit.record["bytes"]) for commit in [self._initial, *committed])

    def array_bytes(self, name: str) -> int:
        """Bytes one array takes over all shards."""
        files = [shard.file for shard in self.shards]
        return sum(file.entries[name].nbytes for file in files if name in file)

    def column(self, name: str) -> Tensor:
        """A small array over the whole run, in memory."""
        parts = [shard.file.read(name) for shard in self.shards if name in shard.file]
        return torch.cat(parts) if parts else torch.empty(0)

    @property
    def factors(self) -> Tensor:
        """(steps, books): what the rows' gradient was multiplied with on its way."""
        books = [book.name for book in self.info.books]
        parts = [shard.file.read("factors") for shard in self.shards]
        if not parts:
            return torch.zeros(0, len(books), dtype=torch.float64)
        found = torch.cat(parts)
        if not self.info.accounts:
            return found
        account = {name: at for at, names in enumerate(self.info.accounts) for name in names}
        by_book = [found[:, account[b]] if b in account else torch.zeros(len(found)) for b in books]
        return torch.stack(by_book, 1)

    @property
    def kept_steps(self) -> list[int]:
        """The steps whose weights were kept; 0 is the start."""
        return [0, *sorted(self._weights)]

    @property
    def marks(self) -> dict[int, str]:
        """Why the weights of a step were kept: "checkpoint", "final", … (see FORMAT.md)."""
        return {step: self._weights[step].record["mark"] for step in sorted(self._weights)}

    def weights(self, step: int) -> dict[str, Tensor]:
        """Every parameter as it was after `step`, exactly as kept."""
        file = self.kept(step)
        return {name: file.read(name) for name in file.entries}

    def kept(self, step: int) -> TensorFile:
        """The file of what was kept of `step`: parameters, and the optimizer's memory of them."""
        if step == 0:
            return self._initial.file
        if step not in self._weights:
            raise UnknownStepError(
                f"the weights of step {step} were not kept; those of {self.kept_steps} were."
            )
        return self._weights[step].file

    @cached_property
    def _initial(self) -> Commit:
        return Commit(self.path / INITIAL_FILE, self._writers[0].start["initial"])

    def _declarations(self) -> Iterator[Declaration]:
        for shard in self.shards:
            try:
                yield from map(Declaration.from_json, shard.record.get("streams", ()))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise CorruptError(f"the log of '{shard.path}' is senseless: {error!r}.") from error

    def _altered_info(self, info: RunInfo) -> Iterator[Damage]:
        vouched = self._writers[0].start.get("run_crc32", info.checksum)
        if vouched != info.checksum:
            file = self.path / RUN_FILE
            yield file, f"'{file}' is altered: it is not what the first log vouches for."

    def _missing_steps(self, unreachable: list[Commit]) -> Iterator[Damage]:
        for commit in unreachable[:1]:
            lost = f"steps {self.last_step + 1} to {commit.record['first'] - 1} are missing"
            yield commit.path, f"{lost}: what follows them in '{commit.path}' is not used."

    def _refusal(self) -> CorruptError:
        others = f" (and {len(self.damage) - 1} more)" if len(self.damage) > 1 else ""
        return CorruptError(
            f"the run '{self.path}' is damaged: {self.damage[0][1].removesuffix('.')}{others}. "
            f"Restore it from a copy; what is left of it, {self.last_step:,} steps, is read by "
            "dualform.open(path, damaged=True)."
        )

    def check(self) -> Iterator[Damage]:
        """Reads every committed byte and yields (file, problem) for each one that is wrong."""
        yield from self.damage
        for commit in [self._initial, *self.shards, *self._weights.values()]:
            try:
                checksum = commit.file.checksum()
            except LedgerError as error:
                yield commit.path, str(error)
                continue
            if checksum != commit.record["crc32"]:
                yield commit.path, f"'{commit.path}' is altered: its checksum does not match."


def _follows() -> Callable[[Commit], bool]:
    """Whether each shard begins where the one before it ended."""
    last = 0

    def follows(shard: Commit) -> bool:
        nonlocal last
        expected, last = last + 1, shard.step
        return bool(shard.record["first"] == expected)

    return follows


def _valid_writers(path: Path, logs: Logs) -> list[_Writer]:
    """Who wrote what counts: each start voids what earlier writers say of later steps."""
    writers: list[_Writer] = []
    for log in logs.logs:
        if log.start is None:
            continue
        writer = _writer(log, log.start)
        writers = [earlier for earlier in writers if earlier.step <= writer.step]
        for earlier in writers:
            earlier.truncate(writer.step)
        writers.append(writer)
    if not writers or "initial" not in writers[0].start:
        lost = "".join(f" {problem}" for _, problem in logs.damage[:1])
        raise CorruptError(
            f"'{path}' has no log that says how it began; restore it from a copy.{lost}"
        )
    return writers


def _writer(log: Log, start: Record) -> _Writer:
    try:
        _check_numbers(start, ("step",))
        if "initial" in start:
            _check_numbers(start["initial"], ("bytes", "crc32"))
        if not isinstance(start.get("buffers", []), list):
            raise ValueError("'buffers' is not a list")
        return _Writer(start, [_commit(log.folder, record) for record in log.commits])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"'{log.path}' has a senseless record: {error!r}.") from error


def _commit(folder: Path, record: Record) -> Commit:
    """A record that names a file, after a look at the fields that everything relies on."""
    kinds: dict[str, tuple[str, ...]] = {"rows": ("first", "last"), "weights": ("step",)}
    _check_numbers(record, ("bytes", "crc32", *kinds[record["kind"]]))
    if record["kind"] == "rows":
        for note in record["notes"]:
            _check_numbers(note, ("step",))
            note["book"], note["reason"]
    else:
        record["mark"]
    name = record["file"]
    if name != Path(name).name or name in ("", ".", ".."):
        raise CorruptError(f"'{folder / LOG_FILE}' names a file outside the run: {name!r}.")
    return Commit(folder / name, record)


def _check_numbers(record: Record, names: Sequence[str]) -> None:
    for name in names:
        if type(record[name]) is not int or record[name] < 0:
            raise ValueError(f"'{name}' is {record[name]!r}, not a number from 0")
