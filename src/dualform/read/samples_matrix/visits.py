"""The visits of samples to a stream: which there are, and their records, in order or one by one.

A visit is what one use of a layer left of one sample: records that stand side by side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, reduce
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from dualform.layers import expand, positions
from dualform.ledger import Codec, Records, Stream
from dualform.ledger.codecs import Column, Exact
from dualform.read.engine import ShardRange
from dualform.read.row_columns import RowColumns, widths
from dualform.read.scan import StoredRecords, at_least_32_bits

GATHERED_BYTES = 256 << 20
"""How many bytes of records are gathered at a time, of all streams that a book is made of."""
CACHED_BYTES = 8 << 20
"""How many bytes of rows are made of them at a time, so that a processor's cache holds them."""
LARGE_BYTES = 16 << 10
"""Visits of so many bytes are read one by one: to ask for each costs less than to copy it."""
WINDOW_BYTES = 4 << 20
"""How many bytes of records are handed out at a time in the order of time."""
ALIGNED = 64

Arrays: TypeAlias = Sequence[tuple[Sequence[int], torch.dtype]]
"""The shapes and types of some arrays."""


class Reused:
    """Memory that is used again: to allocate it would cost more than to fill it.

    >>> memory = Reused()
    >>> one, two = memory([((2, 3), torch.float32), ((4,), torch.int64)])
    >>> again, = memory([((3, 2), torch.float32)])
    >>> one.shape, two.dtype, one.data_ptr() == again.data_ptr()
    (torch.Size([2, 3]), torch.int64, True)
    """

    def __init__(self) -> None:
        self.least = 0
        """How many bytes are taken at first, so that more need not be taken later."""
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def __call__(self, arrays: Arrays) -> list[Tensor]:
        """Arrays of these shapes; what was there before is lost."""
        needed = room_of(arrays)
        if len(self._bytes) < needed:
            self.clear()  # before more is taken
            self._bytes = torch.empty(max(self.least, needed), dtype=torch.uint8)
        return carved(self._bytes, arrays)

    def clear(self) -> None:
        """Gives everything back."""
        self._bytes = torch.empty(0, dtype=torch.uint8)


def carved(memory: Tensor, arrays: Arrays) -> list[Tensor]:
    """Arrays of these shapes in some bytes, one behind the other.

    >>> carved(torch.zeros(128, dtype=torch.uint8), [((2,), torch.int64), ((1, 3), torch.int8)])
    [tensor([0, 0]), tensor([[0, 0, 0]], dtype=torch.int8)]
    """
    places = _places(arrays)
    parts = torch.split(memory[: sum(places)], places)
    made = zip(parts, arrays, strict=True)
    return [part[: _size(array)].view(array[1]).view(*array[0]) for part, array in made]


def room_of(arrays: Arrays) -> int:
    """How many bytes it takes to carve them."""
    return sum(_places(arrays))


