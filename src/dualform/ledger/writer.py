"""Writing a run folder: blocks of steps go in, committed shards come out."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import Tensor

from dualform.errors import LedgerError, NotARunError, RunExistsError, RunLockedError
from dualform.ledger.files import require, sync_folder, write_durably
from dualform.ledger.format import (
    INITIAL_FILE,
    LOCK_FILE,
    MARKS,
    RUN_FILE,
    SAMPLES_FOLDER,
    Declaration,
    RunInfo,
    describe,
)
from dualform.ledger.log import (
    END_FILE,
    Head,
    LogWriter,
    is_writer,
    writer_folders,
    writer_number,
)
from dualform.ledger.reader import Ledger
from dualform.ledger.shards import Shards
from dualform.ledger.tensors import index_checksum, write_tensors

SIDE_BY_SIDE = min(4, (os.cpu_count() or 1) // 4)
"""How many shards may be under way: none where training needs all the processors there are."""


@dataclass
class Block:
    """Whole steps of a run: arrays in parts along their first axis, and remarks about books.

    >>> import torch
    >>> Block(1, 2, {"fc/keys": [torch.zeros(3, 2), torch.ones(1, 2)]}).last
    2
    """

    first: int
    last: int
    arrays: dict[str, list[Tensor]]
    notes: list[dict[str, Any]] = field(default_factory=list)
    streams: list[Declaration] = field(default_factory=list)
    """What readers must know of streams that this writer has not declared before."""
    written: Callable[[], None] | None = None
    """Called when the arrays are on disk and their memory may be used again."""


class LedgerWriter:
    """One process recording into one run; holds the run's lock until closed.

    >>> import tempfile, torch; path = Path(tempfile.mkdtemp()) / "run"
    >>> writer = LedgerWriter.create(path, RunInfo(), initial={"w": torch.zeros(2)})
    >>> writer.append(Block(1, 1, {"fc/keys": [torch.ones(3, 2)]}))
    >>> writer.flush(); writer.close()
    >>> Ledger(path).last_step
    1
    """

    def __init__(
        self, path: Path, lock: FileLock, start: Mapping[str, Any], after: Head | None = None
    ) -> None:
        self.path = path
        self._lock = lock
        self._blocks: list[Block] = []
        self._shards = Shards(SIDE_BY_SIDE)
        self._files = 0
        self.committed = int(start["step"])
        self._open = True
        self._process = os.getpid()
        number = max(map(writer_number, writer_folders(path)), default=0) + 1
        self.folder = path / f"writer-{number:04d}-{secrets.token_hex(4)}"
        try:
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
        initial: Mapping[str, Tensor],
        *,
        overwrite: bool = False,
        start: Mapping[str, Any] | None = None,
    ) -> LedgerWriter:
        """Starts a new run in a folder that is empty or not there yet."""
        _make_folder(path, overwrite)
        lock = _lock(path)
        try:
            if not overwrite and (path / RUN_FILE).exists():
                raise _exists(path)
            _remove_run(path)
            (path / SAMPLES_FOLDER).mkdir(exist_ok=True)
            arrays = {name: [weight.cpu()] for name, weight in initial.items()}
            vouched = {"initial": _written(path / INITIAL_FILE, arrays), "run_crc32": info.checksum}
            writer = cls(path, lock, {"step": 0, **vouched, **(start or {})})
            write_durably(path / RUN_FILE, info.to_json())
            return writer
        except BaseException:
            lock.release()
            raise

    @classmethod
    def resume(cls, path: Path, step: int, start: Mapping[str, Any] | None = None) -> LedgerWriter:
        """Goes on with a run after `step`; what was written beyond it no longer counts."""
        Ledger(path)  # or say why it is none
        lock = _lock(path)
        try:
            return cls(path, lock, {"step": step, **(start or {})}, after=Ledger(path).head)
        except BaseException:
            lock.release()
            raise

    def append(self, block: Block) -> None:
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
            write = partial(self._write, self._next_file(), _merge(blocks))
            self._shards.begin(write, partial(self._commit_rows, blocks))

    def flush(self) -> None:
        """Writes everything taken so far, and returns when it is committed."""
        self.pass_on()
        self._shards.wait()

    def weights(self, step: int, weights: Mapping[str, Tensor], mark: str) -> None:
        """Begins to keep the parameters as they were after `step`, behind everything taken so far.

        `mark` says why (see FORMAT.md).
        """
        if mark not in MARKS:
            raise LedgerError(f"the mark '{mark}' is not one of {', '.join(MARKS)}.")
        self.pass_on()
        write = partial(self._write, self._next_file(), {name: [w] for name, w in weights.items()})
        kept = {"kind": "weights", "step": step, "mark": mark}
        self._shards.begin(write, lambda record: self._commit({**kept, **record}))

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
            self._shards.close()
            with suppress(OSError):  # else the run looks as if this process had been killed
                self._log.end()
            self._log.close()
            self._lock.release()

    def _next_file(self) -> str:
        self._files += 1
        return f"{self._files:08d}.safetensors"

    def _write(self, name: str, arrays: Mapping[str, Sequence[Tensor]]) -> dict[str, Any]:
        try:
            return {"file": name, **_written(self.folder / name, arrays)}
        except OSError as error:
            raise self._failure(error) from error

    def _commit_rows(self, blocks: Sequence[Block], record: dict[str, Any]) -> None:
        notes = [note for block in blocks for note in block.notes]
        span = {"first": blocks[0].first, "last": blocks[-1].last}
        streams = [asdict(declared) for block in blocks for declared in block.streams]
        self._commit({"kind": "rows", **record, **span, "notes": notes, "streams": streams})
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
        return LedgerError(f"cannot write to '{self.path}': {error}. {safe}.")


def _written(path: Path, arrays: Mapping[str, Sequence[Tensor]]) -> dict[str, int]:
    """Writes a file, and returns what its line in the log vouches for."""
    length, checksum = write_tensors(path, arrays)
    return {"bytes": length, "crc32": checksum, "index_crc32": index_checksum(arrays)}


def _continues(block: Block, earlier: Block) -> bool:
    """Whether the arrays of both blocks can stand one behind the other."""
    common = block.arrays.keys() & earlier.arrays.keys()
    pairs = [(block.arrays[name][0], earlier.arrays[name][0]) for name in common]
    return all(a.shape[1:] == b.shape[1:] and a.dtype == b.dtype for a, b in pairs)


def _merge(blocks: Sequence[Block]) -> dict[str, list[Tensor]]:
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
    names = {LOCK_FILE, INITIAL_FILE, SAMPLES_FOLDER, END_FILE, RUN_FILE + ".draft"}
    return entry.name in names or is_writer(entry.name)


def _exists(path: Path) -> RunExistsError:
    steps = Ledger(path, damaged=True).last_step
    return RunExistsError(
        f"'{path}' already holds a run of {steps:,} steps; choose another path, "
        "go on with it (resume=True), or replace it (overwrite=True)."
    )


def _lock(path: Path) -> FileLock:
    if os.path.lexists(path / LOCK_FILE):
        require(path / LOCK_FILE, "a file")  # taking it would empty what a link leads to
    lock = FileLock(path / LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RunLockedError(
            f"another process is recording into '{path}'; wait for it or choose another path."
        ) from None
    return lock


def _remove_run(path: Path) -> None:
    """Removes the files of a run, and nothing else that may lie in its folder.

    Its description goes first: without it, what is left after a crash is no run.
    """
    for name in (RUN_FILE, END_FILE, INITIAL_FILE):
        (path / name).unlink(missing_ok=True)
    for folder in [*writer_folders(path), path / SAMPLES_FOLDER]:
        if folder.is_symlink():
            folder.unlink()
        shutil.rmtree(folder, ignore_errors=True)
