"""Running through the rows of a stream: in chunks, out of core."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from rich.console import Console
from rich.progress import Progress, TaskID
from torch import Tensor

from dualform.errors import CorruptError
from dualform.ledger import Ledger
from dualform.ledger.reader import Commit

CHUNK_BYTES = 16 << 20
PATIENCE = 1.0
"""Seconds before a progress bar is worth showing."""


class RowColumns:
    """Step, sample and position of each row of a stream in one shard; found from its segments."""

    def __init__(self, shard: Commit, stream: str) -> None:
        numbers, sizes = shard.file.read("batches").unbind(1)
        batches, order = numbers.sort()
        begins = sizes.cumsum(0) - sizes
        self._shard = shard
        self._segments = shard.file.read(f"{stream}/segments")
        at = order[torch.searchsorted(batches, self._segments[:, 1].contiguous())]
        self._begins, self._counts = begins[at], sizes[at] * self._segments[:, 2]
        if int(self._counts.sum()) != shard.file.rows(f"{stream}/keys"):
            raise CorruptError(f"'{shard.path}': the segments of '{stream}' do not fit its rows.")

    def count(self, until: int) -> int:
        """How many rows belong to steps up to `until`; they come first."""
        return int(self._counts[self._segments[:, 0] <= until].sum())

    @cached_property
    def steps(self) -> Tensor:
        """(rows,): the number of each row's step."""
        return self._segments[:, 0].repeat_interleave(self._counts)

    @cached_property
    def samples(self) -> Tensor:
        """(rows,): the stored id of each row's sample."""
        begins = self._begins.repeat_interleave(self._counts)
        return self._shard.file.read("samples")[begins + self._within // self._per_sample]

    @cached_property
    def positions(self) -> Tensor:
        """(rows,): which of its sample's rows it is: the token, patch or pixel."""
        return self._within % self._per_sample

    @cached_property
    def _within(self) -> Tensor:
        """Each row's place in its segment."""
        begins = self._counts.cumsum(0) - self._counts
        return torch.arange(int(self._counts.sum())) - begins.repeat_interleave(self._counts)

    @cached_property
    def _per_sample(self) -> Tensor:
        return self._segments[:, 2].repeat_interleave(self._counts)


@dataclass(frozen=True)
class Chunk:
    """Some consecutive rows of a stream; keys and values are valid until the next chunk."""

    keys: Tensor
    values: Tensor
    columns: RowColumns
    start: int

    @cached_property
    def steps(self) -> Tensor:
        """(rows,): the number of each row's step."""
        return self._of(self.columns.steps)

    @cached_property
    def samples(self) -> Tensor:
        """(rows,): the stored id of each row's sample."""
        return self._of(self.columns.samples)

    @cached_property
    def positions(self) -> Tensor:
        """(rows,): which of its sample's rows it is."""
        return self._of(self.columns.positions)

    def _of(self, column: Tensor) -> Tensor:
        return column[self.start : self.start + len(self.keys)].to(self.keys.device)


class Scan:
    """The rows of one stream up to a step, chunk by chunk.

    Shards are mapped; the system reads ahead, and chunks behind are let go, so that memory stays
    the same however long the run is.
    """

    def __init__(
        self, ledger: Ledger, stream: str, until: int, device: torch.device | str = "cpu"
    ) -> None:
        self._stream, self._until = stream, until
        self._device = torch.device(device)
        self._names = (f"{stream}/keys", f"{stream}/values")
        self._shards = [
            (shard, columns)
            for shard in ledger.shards
            if self._names[0] in shard.file and (columns := RowColumns(shard, stream)).count(until)
        ]
        self.rows = sum(columns.count(until) for _, columns in self._shards)
        """How many rows there are up to the step."""

    def __iter__(self) -> Iterator[Chunk]:
        with _LateProgress(self._stream, self.rows) as progress:
            for shard, columns in self._shards:
                for chunk in self._chunks(shard, columns):
                    yield chunk
                    progress.advance(len(chunk.keys))

    def _chunks(self, shard: Commit, columns: RowColumns) -> Iterator[Chunk]:
        width = sum(shard.file.entries[name].row_bytes for name in self._names)
        rows, count = max(1, CHUNK_BYTES // max(1, width)), columns.count(self._until)
        file = shard.file.mapped()
        for start in range(0, count, rows):
            stop = min(start + rows, count)
            keys, values = (
                widen(file.rows(name, start, stop)).to(self._device) for name in self._names
            )
            yield Chunk(keys, values, columns, start)
            for name in self._names:
                file.let_go(name, start, stop)


def widen(rows: Tensor) -> Tensor:
    """16-bit rows as float32; wider ones as they are."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def batch_samples(shard: Commit) -> dict[int, list[int]]:
    """The samples of each batch of a shard, by the batch's number."""
    samples = shard.file.read("samples").tolist()
    found, at = {}, 0
    for number, size in shard.file.read("batches").tolist():
        found[number] = samples[at : at + size]
        at += size
    return found


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
