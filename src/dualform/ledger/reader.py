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

from dualform.errors import CorruptError, UnknownStepError
from dualform.ledger.format import (
    INITIAL_FILE,
    LOG_FILE,
    Declaration,
    RunInfo,
    open_line,
    read_info,
)
from dualform.ledger.tensors import TensorFile


@dataclass(frozen=True)
class Commit:
    """A committed file: its log record, and the file opened."""

    path: Path
    record: dict[str, Any]

    @property
    def step(self) -> int:
        """The last step the file speaks of."""
        return int(self.record["last" if self.record["kind"] == "rows" else "step"])

    @cached_property
    def file(self) -> TensorFile:
        """The arrays, after a glance at the length."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size != self.record["bytes"]:
            raise CorruptError(
                f"'{self.path}' has {size:,} bytes, its log says {self.record['bytes']:,}; "
                "restore the file from a copy of the run."
            )
        return TensorFile(self.path)


@dataclass
class _Writer:
    """One writer's log, up to its first bad line."""

    folder: Path
    start: dict[str, Any]
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

    It holds what was committed when it was opened; open it again to see more of a live run.

    >>> from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run()
    >>> ledger = Ledger(run.path)
    >>> ledger.last_step, ledger.kept_steps, ledger.column("0/keys").shape
    (6, [0, 6], torch.Size([24, 4]))
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        info = read_info(path)
        self._writers = _valid_writers(path)
        commits = [commit for writer in self._writers for commit in writer.commits]
        shards = [commit for commit in commits if commit.record["kind"] == "rows"]
        self.shards = list(itertools.takewhile(_follows(), shards))
        self._unreachable = shards[len(self.shards) :]
        self.info: RunInfo = info.declared(self._declarations())
        kept = [commit for commit in commits if commit.record["kind"] == "weights"]
        self._weights = {commit.step: commit for commit in kept if commit.step <= self.last_step}

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
        initial = (self.path / INITIAL_FILE).stat().st_size
        return initial + sum(int(commit.record["bytes"]) for commit in committed)

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
        """Why the weights of a step were kept: "flush", "checkpoint" or "final"."""
        return {step: self._weights[step].record["mark"] for step in sorted(self._weights)}

    def weights(self, step: int, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Every parameter as it was after `step`, exactly as kept; or some, as far as they were."""
        if step == 0:
            file = TensorFile(self.path / INITIAL_FILE)
        elif step in self._weights:
            file = self._weights[step].file
        else:
            raise UnknownStepError(
                f"the weights of step {step} were not kept; those of {self.kept_steps} were."
            )
        wanted = file.entries if names is None else [name for name in names if name in file]
        return {name: file.read(name) for name in wanted}

    def _declarations(self) -> Iterator[Declaration]:
        for shard in self.shards:
            try:
                yield from map(Declaration.from_json, shard.record.get("streams", ()))
            except (KeyError, TypeError, AttributeError) as error:
                raise CorruptError(f"the log of '{shard.path}' is senseless: {error!r}.") from error

    def check(self) -> Iterator[tuple[Path, str]]:
        """Reads every committed byte and yields (file, problem) for each one that is wrong."""
        initial = Commit(self.path / INITIAL_FILE, self._writers[0].start["initial"])
        for commit in [initial, *self.shards, *self._weights.values()]:
            try:
                checksum = commit.file.checksum()
            except CorruptError as error:
                yield commit.path, str(error)
                continue
            if checksum != commit.record["crc32"]:
                yield commit.path, f"'{commit.path}' is altered: its checksum does not match."
        for commit in self._unreachable[:1]:
            lost = f"steps {self.last_step + 1} to {commit.record['first'] - 1} are missing"
            yield commit.path, f"{lost}: what follows them in '{commit.path}' is not used."


def _follows() -> Callable[[Commit], bool]:
    """Whether each shard begins where the one before it ended."""
    last = 0

    def follows(shard: Commit) -> bool:
        nonlocal last
        expected, last = last + 1, shard.step
        return bool(shard.record["first"] == expected)

    return follows


def _valid_writers(path: Path) -> list[_Writer]:
    writers: list[_Writer] = []
    for folder in sorted(path.glob("writer-[0-9]*-*")):
        writer = _read_log(folder)
        if writer is None:
            continue
        writers = [earlier for earlier in writers if earlier.step <= writer.step]
        for earlier in writers:
            earlier.truncate(writer.step)
        writers.append(writer)
    if not writers:
        raise CorruptError(f"'{path}' has no log that can be read; restore it from a copy.")
    return writers


def _read_log(folder: Path) -> _Writer | None:
    """The log's records up to its first bad line; None where not even the first is good."""
    path = folder / LOG_FILE
    if not path.is_file():
        return None
    writer = None
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        for line in file:
            record = open_line(line)
            if record is None:
                break
            try:
                writer = _take(writer, folder, record)
            except (KeyError, TypeError, ValueError) as error:
                raise CorruptError(f"'{path}' has a senseless record: {error!r}.") from error
    return writer


def _take(writer: _Writer | None, folder: Path, record: dict[str, Any]) -> _Writer:
    """Adds a record to its writer, after a look at the fields that everything relies on."""
    if writer is None:
        return _Writer(folder, {**record, "step": int(record["step"])})
    numbers = ("bytes", "crc32", *(("first", "last") if record["kind"] == "rows" else ("step",)))
    if not all(isinstance(record[name], int) for name in numbers):
        raise ValueError(f"one of {numbers} is not a number")
    writer.commits.append(Commit(_inside(folder, record["file"]), record))
    return writer


def _inside(folder: Path, name: str) -> Path:
    if name != Path(name).name or name in ("", ".", ".."):
        raise CorruptError(f"'{folder / LOG_FILE}' names a file outside the run: {name!r}.")
    return folder / name
