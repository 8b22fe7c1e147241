"""Reading a run folder: what the logs vouch for, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dualform.errors import CorruptError, LedgerError, UnknownStepError
from dualform.ledger.format import (
    BUFFER,
    INITIAL_FILE,
    RUN_FILE,
    STATE,
    Book,
    Declaration,
    RunInfo,
    read_info,
)
from dualform.ledger.ids import Ids
from dualform.ledger.log import Damage, Head, Log, Logs, session_and_rank
from dualform.ledger.object_copies import SIDE_BY_SIDE
from dualform.ledger.object_path import ObjectPath
from dualform.ledger.sessions import Commit, Session, Shard, read_sessions
from dualform.ledger.tensors import TensorFile

MANY_STEPS = 4096
"""Shards of more steps are opened with the run: their files must be so large."""


class Ledger:
    """A run folder, opened for reading: shards of rows, weights at some steps, small columns.

    Several ranks may have recorded it: then a step counts once all of them have committed it. A
    ledger holds what was committed when it was opened; open it again to see more of a live run. If
    the logs are damaged, the run is refused, unless `damaged` asks for what is left of it.

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
        sessions, misplaced = read_sessions(path, logs)
        self._logs = logs
        self._compared: set[int] = set()
        """The steps whose weights have the shapes that the description says."""
        self.session = sessions[-1]
        """The last time that recording went on."""
        self._sessions, gaps = _without_gaps(path, sessions)
        self.starts: list[dict[str, Any]] = [session.start for session in self._sessions]
        """What rank 0 noted each time when recording began."""
        self.last_step = self._sessions[-1].reached
        """The last step that every rank has committed."""
        commits = [c for s in self._sessions for own in s.commits.values() for c in own]
        kept = [c for c in commits if not isinstance(c, Shard) and c.step <= self.last_step]
        self._weights = {commit.step: commit for commit in kept}
        self.shards = _in_order(self._sessions, self.last_step)
        """What was committed of rows, by all ranks; the last ones may go beyond the last step."""
        self.ids = Ids(self.shards)
        self.info: RunInfo = self._declared(info)
        self.damage: list[Damage] = [
            *logs.damage,
            *misplaced,
            *self._altered_info(info),
            *gaps,
        ]
        """What is wrong with the logs and with what they vouch for, as far as that is known."""
        if self.damage and not damaged:
            raise self._refusal()
        if isinstance(path, ObjectPath):
            _open_together(self.shards)
        self._check_sizes(damaged)

    def _check_sizes(self, damaged: bool) -> None:
        """Whether books and steps are as many as files can hold, before memory is taken for them.

        Files that are missing are named by whoever reads them.
        """
        try:
            if self._initial.path.exists():
                self.kept(0)
        except CorruptError:
            if not damaged:
                raise
        for shard in self.shards:
            if shard.last - shard.first >= MANY_STEPS and shard.path.is_file():
                shard.file  # noqa: B018

    @property
    def unfinished(self) -> bool:
        """Whether a writer of the last session noted no end: it was killed, or is at work."""
        ranks = self.session.commits
        return not (self.session.complete and all(map(self.has_ended, ranks)))

    def has_ended(self, rank: int) -> bool:
        """Whether the last writer of a rank noted its end."""
        return self._logs.ends.get(rank) == self._logs.head(rank)

    def writers(self) -> Iterator[tuple[Log, list[Commit]]]:
        """The logs that count, in the order of time, each with the files of it that are read."""
        used = {shard.path for shard in self.shards}
        sessions = {session.number: session for session in self._sessions}
        for log in self._logs.logs:
            number, rank = session_and_rank(log.folder)
            if log.start is not None and number in sessions:
                commits = sessions[number].commits.get(rank, [])
                yield (
                    log,
                    [
                        commit
                        for commit in commits
                        if (
                            commit.path in used
                            if isinstance(commit, Shard)
                            else commit.step <= self.last_step
                        )
                    ],
                )

    def head(self, rank: int) -> Head | None:
        """How far the last log of a rank goes."""
        return self._logs.head(rank)

    def ends_at(self, step: int) -> bool:
        """Whether recording can go on after a step: the shards of every rank end there."""
        return any(session.ends_at(step) for session in self._sessions)

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
        return sum(file.arrays[name].nbytes for file in files if name in file)

    def column(self, name: str) -> Tensor:
        """A small array over all shards, in memory."""
        return _column(self.shards, name)

    @property
    def step_shards(self) -> list[Shard]:
        """The shards of rank 0: all ranks say the same of a step, and it is read here."""
        return [shard for shard in self.shards if shard.rank == 0]

    def by_step(self, name: str) -> Tensor:
        """(steps, books): a small array that has one line for each step, in memory."""
        found, books = _column(self.step_shards, name), len(self.info.books)
        if not len(found):
            return torch.zeros(0, books)
        if len(found) < self.last_step or found.shape[1:] != (books,):
            raise CorruptError(
                f"the run '{self.path}' has '{name}' of shape {tuple(found.shape)}, and "
                f"{self.last_step:,} steps of {books} books; restore it from a copy."
            )
        return found[: self.last_step]

    def samples(self, shard: Shard | None = None) -> Tensor:
        """(samples,): the samples of a shard's batches, or of all, by the run's numbers."""
        shards = self.shards if shard is None else [shard]
        found = [s for s in shards if "samples" in s.file]
        parts = [self.ids.numbers(s.rank, s.file.read("samples")) for s in found]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def changes(self, book: Book, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
        """Observed changes of a book, with their steps."""
        for shard in self.step_shards:
            yield from values_by_step(shard, book, "change", first, last)

    def residuals(self, book: Book, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
        """What the entries of a book leave of gradients, with their steps; ranks add up."""
        for shard in self.shards:
            yield from values_by_step(shard, book, "residual", first, last)

    def has_residual(self, book: Book) -> bool:
        """Whether the entries of a book leave anything."""
        return any(f"{book.name}/residuals" in shard.file for shard in self.shards)

    @cached_property
    def basis_shards(self) -> dict[str, Shard]:
        """Where the bases of each stream of summaries are: the first shard of the stream."""
        wanted = [stream.name for stream in self.info.streams if any(stream.bases)]
        found: dict[str, Shard] = {}
        for shard in self.shards:
            for name in wanted:
                if name not in found and f"{name}/segments" in shard.file:
                    found[name] = shard
        return found

    def is_summarized(self, book: Book) -> bool:
        """Whether what a book's entries miss is known only where its weights were kept."""
        return any(any(self.info.stream(name).bases) for name in book.terms)

    def has_divisors(self, book: Book) -> bool:
        """Whether what the optimizer divided a book's steps by was kept of any of them."""
        return any(divisor_steps(shard, book) for shard in self.step_shards)

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
        return file.read_all([n for n in file.arrays if not n.startswith((BUFFER, STATE))])

    def kept(self, step: int) -> TensorFile:
        """The file of what was kept of `step`: parameters, and the optimizer's memory of them."""
        if step and step not in self._weights:
            raise UnknownStepError(
                f"the weights of step {step} were not kept; those of {self.kept_steps} were."
            )
        file = (self._weights[step] if step else self._initial).file
        if step not in self._compared:
            self._compare(file)
            self._compared.add(step)
        return file

    def _compare(self, file: TensorFile) -> None:
        """Refuses weights, or buffers, that are not what `run.json` says."""
        for book in self.info.books:
            place, buffer = file.array(book.name), file.arrays.get(BUFFER + book.name)
            found = (place.shape, str(place.dtype).removeprefix("torch."))
            if found != (book.shape, book.dtype) or (buffer and buffer.shape != book.shape):
                raise CorruptError(
                    f"'{file.path}' has '{book.name}' as {found[1]} of shape {found[0]}, or its "
                    f"buffer of another one, and '{self.path / RUN_FILE}' says {book.dtype} of "
                    f"{book.shape}; restore the run from a copy."
                )

    @cached_property
    def _initial(self) -> Commit:
        return Commit(self.path / INITIAL_FILE, self._sessions[0].start["initial"])

    def _declared(self, info: RunInfo) -> RunInfo:
        """The description with all streams; a name that means two things is refused."""
        known: dict[str, Declaration] = {}
        for shard in self.shards:
            for new in shard.declared:
                old = known.setdefault(new.stream.name, new)
                if (old.stream, old.terms) != (new.stream, new.terms):
                    raise CorruptError(
                        f"the log of '{shard.path}' declares the stream '{new.stream.name}' "
                        "otherwise than a log before it."
                    )
        return info.declared(known.values())

    def _altered_info(self, info: RunInfo) -> Iterator[Damage]:
        if self._sessions[0].start.get("run_crc32") != info.checksum:
            file = self.path / RUN_FILE
            yield file, f"'{file}' is altered: it is not what the first log vouches for."

    def _refusal(self) -> CorruptError:
        others = f" (and {len(self.damage) - 1} more)" if len(self.damage) > 1 else ""
        return CorruptError(
            f"the run '{self.path}' is damaged: {self.damage[0][1].removesuffix('.')}{others}. "
            f"Restore it from a copy; what is left of it, {self.last_step:,} steps, is read by "
            "dualform.open(path, damaged=True), and copied by `dualform repair`."
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


def _open_together(shards: Sequence[Shard]) -> None:
    """Opens objects side by side, since each takes a while; what fails is said where it is read."""

    def open_one(shard: Shard) -> None:
        with suppress(LedgerError):
            shard.file  # noqa: B018

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        list(pool.map(open_one, shards))


def _without_gaps(path: Path, sessions: list[Session]) -> tuple[list[Session], list[Damage]]:
    """The sessions up to the first that has a gap, and the gaps."""
    for at, session in enumerate(sessions):
        until = sessions[at + 1].step if at + 1 < len(sessions) else None
        if gaps := list(session.missing(path, until)):
            return sessions[: at + 1], gaps
    return sessions, []


def _in_order(sessions: Sequence[Session], last: int) -> list[Shard]:
    """The shards of all ranks up to a step, session by session, in the order of their steps."""
    found: list[Shard] = []
    for session in sessions:
        own = [
            shard
            for rank in session.commits
            for shard in session.shards(rank)
            if shard.first <= min(last, session.reached_by(rank))
        ]
        found += sorted(own, key=lambda shard: (shard.first, shard.rank))
    return found


def _column(shards: Sequence[Shard], name: str) -> Tensor:
    parts = [shard.file.read(name) for shard in shards if name in shard.file]
    return torch.cat(parts) if parts else torch.empty(0)


def values_by_step(
    shard: Shard, book: Book, kind: str, first: int, last: int
) -> Iterator[tuple[int, Tensor]]:
    """What a shard has of a book for some steps, each in the shape of the book."""
    name = f"{book.name}/{kind}s"
    if name not in shard.file or shard.first > last or shard.last < first:
        return
    steps, entry = shard.file.read(f"{book.name}/{kind}_steps"), shard.file.arrays[name]
    if entry.shape != (len(steps), *book.shape):
        raise CorruptError(
            f"'{shard.path}' has '{name}' of shape {entry.shape}, and the book has the shape "
            f"{book.shape}; restore the file from a copy of the run."
        )
    for at in torch.nonzero((steps >= first) & (steps <= last)).flatten().tolist():
        yield int(steps[at]), shard.file.read(name, at, at + 1)[0]


def divisor_steps(shard: Shard, book: Book) -> list[int]:
    """The steps of a shard of which it has what the optimizer divided a book by."""
    name = f"{book.name}/divisor_steps"
    steps: list[int] = shard.file.read(name).tolist() if name in shard.file else []
    return steps