def _places(arrays: Arrays) -> list[int]:
    """How many bytes each takes, so that the next is aligned."""
    return [-(-_size(array) // ALIGNED) * ALIGNED for array in arrays]


def _size(array: tuple[Sequence[int], torch.dtype]) -> int:
    return math.prod(array[0]) * array[1].itemsize


class Visits:
    """All visits of samples to a stream in some shards, numbered in the order of time.

    What is held of them is a table of uses, each of which has many: not a number for each visit.
    """

    def __init__(self, shards: Sequence[ShardRange], stream: Stream) -> None:
        self.stream, self._each = stream, positions(stream)
        self._shards = [shard for shard in shards if shard.holds(stream.name)]
        self.bases = self._shards[0].bases(stream) if self._shards else None
        """What records are kept in, where they are summaries."""
        self._codec = _common_codec([self._codec_of(shard) for shard in self._shards])
        """How records are held once they are gathered."""
        self._arrays = self._codec.arrays(*widths(stream))
        self.record_bytes = self._codec.bytes_per_row(*widths(stream))
        """How many bytes a record has."""
        self._uses = [
            RowColumns(shard, stream).uses_between(shard.first, shard.last)
            for shard in self._shards
        ]
        """(6, uses) of each shard: see `RowColumns.uses_between`."""
        table = torch.cat([torch.zeros(6, 0, dtype=torch.long), *self._uses], 1)
        self._first, sizes, self._start, self._counts, self._steps, self._number = table
        self._ends = sizes.cumsum(0)
        """(uses,): how many visits there are up to the end of each."""
        self._begins = self._ends - sizes
        uses = torch.tensor([0, *(part.shape[1] for part in self._uses)]).cumsum(0)
        self._shard_ends = torch.cat([self._ends.new_zeros(1), self._ends])[uses]
        """(shards + 1,): how many visits there are up to the begin of each, and in the end."""

    def __len__(self) -> int:
        return int(self._shard_ends[-1])

    def by_shard(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The number of each shard's first visit, and the steps and samples of its visits."""
        begins = self._shard_ends.tolist()
        for begin, shard, uses in zip(begins, self._shards, self._uses, strict=False):
            samples = RowColumns(shard, self.stream).samples_of(uses[5])
            yield begin, uses[4].repeat_interleave(uses[1]), samples

    def steps(self, chosen: Tensor) -> Tensor:
        """(chosen,): the step of some visits."""
        found: Tensor = self._steps[self._use_of(chosen)]
        return found

    def samples(self, chosen: Tensor) -> Tensor:
        """(chosen,): the sample of some visits."""
        return self._samples[chosen]

    def records(self, chosen: Tensor) -> Tensor:
        """(chosen,): how many records some visits have."""
        if self._alike:
            return torch.full_like(chosen, self._most)
        found: Tensor = self._counts[self._use_of(chosen)]
        return found

    def rows(self, chosen: Tensor) -> Tensor:
        """(chosen,): how many rows some visits have."""
        return self.records(chosen) * self._each

    @cached_property
    def _samples(self) -> Tensor:
        """(visits,): each visit's sample, made where somebody asks out of order."""
        every = [samples for _, _, samples in self.by_shard()]
        return torch.cat([torch.empty(0, dtype=torch.long), *every])

    def _use_of(self, chosen: Tensor) -> Tensor:
        return torch.searchsorted(self._ends, chosen, right=True)

    @property
    def longest(self) -> int:
        """The most bytes that the records of a visit have."""
        return self.record_bytes * self._most

    @property
    def nbytes(self) -> int:
        """How many bytes the records of all visits have."""
        return self.record_bytes * int(((self._ends - self._begins) * self._counts).sum())

    @property
    def large(self) -> bool:
        """Whether visits are so large that each is read by itself."""
        return self.nbytes >= LARGE_BYTES * max(1, len(self))

    @cached_property
    def cached(self) -> int:
        """How many visits are made rows at a time."""
        if not len(self):
            return 1
        columns = self._arrays.items()
        record = {
            name: torch.zeros(1, column.width, dtype=column.dtype) for name, column in columns
        }
        made = expand(self.stream, *self._codec.decode(record, 0, 1))
        each = sum(rows.nbytes for rows in made if rows is not None)
        shared = math.prod(self.stream.shared) * 4 if self.stream.shared else 0
        return max(1, CACHED_BYTES // max(1, each * self._most + shared))

    @cached_property
    def _most(self) -> int:
        """How many records a visit has at most."""
        return int(self._counts.max()) if len(self._counts) else 1

    @cached_property
    def _alike(self) -> bool:
        """Whether all visits have as many records."""
        return bool((self._counts == self._most).all())

    def arrays(self, with_keys: bool = True) -> dict[str, Column]:
        """What a record takes of each array, as visits are gathered; of keys only if needed."""
        if with_keys or self.stream.layout:
            return dict(self._arrays)
        return {name: self._arrays[name] for name in self._codec.value_arrays}

    def in_time(self) -> Iterator[tuple[slice, Tensor, dict[str, Tensor]]]:
        """All records in the order of time, those of some visits after those of others.

        Which visits, how many records each has, and their arrays, which are valid until the next.
        """
        together = max(1, WINDOW_BYTES // self.record_bytes)
        for shard, uses, visit in zip(self._shards, self._uses, self._shard_ends, strict=False):
            if not uses.numel():
                continue
            stored = StoredRecords(shard.shard, self.stream, RowColumns(shard, self.stream))
            counts = uses[3].repeat_interleave(uses[1])
            ends = counts.cumsum(0)
            total, start = int(ends[-1]), int(uses[2, 0])
            bounds = torch.arange(0, total + together, together).clamp_max_(total)
            cuts = torch.unique(torch.searchsorted(ends, bounds, right=True)).tolist()
            for first, last in pairwise(cuts if cuts[0] == 0 else [0, *cuts]):
                begin, end = (start + int(ends[at - 1]) if at else start for at in (first, last))
                arrays = stored.read(begin, end)
                codec = self._codec_of(shard)
                if codec != self._codec:
                    arrays = self._codec.encode(codec.decode(arrays, 0, end - begin))
                yield slice(int(visit) + first, int(visit) + last), counts[first:last], arrays
                stored.let_go(begin, end)

    def load(self, chosen: Tensor, arrays: Mapping[str, Column], room: Tensor) -> dict[str, Tensor]:
        """Some arrays of some visits' records, one visit after the other; each is read by itself.

        `room` is memory to put them into, as many bytes as `room_for` says.
        """
        count = int(self.records(chosen).sum())
        shapes = [((count, column.width), column.dtype) for column in arrays.values()]
        stored = dict(zip(arrays, carved(room, shapes), strict=True))
        self._fill(stored, chosen)
        return stored

    def room_for(self, visits: int) -> int:
        """How many bytes it takes to load so many visits, at most."""
        return visits * self.longest + len(self._arrays) * ALIGNED

    def made(self, stored: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The rows, keys and values, of some records."""
        count = len(next(iter(stored.values())))
        rows, errors = expand(self.stream, *self._codec.decode(stored, 0, count))
        assert errors is not None
        return rows, errors

    def matrices(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The matrices (count, height, width) of some visits, and which is each visit's."""
        found, which = torch.unique(self._use_of(chosen), return_inverse=True)
        name, shape = f"{self.stream.name}/shared", self.stream.shared
        shards = torch.searchsorted(self._shard_ends, self._begins[found], right=True) - 1
        places = zip(shards.tolist(), self._number[found].tolist(), strict=True)
        stored = [self._shards[at].shard.file.read(name, use, use + 1) for at, use in places]
        return at_least_32_bits(torch.cat(stored)).reshape(-1, *shape), which

    def of_rows(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Step, sample and position of each row of some visits."""
        counts = self.rows(chosen)
        begins = counts.cumsum(0) - counts
        steps, samples, begin = (
            column.repeat_interleave(counts)
            for column in (self.steps(chosen), self.samples(chosen), begins)
        )
        return steps, samples, torch.arange(len(begin)) - begin

    def _fill(self, stored: Mapping[str, Tensor], chosen: Tensor) -> None:
        """The records of some visits, one visit after the other; shard by shard."""
        counts = self.records(chosen)
        visits, order = sorted_pairs(chosen)
        at, counts = (counts.cumsum(0) - counts)[order], counts[order]
        uses = self._use_of(visits)
        within = visits - self._begins[uses]
        starts, places = self._start[uses] + within * counts, self._first[uses] + within
        cuts = torch.searchsorted(visits, self._shard_ends).tolist()
        for shard, (begin, end) in zip(self._shards, pairwise(cuts), strict=True):
            if begin < end:
                own = (column[begin:end] for column in (at, starts, counts, places))
                self._fill_from(shard, stored, *own)

    def _fill_from(
        self,
        shard: ShardRange,
        stored: Mapping[str, Tensor],
        at: Tensor,
        starts: Tensor,
        counts: Tensor,
        places: Tensor,
    ) -> None:
        """Visits of one shard: where they belong, their records, and their places in the shard."""
        columns = RowColumns(shard, self.stream)
        if self._codec_of(shard) != self._codec:
            self._fill_decoded(shard, columns, stored, at, starts, counts)
            return
        for name, into in stored.items():
            full = shard.shard.array(self.stream.name, name)
            parts = iter([(shard.shard, torch.arange(len(starts)), starts)])
            if columns.places is not None and name not in self._codec.value_arrays:
                parts = columns.places[1].parts(columns.places[0][places])
            for holder, which, begins in parts:
                begins, order = sorted_pairs(begins)
                which = which[order]
                spans = zip(begins.tolist(), (begins + counts[which]).tolist(), strict=True)
                into_at = zip(at[which].tolist(), spans, strict=True)
                holder.file.read_into(into, full, into_at)

    def _fill_decoded(
        self,
        shard: ShardRange,
        columns: RowColumns,
        stored: Mapping[str, Tensor],
        at: Tensor,
        starts: Tensor,
        counts: Tensor,
    ) -> None:
        """From a file that another codec keeps, visit by visit."""
        records = StoredRecords(shard.shard, self.stream, columns)
        for to, start, count in zip(at.tolist(), starts.tolist(), counts.tolist(), strict=True):
            arrays = records.read(start, start + count)
            rows = self._codec_of(shard).decode(arrays, 0, count)
            for name, encoded in self._codec.encode(rows).items():
                if name in stored:
                    stored[name][to : to + count] = encoded

    def _codec_of(self, shard: ShardRange) -> Codec:
        return shard.shard.codec(self.stream.name)


def sorted_pairs(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of 0 and more in order, and where each was; equal ones in the order they came.

    Both are packed into one number, because numpy sorts numbers much faster than it says where
    they were.

    >>> sorted_pairs(torch.tensor([7, 2, 7]))
    (tensor([2, 7, 7]), tensor([1, 0, 2]))
    """
    bits = len(numbers).bit_length()
    packed = (numbers << bits) | torch.arange(len(numbers))
    packed.numpy().sort()
    return packed >> bits, packed & ((1 << bits) - 1)


def _common_codec(codecs: Sequence[Codec]) -> Codec:
    """What all visits are gathered in: the codec they share, or else the rows as they decode."""
    if not codecs:
        return Exact()
    if len(set(codecs)) == 1:
        return codecs[0]
    sides = [[codec.recorded[side] for codec in codecs] for side in (0, 1)]
    keys, values = (reduce(torch.promote_types, [torch.float32, *side]) for side in sides)
    places = not any(dtype.is_floating_point for dtype in sides[0])
    empty = Records(
        torch.empty(0, dtype=torch.int64 if places else keys), torch.empty(0).to(values)
    )
    return Exact.for_records(empty)
