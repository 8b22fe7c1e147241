"""Writing a run folder: blocks of steps go in, committed shards come out."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from dualform.errors import (
    LedgerError,
    NotARunError,
    RunExistsError,
    RunLockedError,
    UnknownStepError,
)
from dualform.ledger.commit_queue import CommitQueue
from dualform.ledger.files import remove_folder, sync_folder, write_durably
from dualform.ledger.format import (
    COMPACTED_FILE,
    FOLDER,
    INITIAL_FILE,
    MARKS,
    RUN_FILE,
    SAMPLES_FOLDER,
    Declaration,
    RunInfo,
    describe,
)
from dualform.ledger.locks import LOCK, RankLock, lock_rank, lock_run
from dualform.ledger.log import (
    END,
    Head,
    LogWriter,
    session_and_rank,
    writer_folders,
)
from dualform.ledger.object_path import ObjectPath
from dualform.ledger.reader import Ledger
from dualform.ledger.shared_keys import SharedKeys
from dualform.ledger.tensor_writing import Array, index_checksum, write_tensors
from dualform.ledger.tensors import in_index

SIDE_BY_SIDE = min(4, (os.cpu_count() or 1) // 4)
"""How many shards may be under way: none where training needs all the processors there are."""
SENT_SIDE_BY_SIDE = 2
"""How many may be on their way to object storage, which takes time and no processor."""


@dataclass
class ShardBlock:
    """Whole steps of a run: arrays in parts along their first axis, and remarks about books.

    >>> import torch
    >>> ShardBlock(1, 2, {"fc/keys": [torch.zeros(3, 2), torch.ones(1, 2)]}).last
    2
    """

    first: int
    last: int
    arrays: dict[str, list[Tensor]]
    notes: list[dict[str, Any]] = field(default_factory=list)
    streams: list[Declaration] = field(default_factory=list)
    """What readers must know of streams that this writer has not declared before."""
    repeating: frozenset[str] = frozenset()
    """The streams that may see the same keys again, as those of a first layer do."""
    written: Callable[[], None] | None = None
    """Called when the arrays are on disk and their memory may be used again."""


class LedgerWriter:
    """One process recording into one run, as one of several ranks; holds its rank's lock.

    Rank 0 begins: it creates a run, or resumes one. Then the other ranks join.

    >>> import tempfile, torch; path = Path(tempfile.mkdtemp()) / "run"
    >>> writer = LedgerWriter.create(path, RunInfo(), initial={"w": torch.zeros(2)})
    >>> writer.append(ShardBlock(1, 1, {"fc/keys": [torch.ones(3, 2)]}))
    >>> writer.flush(); writer.close()
    >>> Ledger(path).last_step
    1
    """

    def __init__(
        self, path: Path, lock: RankLock, start: Mapping[str, Any], after: Head | None = None
    ) -> None:
        self.path = path
        self.rank, self.of = int(start["rank"]), int(start["of"])
        self._lock = lock
        self._blocks: list[ShardBlock] = []
        self._queue = CommitQueue(
            SENT_SIDE_BY_SIDE if isinstance(path, ObjectPath) else SIDE_BY_SIDE
        )
        self._keys = SharedKeys()
        self._files = 0
        self.committed = int(start["step"])
        self._open = True
        self._process = os.getpid()
        name = f"writer-{start['session']:04d}-rank{self.rank}-{secrets.token_hex(4)}"
        self.folder = path / name
        try:
            lock.claim(name)
            self.folder.mkdir()
            self._log = LogWriter(self.folder, start, after)
            sync_folder(path)
        except OSError as error:
            raise self._failure(error) from error

    @classmethod
    def create(
        cls,
        path: Path,
        info: RunInfo,
        initial: Mapping[str, Array],
        *,
        overwrite: bool = False,
        start: Mapping[str, Any] | None = None,
        of: int = 1,
    ) -> LedgerWriter:
        """Starts a new run of so many ranks, in a folder that is empty or not there yet."""
        _make_folder(path, overwrite)
        lock = lock_run(path)
        try:
            if not overwrite and (path / RUN_FILE).exists():
                raise _exists(path)
            _remove_run(path)
            (path / SAMPLES_FOLDER).mkdir(exist_ok=True)
            arrays = {name: [weight.cpu()] for name, weight in initial.items()}
            vouched = {
                "initial": write_vouched(path / INITIAL_FILE, arrays),
                "run_crc32": info.checksum,
            }
            begun = {"session": 1, "rank": 0, "of": of, "step": 0}
            writer = cls(path, lock, {**begun, **vouched, **(start or {})})
            write_durably(path / RUN_FILE, info.to_json())
            return writer
        except BaseException:
            lock.release()
            raise

    @classmethod
    def resume(
        cls, path: Path, step: int, start: Mapping[str, Any] | None = None, *, of: int = 1
    ) -> LedgerWriter:
        """Goes on with a run after `step`; what any rank wrote beyond it no longer counts."""
        Ledger(path)  # or say why it is none
        lock = lock_run(path)
        try:
            ledger = Ledger(path)
            if not ledger.ends_at(step):
                raise UnknownStepError(
                    f"cannot go on with '{path}' after step {step}: no file of every rank ends "
                    f"there; it is readable up to step {ledger.last_step}."
                )
            number = max(session_and_rank(folder)[0] for folder in writer_folders(path)) + 1
            begun = {"session": number, "rank": 0, "of": of, "step": step}
            return cls(path, lock, {**begun, **(start or {})}, ledger.head(0))
        except BaseException:
            lock.release()
            raise

    @classmethod
    def join(cls, path: Path, rank: int, start: Mapping[str, Any] | None = None) -> LedgerWriter:
        """Records beside rank 0, in the session that it has begun."""
        _joinable(path, rank)  # or say why it is not
        lock = lock_rank(path, rank)
        try:
            ledger = _joinable(path, rank)
            session = ledger.session
            begun = {"session": session.number, "rank": rank, "of": session.of}
            begun["step"] = session.step
            return cls(path, lock, {**begun, **(start or {})}, ledger.head(rank))
        except BaseException:
            lock.release()
            raise

    def append(self, block: ShardBlock) -> None:
        """Takes a block into memory; `flush` makes it durable."""
        if any(not _continues(block, earlier) for earlier in self._blocks):
            self.pass_on()
        self._blocks.append(block)

    def pass_on(self) -> None:
        """Begins to write everything taken so far as one shard.

        It is committed when it is durable, and all before it are.
        """
        if self._blocks:
            blocks, self._blocks = self._blocks, []
            arrays = _merge(blocks)
            declared = [one for block in blocks for one in block.streams]
            repeating = frozenset[str]().union(*(block.repeating for block in blocks))
            same_keys = self._keys.leave_out(arrays, declared, repeating)
            write = partial(self._write, self._next_file(), arrays)
            self._queue.begin(write, partial(self._commit_rows, blocks, same_keys))

    def flush(self) -> None:
        """Writes everything taken so far, and returns when it is committed."""
        self.pass_on()
        self._queue.wait()

    def weights(self, step: int, weights: Mapping[str, Array], mark: str) -> None:
        """Begins to keep the parameters as they were after `step`, behind everything taken so far.

        `mark` says why (see FORMAT.md).
        """
        if mark not in MARKS:
            raise LedgerError(f"the mark '{mark}' is not one of {', '.join(MARKS)}.")
        self.pass_on()
        write = partial(self._write, self._next_file(), {name: [w] for name, w in weights.items()})
        kept = {"kind": "weights", "step": step, "mark": mark}
        self._queue.begin(write, lambda record: self._commit({**kept, **record}))

    def close(self) -> None:
        """Makes everything durable and gives the run free."""
        try:
            self.flush()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Gives the run free without writing what has not been passed on.

        A forked process, such as a data loader's worker, has nothing to give: the run is its
        parent's, and goes on.
        """
        if self._open and os.getpid() == self._process:
            self._open = False
            self._queue.close()
            with suppress(OSError):  # else the run looks as if this process had been killed
                self._log.end()
            self._log.close()
            self._lock.release()

    def _next_file(self) -> str:
        self._files += 1
        return f"{self._files:08d}.safetensors"

    def _write(self, name: str, arrays: Mapping[str, Sequence[Array]]) -> dict[str, Any]:
        try:
            return {"file": name, **write_vouched(self.folder / name, arrays)}
        except OSError as error:
            raise self._failure(error) from error

    def _commit_rows(
        self, blocks: Sequence[ShardBlock], same_keys: dict[str, str], record: dict[str, Any]
    ) -> None:
        span = {"first": blocks[0].first, "last": blocks[-1].last}
        said = {
            "notes": [note for block in blocks for note in block.notes],
            "streams": [declared.to_json() for block in blocks for declared in block.streams],
        } | ({"same_keys": same_keys} if same_keys else {})
        self._commit({"kind": "rows", **record, **span, **said})
        self.committed = blocks[-1].last
        for block in blocks:
            if block.written is not None:
                block.written()

    def _commit(self, record: dict[str, Any]) -> None:
        try:
            self._log.append(record)
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> LedgerError:
        safe = f"The run is readable up to step {self.committed}"
        if error.errno == errno.ENOSPC:
            free = shutil.disk_usage(self.path).free
            return LedgerError(
                f"the disk of '{self.path}' is full ({free / 1e6:,.1f} MB free). {safe}; "
                "make room and go on with record(..., resume=True)."
            )
        kind = RunLockedError if isinstance(error, RunLockedError) else LedgerError
        return kind(f"cannot write to '{self.path}': {str(error).removesuffix('.')}. {safe}.")


