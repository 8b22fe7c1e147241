"""Running through the rows of a stream: in chunks, out of core."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from dualform.errors import CorruptError
from dualform.layers import expand, positions
from dualform.ledger import Book, Ledger, Shard, Stream, Term
from dualform.ledger.codecs import Column
from dualform.memory.blocks import from_matrix, matrix_shape
from dualform.memory.forms import form_named
from dualform.memory.shared import AnySides, SharedSides
from dualform.read.progress import LateProgress

CHUNK_BYTES = 16 << 20


class RowColumns:
    """Step, sample and position of each record of a stream in one shard; from its segments."""

    def __init__(self, ledger: Ledger, shard: Shard, stream: Stream) -> None:
        numbers, sizes = shard.file.read("batches").unbind(1)
        batches, order = numbers.sort()
        begins = sizes.cumsum(0) - sizes
        self._ledger, self._shard = ledger, shard
        self._segments = shard.file.read(f"{stream.name}/segments")
        at = order[torch.searchsorted(batches, self._segments[:, 1].contiguous())]
        self._begins, self._sizes = begins[at], sizes[at]
        self._counts = self._sizes * self._segments[:, 2]
        check_arrays(shard, stream, int(self._counts.sum()), len(self._counts))

    def between(self, first: int, last: int) -> tuple[int, int]:
        """Which records belong to these steps; they stand in the order of steps."""
        steps = self._segments[:, 0]
        start = int(self._counts[steps < first].sum())
        return start, start + int(self._counts[(steps >= first) & (steps <= last)].sum())

    def visits(self, until: int) -> Tensor:
        """(5, visits) until a step: the first record, how many there are, step, sample and use."""
        steps, _, each = (column.repeat_interleave(self._sizes) for column in self._segments.T[:3])
        begins = self._sizes.cumsum(0) - self._sizes
        at = torch.arange(len(each)) + (self._begins - begins).repeat_interleave(self._sizes)
        samples = self._ledger.samples(self._shard)[at]
        uses = torch.arange(len(self._sizes)).repeat_interleave(self._sizes)
        found = torch.stack([each.cumsum(0) - each, each, steps, samples, uses])
        return found[:, (steps <= until) & (each > 0)]

    def parts(self, begin: int, end: int, records: int, uses: int | None) -> list[tuple[int, int]]:
        """Some records in parts: of so many records, or where `uses` is given, of so many uses."""
        if uses is None:
            return [(at, min(at + records, end)) for at in range(begin, end, records)]
        ends = self._counts.cumsum(0)
        stops = torch.unique(ends[(ends > begin) & (ends <= end)])[uses - 1 :: uses].tolist()
        return [pair for pair in pairwise([begin, *stops, end]) if pair[0] < pair[1]]

    @cached_property
    def steps(self) -> Tensor:
        """(rows,): the number of each row's step."""
        return self._segments[:, 0].repeat_interleave(self._counts)

    @cached_property
    def uses(self) -> Tensor:
        """(rows,): the number of each row's segment: a use of the layer in a backward pass."""
        return torch.arange(len(self._counts)).repeat_interleave(self._counts)

    def step_and_batch(self, use: int) -> tuple[int, int]:
        """Where a use belongs."""
        step, batch = self._segments[use, :2].tolist()
        return step, batch

    @cached_property
    def samples(self) -> Tensor:
        """(rows,): the stored id of each row's sample."""
        begins = self._begins.repeat_interleave(self._counts)
        return self._ledger.samples(self._shard)[begins + self._within // self._per_sample]

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

    stream: Stream
    keys: Tensor
    values: Tensor
    columns: RowColumns
    start: int
    """The first record; a record has one row, or as many as its layout has positions."""
    matrices: Tensor | None = None
    """(uses, height, width): what the rows of each use share, where they do."""

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
        within = torch.arange(len(self.keys), device=self.keys.device) % self._each
        return self._of(self.columns.positions) * self._each + within

    def by_step(self) -> Iterator[tuple[int, slice]]:
        """Each step's number, and its rows."""
        steps, counts = torch.unique_consecutive(self.steps, return_counts=True)
        begin = 0
        for step, count in zip(steps.tolist(), counts.tolist(), strict=True):
            yield step, slice(begin, begin + count)
            begin += count

    def by_use(self) -> Iterator[tuple[int, tuple[int, int], slice]]:
        """Each use's number in its shard, its step and batch, and its rows."""
        uses, counts = torch.unique_consecutive(self._of(self.columns.uses), return_counts=True)
        begin = 0
        for use, count in zip(uses.tolist(), counts.tolist(), strict=True):
            yield use, self.columns.step_and_batch(use), slice(begin, begin + count)
            begin += count

    @property
    def which(self) -> Tensor:
        """(rows,): which of the matrices is each row's."""
        uses = self._of(self.columns.uses)
        return uses - uses[:1]

    @cached_property
    def _each(self) -> int:
        return positions(self.stream)

    def _of(self, column: Tensor) -> Tensor:
        part = column[self.start : self.start + len(self.keys) // self._each].to(self.keys.device)
        return part if self._each == 1 else part.repeat_interleave(self._each)


def row_sides(chunk: Chunk, term: Term) -> AnySides:
    """A chunk's rows as the blocks they add to a parameter."""
    plain = form_named(term.form).rows(chunk.keys, chunk.values, term.groups, term.at)
    return plain if chunk.matrices is None else SharedSides(plain, chunk.matrices, chunk.which)


def rows_total(book: Book, term: Term, sides: AnySides, coefficients: Tensor) -> Tensor:
    """`Σ c a ⊗ b` over some rows, in the shape of the parameter, in float64."""
    shape = matrix_shape(book.shape, term.view, term.groups)
    return from_matrix(sides.total(coefficients, shape), book.shape, term.view, term.groups)


def with_residuals(
    ledger: Ledger, book: Book, first: int, last: int, sums: dict[int, Tensor]
) -> dict[int, Tensor]:
    """Gradients: the sums of rows by step, with what the entries of these steps leave."""
    for step, residual in ledger.residuals(book, first, last):
        if step in sums:
            sums[step] += residual.to(sums[step])
    return sums


class Scan:
    """The rows of one stream from one step to another, chunk by chunk.

    Shards are mapped; the system reads ahead, and chunks behind are let go, so that memory stays
    the same however long the run is.
    """

    def __init__(
        self,
        ledger: Ledger,
        stream: Stream,
        until: int,
        device: torch.device | str = "cpu",
        first: int = 1,
    ) -> None:
        self._stream, self._first, self._until = stream, first, until
        self._device = torch.device(device)
        self._shared = f"{stream.name}/shared"
        self._shards = [
            (shard, columns, columns.between(first, until))
            for shard in shards_of(ledger, stream, first, until)
            for columns in [RowColumns(ledger, shard, stream)]
        ]
        self.records = sum(stop - start for _, _, (start, stop) in self._shards)
        self.rows = self.records * positions(stream)
        """How many rows there are between the steps."""

    def __iter__(self) -> Iterator[Chunk]:
        with LateProgress(self._stream.name, self.rows) as progress:
            for shard, columns, (start, stop) in self._shards:
                for chunk in self._chunks(shard, columns, start, stop):
                    yield chunk
                    progress.advance(len(chunk.keys))

    def _chunks(self, shard: Shard, columns: RowColumns, begin: int, end: int) -> Iterator[Chunk]:
        records = max(1, CHUNK_BYTES // self._record_bytes(shard))
        file, codec = shard.file.mapped(), shard.codec(self._stream.name)
        names = {name: f"{self._stream.name}/{name}" for name in stored_arrays(shard, self._stream)}
        arrays = {name: file.rows(full, 0, shard.file.rows(full)) for name, full in names.items()}
        for start, stop in columns.parts(begin, end, records, self._uses_at_once(shard)):
            keys, values = (s.to(self._device) for s in codec.decode(arrays, start, stop))
            rows, errors = expand(self._stream, keys, values)
            assert errors is not None
            first, last = (int(columns.uses[at]) for at in (start, stop - 1))
            matrices = None
            if self._stream.shared:
                stored = at_least_32_bits(file.rows(self._shared, first, last + 1))
                matrices = stored.to(self._device).reshape(-1, *self._stream.shared)
            yield Chunk(self._stream, rows, errors, columns, start, matrices)
            for full in names.values():
                file.let_go(full, start, stop)
            if self._stream.shared:
                file.let_go(self._shared, first, last + 1)

    def _uses_at_once(self, shard: Shard) -> int | None:
        """How many uses a chunk has where they share large matrices, of which one is all it can."""
        if not self._stream.shared or self._stream.layout:
            return None
        return max(1, CHUNK_BYTES // shard.file.arrays[self._shared].row_bytes)

    def _record_bytes(self, shard: Shard) -> int:
        """What a record takes once it is expanded."""
        codec = shard.codec(self._stream.name)
        width = codec.bytes_per_row(*widths(self._stream))
        if self._stream.layout:
            patch = self._stream.keys[0] * math.prod(self._stream.layout["kernel"])
            width += 4 * patch * positions(self._stream)
        return max(1, width)


def shards_of(ledger: Ledger, stream: Stream, first: int, last: int) -> list[Shard]:
    """The shards that have rows of a stream for some steps."""
    shards = [shard for shard in ledger.shards if shard.first <= last and shard.last >= first]
    return [shard for shard in shards if f"{stream.name}/segments" in shard.file]


def widths(stream: Stream) -> tuple[int, int]:
    """How many numbers a record's key and value have."""
    return math.prod(stream.keys), math.prod(stream.values)


def stored_arrays(shard: Shard, stream: Stream) -> dict[str, Column]:
    """What one record of a stream takes of each array in a shard."""
    return shard.codec(stream.name).arrays(*widths(stream))


def at_least_32_bits(matrices: Tensor) -> Tensor:
    """The matrices that rows share, as they are computed with."""
    return matrices.to(torch.promote_types(matrices.dtype, torch.float32))


def check_arrays(shard: Shard, stream: Stream, records: int, segments: int) -> None:
    """Refuses arrays that are not what the stream's codec says of so many records."""
    if stream.shared:
        matrices = shard.file.array(f"{stream.name}/shared")
        expected = (segments, math.prod(stream.shared))
        if matrices.shape != expected or not matrices.dtype.is_floating_point:
            raise CorruptError(
                f"'{shard.path}' has '{stream.name}/shared' as {matrices.dtype} of shape "
                f"{matrices.shape}; its segments share matrices: floats of {expected}."
            )
    for name, column in stored_arrays(shard, stream).items():
        entry = shard.file.array(f"{stream.name}/{name}")
        if entry.shape[:1] != (records,):
            raise CorruptError(
                f"'{shard.path}': the segments of '{stream.name}' do not fit its rows."
            )
        if entry.shape != (records, column.width) or entry.dtype != column.dtype:
            raise CorruptError(
                f"'{shard.path}' has '{stream.name}/{name}' as {entry.dtype} of shape "
                f"{entry.shape}; by its codec it is {column.dtype} of {(records, column.width)}."
            )


def places(ledger: Ledger, stream: Stream) -> int:
    """How many rows a sample leaves in a stream each time it is seen, at most: tokens, patches."""
    name = f"{stream.name}/segments"
    each = [shard.file.read(name)[:, 2].max() for shard in ledger.shards if name in shard.file]
    return int(max(each, default=0)) * positions(stream)


def batch_samples(ledger: Ledger, shard: Shard) -> dict[int, list[int]]:
    """The samples of each batch of a shard, by the batch's number."""
    samples = ledger.samples(shard).tolist()
    found, at = {}, 0
    for number, size in shard.file.read("batches").tolist():
        found[number] = samples[at : at + size]
        at += size
    return found
