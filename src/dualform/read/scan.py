"""Running through the rows of a stream: in chunks, out of core, reading ahead."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import Progress, TaskID
from torch import Tensor

from dualform.ledger import Ledger
from dualform.ledger.reader import Commit

CHUNK_BYTES = 4 << 20
BUFFERS = 3
"""One chunk is worked on while the next is read; the third keeps them apart."""
PATIENCE = 1.0
"""Seconds before a progress bar is worth showing."""


@dataclass(frozen=True)
class Chunk:
    """Some consecutive rows of a stream. The tensors are reused: take copies of what you keep."""

    keys: Tensor
    values: Tensor
    steps: Tensor
    """(rows,): the number of each row's step."""
    samples: Tensor
    """(rows,): the stored id of each row's sample."""
    positions: Tensor
    """(rows,): which of its sample's rows it is: the token, patch or pixel."""


@dataclass(frozen=True)
class _Piece:
    """A range of rows of one shard, and the columns that belong to it."""

    shard: Commit
    start: int
    columns: tuple[Tensor, Tensor, Tensor]


class Scan:
    """The rows of one stream up to a step, chunk by chunk.

    A second thread reads while the first computes: plain reads into buffers that are reused are
    faster than a memory map on cold files, as fast on warm ones, and never hold more than a few
    chunks in memory.
    """

    def __init__(
        self, ledger: Ledger, stream: str, until: int, device: torch.device | str = "cpu"
    ) -> None:
        self._ledger, self._stream, self._until = ledger, stream, until
        self._device = torch.device(device)
        self._names = (f"{stream}/keys", f"{stream}/values")
        entries = [s.file.entries for s in ledger.shards if self._names[0] in s.file]
        widths = [sum(entry[name].row_bytes for name in self._names) for entry in entries]
        self._chunk_rows = max(1, CHUNK_BYTES // max(widths, default=1))
        self.rows = sum(_rows_until(shard, stream, until) for shard in ledger.shards)
        """How many rows there are up to the step."""

    def __iter__(self) -> Iterator[Chunk]:
        with ThreadPoolExecutor(1) as reader, _LateProgress(self._stream, self.rows) as progress:
            ahead: list[tuple[_Piece, Future[tuple[Tensor, Tensor]]]] = []
            slots: list[tuple[Tensor, ...]] = [()] * BUFFERS
            for number, piece in enumerate(self._pieces()):
                slot = number % BUFFERS
                slots[slot] = self._slot(piece, slots[slot])
                ahead.append((piece, reader.submit(self._read, piece, slots[slot])))
                if len(ahead) == BUFFERS - 1:
                    yield self._chunk(*ahead.pop(0), progress)
            for piece, future in ahead:
                yield self._chunk(piece, future, progress)

    def _pieces(self) -> Iterator[_Piece]:
        for shard in self._ledger.shards:
            if self._names[0] not in shard.file or shard.record["first"] > self._until:
                continue
            columns = row_columns(shard, self._stream)
            count = int((columns[0] <= self._until).sum())  # steps only grow within a shard
            for start in range(0, count, self._chunk_rows):
                stop = min(start + self._chunk_rows, count)
                steps, samples, positions = (column[start:stop] for column in columns)
                yield _Piece(shard, start, (steps, samples, positions))

    def _slot(self, piece: _Piece, slot: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Buffers that fit the shard's arrays; the old ones wherever they do."""
        entries = [piece.shard.file.entries[name] for name in self._names]
        if [buffer.dtype for buffer in slot] == [entry.dtype for entry in entries]:
            return slot
        pin = self._device.type == "cuda"
        return tuple(
            torch.empty((self._chunk_rows, *e.shape[1:]), dtype=e.dtype, pin_memory=pin)
            for e in entries
        )

    def _read(self, piece: _Piece, slot: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        keys, values = (buffer[: len(piece.columns[0])] for buffer in slot)
        for name, part in zip(self._names, (keys, values), strict=True):
            piece.shard.file.fill(name, piece.start, part)
        return keys, values

    def _chunk(
        self, piece: _Piece, future: Future[tuple[Tensor, Tensor]], progress: _LateProgress
    ) -> Chunk:
        keys, values = (widen(part).to(self._device) for part in future.result())
        progress.advance(len(keys))
        steps, samples, positions = (column.to(self._device) for column in piece.columns)
        return Chunk(keys, values, steps, samples, positions)


def widen(rows: Tensor) -> Tensor:
    """16-bit rows as float32; wider ones as they are."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def row_columns(shard: Commit, stream: str) -> tuple[Tensor, Tensor, Tensor]:
    """Step, sample and position of each row of a stream in one shard, from its segments."""
    segments = shard.file.read(f"{stream}/segments")
    first, size, samples = batch_samples(shard)
    index = torch.searchsorted(
        shard.file.read("batches")[:, 0].contiguous(), segments[:, 1].contiguous()
    )
    sizes, positions = size[index], segments[:, 2]
    counts = sizes * positions
    within = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    per_row = positions.repeat_interleave(counts)
    at = first[index].repeat_interleave(counts) + within // per_row
    return segments[:, 0].repeat_interleave(counts), samples[at], within % per_row


def _rows_until(shard: Commit, stream: str, until: int) -> int:
    if shard.record["last"] <= until or f"{stream}/keys" not in shard.file:
        return shard.file.rows(f"{stream}/keys")
    return int((row_columns(shard, stream)[0] <= until).sum())


def batch_samples(shard: Commit) -> tuple[Tensor, Tensor, Tensor]:
    """Of each batch of a shard: where its samples begin, how many they are; and all samples."""
    sizes = shard.file.read("batches")[:, 1]
    return sizes.cumsum(0) - sizes, sizes, shard.file.read("samples")


class _LateProgress:
    """A progress bar that appears only where somebody waits for more than a second."""

    def __init__(self, name: str, rows: int) -> None:
        self._name, self._rows, self._done = name, rows, 0
        self._began = time.monotonic()
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> _LateProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, rows: int) -> None:
        self._done += rows
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        elif time.monotonic() - self._began > PATIENCE:
            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(f"reading {self._name}", total=self._rows)
            self._bar.start()
