"""Running through the rows of a stream: in chunks, out of core."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from dualform.layers import expand, positions
from dualform.ledger import Book, Ledger, Shard, Stream, Term
from dualform.ledger.tensors import MappedFile
from dualform.memory.blocks import Sides
from dualform.memory.forms import form_named
from dualform.memory.shared import AnySides, SharedSides
from dualform.memory.summary import Bases, Matrices, SummarySides
from dualform.read.engine import Part, ShardRange
from dualform.read.free_memory import expanded_bytes
from dualform.read.progress import advance
from dualform.read.row_columns import RowColumns, stored_arrays, widths

CHUNK_BYTES = 16 << 20
PIECE_BYTES = 8 << 20
"""How much is read at a time where several threads read."""
SHARED = "shared"
"""What the matrices that rows share are called among arrays."""
COLUMNS = ("steps", "samples", "positions")
"""Columns of `RowColumns` that are brought to where rows are computed with."""


@dataclass(frozen=True)
class Chunk:
    """Some consecutive rows of a stream; what it holds is valid until the next chunk."""

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
    here: Mapping[str, Tensor] = field(default_factory=dict)
    """Columns of its records that were brought to where the rows are."""

    @cached_property
    def steps(self) -> Tensor:
        """(rows,): the number of each row's step."""
        return self._of("steps")

    @cached_property
    def samples(self) -> Tensor:
        """(rows,): the stored id of each row's sample."""
        return self._of("samples")

    @cached_property
    def positions(self) -> Tensor:
        """(rows,): which of its sample's rows it is."""
        first = self._of("positions") * self._each
        if self._each == 1:
            return first
        return first + torch.arange(len(self.keys), device=self.keys.device) % self._each

    def by_step(self) -> list[tuple[int, slice]]:
        """Each step's number, and its rows."""
        steps, counts = torch.unique_consecutive(self.steps, return_counts=True)
        ends = counts.cumsum(0)
        rows = map(slice, (ends - counts).tolist(), ends.tolist())
        return list(zip(steps.tolist(), rows, strict=True))

    def by_use(self) -> Iterator[tuple[int, tuple[int, int], slice]]:
        """Each use's number in its shard, its step and batch, and its rows."""
        uses, counts = torch.unique_consecutive(self._of("uses"), return_counts=True)
        begin = 0
        for use, count in zip(uses.tolist(), counts.tolist(), strict=True):
            yield use, self.columns.step_and_batch(use), slice(begin, begin + count)
            begin += count

    @property
    def which(self) -> Tensor:
        """(rows,): which of the matrices is each row's."""
        uses = self._of("uses")
        return uses - uses[:1]

    @cached_property
    def _each(self) -> int:
        return positions(self.stream)

    def _of(self, name: str) -> Tensor:
        if name in self.here:
            part = self.here[name]
        else:
            stop = self.start + len(self.keys) // self._each
            part = getattr(self.columns, name)[self.start : stop].to(self.keys.device)
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
    the same however long the run is. An engine may have read the records ahead, to the device.
    """
    if not shard.holds(stream.name):
        return
    bases = shard.bases(stream, device)
    ahead = shard.ahead
    for part, arrays in mapped(shard, stream) if ahead is None else ahead.of(shard, stream.name):
        assert isinstance(part, ChunkPart)
        yield part.chunk(arrays, bases, device)
        advance(part.steps)


def chunk_parts(
    shard: ShardRange, stream: Stream, chunk_bytes: int = CHUNK_BYTES, brought: Sequence[str] = ()
) -> Iterator[ChunkPart]:
    """What the chunks of a stream in some steps of a shard are made of.

    Args:
        brought: columns of `RowColumns` that are brought along with the records.
    """
    if not shard.holds(stream.name):
        return
    columns, codec = RowColumns(shard, stream), shard.shard.codec(stream.name)
    begin, end = columns.between(shard.first, shard.last)
    width = codec.bytes_per_row(*widths(stream)) + 8 * len(brought) + expanded_bytes(stream)
    records = max(1, chunk_bytes // max(1, width))
    stored = StoredRecords(shard.shard, stream, columns, with_shared=True)
    uses = None
    if stream.shared and not stream.layout:  # large matrices, of which one is all a chunk can have
        uses = max(1, chunk_bytes // shard.shard.file.arrays[f"{stream.name}/shared"].row_bytes)
    for start, stop in columns.parts(begin, end, records, uses):
        steps = shard.steps * (stop - start) / (end - begin)
        own = {name: getattr(columns, name)[start:stop] for name in brought}
        yield ChunkPart(stream, stored, start, stop, steps, own)


def mapped(shard: ShardRange, stream: Stream) -> Iterator[tuple[ChunkPart, dict[str, Tensor]]]:
    """The parts of a stream in a shard, each with its arrays, which are valid until the next."""
    for part in chunk_parts(shard, stream):
        yield part, part.stored.read(part.start, part.stop)
        part.stored.let_go(part.start, part.stop)


@dataclass(frozen=True)
class ChunkPart(Part):
    """Some consecutive records of a stream in a shard."""

    source: Stream
    stored: StoredRecords
    start: int
    stop: int
    steps: float
    """How many steps of its shard that is."""
    columns: Mapping[str, Tensor]
    """Step, sample and position of its records, where they are to be brought along."""

    @property
    def stream(self) -> str:
        """The stream's name."""
        return self.source.name

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each array: those of the shard, and step, sample and position."""
        columns = {name: (tuple(c.shape), c.dtype) for name, c in self.columns.items()}
        return self.stored.shapes(self.start, self.stop) | columns

    def reads(self, into: Mapping[str, Tensor]) -> Iterator[Callable[[], object]]:
        """Calls that fill the arrays, in any order and side by side."""
        yield from self.stored.reads(into, self.start, self.stop)
        for name, column in self.columns.items():
            yield partial(np.copyto, into[name].numpy(), column.numpy())

    def chunk(
        self, arrays: Mapping[str, Tensor], bases: Bases | None, device: torch.device | str
    ) -> Chunk:
        """The rows, decoded where the arrays are, and on the device."""
        stored = self.stored
        found = stored.codec.decode(arrays, 0, self.stop - self.start)
        rows, errors = expand(self.source, *(side.to(device) for side in found))
        assert errors is not None
        matrices = None
        if self.source.shared:
            matrices = at_least_32_bits(arrays[SHARED]).to(device).reshape(-1, *self.source.shared)
        here = {name: arrays[name] for name in self.columns}
        return Chunk(self.source, rows, errors, stored.columns, self.start, matrices, bases, here)


class StoredRecords:
    """The arrays of a stream in a shard: mapped or read; keys from wherever they lie."""

    def __init__(
        self, shard: Shard, stream: Stream, columns: RowColumns, *, with_shared: bool = False
    ) -> None:
        self.columns, self.codec = columns, shard.codec(stream.name)
        self._file = shard.file
        every = {name: shard.array(stream.name, name) for name in stored_arrays(shard, stream)}
        keys = () if columns.places is None else self.codec.key_arrays
        self._own = {name: full for name, full in every.items() if name not in keys}
        self._in_table = keys
        self._shared = f"{stream.name}/shared" if stream.shared and with_shared else None

    @cached_property
    def _mapped(self) -> MappedFile:
        return self._file.mapped()

    def read(self, start: int, stop: int) -> dict[str, Tensor]:
        """Some records of each array, valid until the next call or until they are let go."""
        found = {n: self._mapped.rows(*rows) for n, rows in self._ranges(start, stop).items()}
        if self.columns.places is not None:
            records, table = self.columns.key_records[start:stop], self.columns.places[1]
            found |= {name: table.gather(name, records) for name in self._in_table}
        return found

    def let_go(self, start: int, stop: int) -> None:
        """Frees the memory of records that were used."""
        for rows in self._ranges(start, stop).values():
            self._mapped.let_go(*rows)

    def shapes(self, start: int, stop: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of what is read of each array."""
        found = {}
        for name, (full, first, last) in self._ranges(start, stop).items():
            place = self._file.array(full)
            found[name] = ((last - first, *place.shape[1:]), place.dtype)
        if self.columns.places is not None:
            table = self.columns.places[1]
            for name in self._in_table:
                width, dtype = table.column(name)
                found[name] = ((stop - start, width), dtype)
        return found

    def reads(
        self, into: Mapping[str, Tensor], start: int, stop: int
    ) -> Iterator[Callable[[], object]]:
        """Calls that fill memory with some records of each array, side by side."""
        for name, (full, first, _) in self._ranges(start, stop).items():
            yield from self._file.reads(into[name], full, first, PIECE_BYTES)
        if self.columns.places is not None:
            records, table = self.columns.key_records[start:stop], self.columns.places[1]
            for name in self._in_table:
                for some in _pieces(into[name]):
                    yield partial(table.gather, name, records[some], into[name][some])

    def _ranges(self, start: int, stop: int) -> dict[str, tuple[str, int, int]]:
        """The arrays that lie in the shard: what each is called, and which of its rows."""
        found = {name: (full, start, stop) for name, full in self._own.items()}
        if self._shared is not None:  # one for each use
            first, last = (int(self.columns.uses[at]) for at in (start, stop - 1))
            found[SHARED] = (self._shared, first, last + 1)
        return found


def _pieces(array: Tensor) -> Iterator[slice]:
    """An array in pieces, so that several are read side by side."""
    each = max(1, PIECE_BYTES // max(1, array[:1].nbytes))
    return (slice(at, at + each) for at in range(0, len(array), each))


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


def at_least_32_bits(matrices: Tensor) -> Tensor:
    """The matrices that rows share, as they are computed with."""
    return matrices.to(torch.promote_types(matrices.dtype, torch.float32))


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