def write_vouched(path: Path, arrays: Mapping[str, Sequence[Array]]) -> dict[str, int]:
    """Writes a file, and returns what its line in the log vouches for.

    What a reader finds its way by comes first, so that it is read together.
    """
    of_index = {name: in_index(name, parts[0].dtype) for name, parts in arrays.items()}
    arrays = {name: arrays[name] for name in sorted(arrays, key=lambda name: not of_index[name])}
    length, checksum = write_tensors(path, arrays)
    return {"bytes": length, "crc32": checksum, "index_crc32": index_checksum(arrays)}


def _continues(block: ShardBlock, earlier: ShardBlock) -> bool:
    """Whether the arrays of both blocks can stand one behind the other.

    A stream that is declared anew is kept by another codec from there on.
    """
    if any(f"{new.stream.name}/segments" in earlier.arrays for new in block.streams):
        return False
    common = block.arrays.keys() & earlier.arrays.keys()
    pairs = [(block.arrays[name][0], earlier.arrays[name][0]) for name in common]
    return all(a.shape[1:] == b.shape[1:] and a.dtype == b.dtype for a, b in pairs)


def _merge(blocks: Sequence[ShardBlock]) -> dict[str, list[Tensor]]:
    """Each array as the list of its parts: what `write_tensors` puts one behind the other."""
    merged: dict[str, list[Tensor]] = {}
    for block in blocks:
        for name, parts in block.arrays.items():
            merged.setdefault(name, []).extend(parts)
    return merged


