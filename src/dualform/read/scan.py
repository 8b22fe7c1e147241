"""Running through the rows of a stream: in chunks, out of core."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from dualform.errors import CorruptError
from dualform.layers import expand, positions
from dualform.ledger import Book, Ledger, Shard, Stream, Term
from dualform.ledger.codecs import Column
from dualform.ledger.key_table import key_places
from dualform.ledger.tensors import MappedFile
from dualform.memory.blocks import Sides
from dualform.memory.forms import form_named
from dualform.memory.shared import AnySides, SharedSides
from dualform.memory.summary import Bases, Matrices, SummarySides
from dualform.read.engine import Fold, ShardRange
from dualform.read.progress import advance

CHUNK_BYTES = 16 << 20


class RowColumns:
    """Step, sample and position of each record of a stream in one shard; from its segments."""

    def __init__(self, shard: ShardRange, stream: Stream) -> None:
        names = ("batches", f"{stream.name}/segments")
        table, self._segments = shard.shard.file.read_all(names).values()
        numbers, sizes = table.unbind(1)
        batches, order = numbers.sort()
        begins = sizes.cumsum(0) - sizes
        self._shard = shard
        at = order[torch.searchsorted(batches, self._segments[:, 1].contiguous())]
        self._begins, self._sizes = begins[at], sizes[at]
        self._counts = self._sizes * self._segments[:, 2]
        check_arrays(shard.shard, stream, int(self._counts.sum()), len(self._counts))
        each = self._segments[:, 2].repeat_interleave(self._sizes)
        stored = stored_arrays(shard.shard, stream)
        self.places = key_places(shard.shard, stream.name, stored, each)
        """Where the keys of each visit begin, and in which table; None if they lie in order."""

    def between(self, first: int, last: int) -> tuple[int, int]:
        """Which records belong to these steps; they stand in the order of steps."""
        steps = self._segments[:, 0]
        start = int(self._counts[steps < first].sum())
        return start, start + int(self._counts[(steps >= first) & (steps <= last)].sum())

    def uses_between(self, first: int, last: int) -> Tensor:
        """(6, uses) of those between steps that left records, in the order of time.

        The number of a use's first visit in the shard and how many visits it has, its first record
        and how many records a visit has, its step, and its own number.
        """
        steps, _, each = self._segments.T[:3]
        visits, records = (n.cumsum(0) - n for n in (self._sizes, self._counts))
        uses = torch.arange(len(self._sizes))
        found = torch.stack([visits, self._sizes, records, each, steps, uses])
        return found[:, (steps >= first) & (steps <= last) & (self._counts > 0)]

    def samples_of(self, uses: Tensor) -> Tensor:
        """(visits,): the stored id of each visit's sample, of some uses."""
        sizes = self._sizes[uses]
        begins = self._begins[uses] - (sizes.cumsum(0) - sizes)
        at = torch.arange(int(sizes.sum())) + begins.repeat_interleave(sizes)
        return self._shard.samples()[at]

    def parts(self, begin: int, end: int, records: int, uses: int | None) -> list[tuple[int, int]]:
        """Some records in parts: of so many records, or where `uses` is given, of so many uses."""
        if uses is None:
            return [(at, min(at + records, end)) for at in range(begin, end, records)]
        ends = self._counts.cumsum(0)
        stops = torch.unique(ends[(ends > begin) & (ends <= end)])[uses - 1 :: uses].tolist()
        return [pair for pair in pairwise([begin, *stops, end]) if pair[0] < pair[1]]

    @cached_property
    def key_records(self) -> Tensor:
        """(records,): where the key of each lies in the table, where there is one."""
        assert self.places is not None
        each = self._segments[:, 2].repeat_interleave(self._sizes)
        return self.places[0].repeat_interleave(each) + self.positions

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
        return self._shard.samples()[begins + self._within // self._per_sample]

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
    bases: Bases | None = None
    """What records are kept in, where they are summaries."""

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

    def by_step(self) -> list[tuple[int, slice]]:
        """Each step's number, and its rows."""
        steps, counts = torch.unique_consecutive(self.steps, return_counts=True)
        ends = counts.cumsum(0)
        rows = map(slice, (ends - counts).tolist(), ends.tolist())
        return list(zip(steps.tolist(), rows, strict=True))

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
    if chunk.bases is not None:
        return summary_sides(chunk.stream, term, chunk.keys, chunk.values, chunk.bases)
    plain = form_named(term.form).rows(chunk.keys, chunk.values, term.groups, term.at)
    return plain if chunk.matrices is None else SharedSides(plain, chunk.matrices, chunk.which)


def summary_sides(
    stream: Stream, term: Term, keys: Tensor, values: Tensor, bases: Bases
) -> SummarySides:
    """Records that are kept in bases as the blocks they stand for."""
    if form_named(term.form).has_sides and not math.prod(stream.keys):
        kept: Matrices | Sides = Matrices(values.reshape(len(values), *stream.values))
    else:
        kept = form_named(term.form).rows(keys, values, term.groups, term.at)
    return SummarySides(kept, bases)


def rows_total(book: Book, term: Term, sides: AnySides, coefficients: Tensor) -> Tensor:
    """`Σ c a ⊗ b` over some rows, in the shape of the parameter, in float64."""
    every = slice(0, len(sides))
    return sides.totals([every], coefficients, book.shape, term.view, term.groups)[0]


def chunks(
    shard: ShardRange, stream: Stream, device: torch.device | str = "cpu"
) -> Iterator[Chunk]:
    """The rows of one stream in some steps of a shard, chunk by chunk.

    Shards are mapped; the system reads ahead, and chunks behind are let go, so that memory stays
    the same however long the run is.
    """
    if not shard.holds(stream.name):
        return
    columns, codec = RowColumns(shard, stream), shard.shard.codec(stream.name)
    begin, end = columns.between(shard.first, shard.last)
    width = codec.bytes_per_row(*widths(stream))
    if stream.layout:  # what a record takes once it is expanded
        patch = stream.keys[0] * math.prod(stream.layout["kernel"])
        width += 4 * patch * positions(stream)
    records = max(1, CHUNK_BYTES // max(1, width))
    file, mapped = shard.shard.file, shard.shard.file.mapped()
    stored = StoredRecords(shard.shard, stream, columns, mapped)
    shared, uses = f"{stream.name}/shared", None
    if stream.shared and not stream.layout:  # large matrices, of which one is all a chunk can have
        uses = max(1, CHUNK_BYTES // file.arrays[shared].row_bytes)
    bases = shard.bases(stream, device)
    for start, stop in columns.parts(begin, end, records, uses):
        arrays = stored.read(start, stop)
        keys, values = (side.to(device) for side in codec.decode(arrays, 0, stop - start))
        rows, errors = expand(stream, keys, values)
        assert errors is not None
        first, last = (int(columns.uses[at]) for at in (start, stop - 1))
        matrices = None
        if stream.shared:
            own = at_least_32_bits(mapped.rows(shared, first, last + 1))
            matrices = own.to(device).reshape(-1, *stream.shared)
        yield Chunk(stream, rows, errors, columns, start, matrices, bases)
        stored.let_go(start, stop)
        if stream.shared:
            mapped.let_go(shared, first, last + 1)
        advance(shard.steps * (stop - start) / (end - begin))


class StoredRecords:
    """The arrays of a stream in a shard, which is mapped; keys from wherever they lie."""

    def __init__(
        self, shard: Shard, stream: Stream, columns: RowColumns, mapped: MappedFile | None = None
    ) -> None:
        self._mapped, self._columns = mapped or shard.file.mapped(), columns
        every = {name: shard.array(stream.name, name) for name in stored_arrays(shard, stream)}
        keys = () if columns.places is None else shard.codec(stream.name).key_arrays
        self._own = {name: full for name, full in every.items() if name not in keys}
        self._in_table = keys

    def read(self, start: int, stop: int) -> dict[str, Tensor]:
        """Some records of each array, valid until the next call or until they are let go."""
        found = {n: self._mapped.rows(full, start, stop) for n, full in self._own.items()}
        if self._columns.places is not None:
            records, table = self._columns.key_records[start:stop], self._columns.places[1]
            found |= {name: table.gather(name, records) for name in self._in_table}
        return found

    def let_go(self, start: int, stop: int) -> None:
        """Frees the memory of records that were used."""
        for full in self._own.values():
            self._mapped.let_go(full, start, stop)


def count_records(ledger: Ledger, stream: Stream, until: int) -> int:
    """How many records a stream has up to a step."""
    found = 0
    for shard in ShardRange.of(ledger, 1, until):
        if shard.holds(stream.name):
            start, stop = RowColumns(shard, stream).between(1, until)
            found += stop - start
    return found


def count_rows(ledger: Ledger, stream: Stream, until: int) -> int:
    """How many rows a stream has up to a step."""
    return count_records(ledger, stream, until) * positions(stream)


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
    arrays = stored_arrays(shard, stream)
    if f"{shard.keys_of(stream.name)}/places" in shard.file:  # then their table is looked at
        arrays = {name: arrays[name] for name in shard.codec(stream.name).value_arrays}
    for name, column in arrays.items():
        full = shard.array(stream.name, name)
        entry = shard.file.array(full)
        if entry.shape[:1] != (records,):
            raise CorruptError(
                f"'{shard.path}': the segments of '{stream.name}' do not fit its rows."
            )
        if entry.shape != (records, column.width) or entry.dtype != column.dtype:
            raise CorruptError(
                f"'{shard.path}' has '{full}' as {entry.dtype} of shape "
                f"{entry.shape}; by its codec it is {column.dtype} of {(records, column.width)}."
            )


def places(ledger: Ledger, stream: Stream) -> int:
    """How many rows a sample leaves in a stream each time it is seen, at most: tokens, patches."""
    name = f"{stream.name}/segments"
    each = [shard.file.read(name)[:, 2].max() for shard in ledger.shards if name in shard.file]
    return int(max(each, default=0)) * positions(stream)


def batch_samples(shard: ShardRange) -> dict[int, list[int]]:
    """The samples of each batch of a shard, by the batch's number."""
    samples = shard.samples().tolist()
    found, at = {}, 0
    for number, size in shard.shard.file.read("batches").tolist():
        found[number] = samples[at : at + size]
        at += size
    return found


@dataclass(frozen=True)
class CollectedRows(Fold[list[tuple[Tensor, ...]]]):
    """Something of every row of a stream, chunk behind chunk, in the order of time."""

    stream: Stream
    device: torch.device | str = field(default="cpu", kw_only=True)

    @abstractmethod
    def of(self, chunk: Chunk) -> tuple[Tensor, ...]:
        """What is collected of a chunk's rows; it must not hold on to the chunk's memory."""

    @property
    def streams(self) -> list[str]:
        """One."""
        return [self.stream.name]

    def start(self) -> list[tuple[Tensor, ...]]:
        """No rows."""
        return []

    def fold(
        self, partial: list[tuple[Tensor, ...]], shard: ShardRange
    ) -> list[tuple[Tensor, ...]]:
        """The rows of a shard behind the others."""
        partial.extend(self.of(chunk) for chunk in chunks(shard, self.stream, self.device))
        return partial

    def merge(
        self, one: list[tuple[Tensor, ...]], other: list[tuple[Tensor, ...]]
    ) -> list[tuple[Tensor, ...]]:
        """One behind the other."""
        return one + other