def _make_folder(path: Path, overwrite: bool) -> None:
    if path.is_file():
        raise NotARunError(f"cannot record into '{path}': {describe(path)}; choose another path.")
    if path.is_dir() and (path / RUN_FILE).exists():
        if not overwrite:
            raise _exists(path)
    elif path.is_dir() and not all(_is_ours(entry) for entry in path.iterdir()):
        raise NotARunError(f"cannot record into '{path}': {describe(path)}; choose another path.")
    path.mkdir(parents=True, exist_ok=True)


def _is_ours(entry: Path) -> bool:
    """Whether a run that was killed while it was being made may have left this behind."""
    names = {INITIAL_FILE, SAMPLES_FOLDER, RUN_FILE + ".draft"}
    return entry.name in names or any(p.fullmatch(entry.name) for p in (LOCK, END, FOLDER))


def _exists(path: Path) -> RunExistsError:
    steps = Ledger(path, damaged=True).last_step
    return RunExistsError(
        f"'{path}' already holds a run of {steps:,} steps; choose another path, "
        "go on with it (resume=True), or replace it (overwrite=True)."
    )


def _joinable(path: Path, rank: int) -> Ledger:
    """The run, if its last session still waits for this rank."""
    ledger = Ledger(path)
    session = ledger.session
    if not 0 < rank < session.of or rank in session.commits:
        raise LedgerError(
            f"rank {rank} cannot join session {session.number} of '{path}': it has {session.of} "
            f"ranks, and {sorted(session.commits)} have begun. Rank 0 begins a session, by "
            "creating or resuming a run; then each other rank joins once."
        )
    return ledger


def _remove_run(path: Path) -> None:
    """Removes the files of a run, and nothing else that may lie in its folder.

    Its description goes first: without it, what is left after a crash is no run.
    """
    ends = [entry.name for entry in path.iterdir() if END.fullmatch(entry.name)]
    for name in (RUN_FILE, COMPACTED_FILE, *ends, INITIAL_FILE):
        (path / name).unlink(missing_ok=True)
    for folder in [*writer_folders(path), path / SAMPLES_FOLDER]:
        if folder.is_symlink():
            folder.unlink()
        remove_folder(folder)
