"""The visits of samples to a stream, to be gathered in any order.

A visit is what one use of a layer left of one sample: records that stand side by side. Files are
read, not mapped: to have a page mapped costs more than to copy it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, reduce
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.layers import expand, positions
from dualform.ledger import Codec, Records, Stream
from dualform.ledger.codecs import Exact
from dualform.ledger.tensors import TensorFile
from dualform.read.engine import ShardRange
from dualform.read.scan import RowColumns, StoredRecords, at_least_32_bits, widths

GATHERED_BYTES = 512 << 20
"""How many bytes of records are gathered at a time, of all streams that a book is made of."""
CACHED_BYTES = 8 << 20
"""How many bytes of rows are made of them at a time, so that a processor's cache holds them."""
LARGE_BYTES = 16 << 10
"""Visits of so many bytes are read one by one: copying them costs more than asking for each."""
GAP_BYTES = 16 << 10
"""Up to how many bytes between two visits are read along: to ask once more costs as much."""
READ_BYTES = 4 << 20
"""How many bytes of a file are read at a time, so that a processor's cache holds them."""
ALIGNED = 64

Arrays: TypeAlias = Sequence[tuple[Sequence[int], torch.dtype]]
"""The shapes and types of some arrays."""

Places = NDArray[np.int64]


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
        needed = sum(_places(arrays))
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
        self._read = Reused()
        held = [shard for shard in shards if shard.holds(stream.name)]
        self._shards = [shard.shard for shard in held]
        self.bases = held[0].bases(stream) if held else None
        """What records are kept in, where they are summaries."""
        self._codec = _common_codec([shard.codec(stream.name) for shard in self._shards])
        """How records are held once they are gathered."""
        self._arrays = self._codec.arrays(*widths(stream))
        columns = self._arrays.values()
        self._record_bytes = sum(column.width * column.dtype.itemsize for column in columns)
        self._columns = [RowColumns(shard, stream) for shard in held]
        self._uses = [
            own.uses_between(shard.first, shard.last)
            for own, shard in zip(self._columns, held, strict=True)
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
        for begin, own, uses in zip(begins, self._columns, self._uses, strict=False):
            yield begin, uses[4].repeat_interleave(uses[1]), own.samples_of(uses[5])

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
        return self._record_bytes * self._most

    @property
    def nbytes(self) -> int:
        """How many bytes the records of all visits have."""
        return self._record_bytes * int(((self._ends - self._begins) * self._counts).sum())

    @cached_property
    def cached(self) -> int:
        """How many visits are made rows at a time."""
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

    def load(
        self, chosen: Tensor, with_keys: bool = True, room: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The arrays of some visits' records, one visit after the other; keys only if needed.

        `room` is memory to put them into, as many bytes as `room_for` says.
        """
        arrays = self._arrays
        if not (with_keys or self.stream.layout):
            arrays = {name: arrays[name] for name in self._codec.value_arrays}
        counts = self.records(chosen)
        count = int(counts.sum())
        shapes = [((count, column.width), column.dtype) for column in arrays.values()]
        parts = Reused()(shapes) if room is None else carved(room, shapes)
        stored = dict(zip(arrays, parts, strict=True))
        self._fill(stored, chosen, counts)
        return stored

    def room_for(self, visits: int) -> int:
        """How many bytes it takes to load so many visits, at most."""
        return visits * self.longest + len(self._arrays) * ALIGNED

    def made(self, stored: Mapping[str, Tensor], begin: int, end: int) -> tuple[Tensor, Tensor]:
        """The rows, keys and values, of some of the records that were loaded."""
        rows, errors = expand(self.stream, *self._codec.decode(stored, begin, end))
        assert errors is not None
        return rows, errors

    def matrices(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The matrices (count, height, width) of some visits, and which is each visit's."""
        found, which = torch.unique(self._use_of(chosen), return_inverse=True)
        name, shape = f"{self.stream.name}/shared", self.stream.shared
        shards = torch.searchsorted(self._shard_ends, self._begins[found], right=True) - 1
        places = zip(shards.tolist(), self._number[found].tolist(), strict=True)
        stored = [self._shards[at].file.read(name, use, use + 1) for at, use in places]
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

    def _fill(self, stored: Mapping[str, Tensor], chosen: Tensor, counts: Tensor) -> None:
        """The records of some visits, one visit after the other; shard by shard."""
        ordered, order = sorted_pairs(chosen)
        at, counts = (counts.cumsum(0) - counts)[order], counts[order]
        cuts = torch.searchsorted(ordered, self._shard_ends).tolist()
        for number, (begin, end) in enumerate(pairwise(cuts)):
            if begin == end:
                continue
            some, visits = slice(begin, end), ordered[begin:end]
            uses = self._use_of(visits)
            within = visits - self._begins[uses]
            starts = self._start[uses] + within * counts[some]
            shard, own = self._shards[number], (at[some], starts, counts[some])
            if shard.codec(self.stream.name) != self._codec:
                self._fill_decoded(number, stored, *own)
                continue
            places = self._columns[number].places
            keys = starts if places is None else places[0][self._first[uses] + within]
            for name, into in stored.items():
                for file, full, which, begins in self._places(number, name, starts, keys):
                    columns = (own[0][which], begins, own[2][which])
                    self._fill_array(file, into, full, *(column.numpy() for column in columns))

    def _places(
        self, number: int, name: str, starts: Tensor, keys: Tensor
    ) -> Iterator[tuple[TensorFile, str, Tensor | slice, Tensor]]:
        """The files that have an array of some visits: what it is called, which, and where."""
        shard, places = self._shards[number], self._columns[number].places
        full = shard.array(self.stream.name, name)
        if places is None or name in self._codec.value_arrays:
            yield shard.file, full, slice(None), starts
            return
        for other, which, begins in places[1].parts(keys):
            begins, order = sorted_pairs(begins)
            yield other.file, full, which[order], begins

    def _fill_array(
        self, file: TensorFile, into: Tensor, name: str, at: Places, starts: Places, counts: Places
    ) -> None:
        """One array from one file; large visits straight to where they belong."""
        place = file.array(name)
        row_bytes = place.row_bytes
        if counts.min() * row_bytes >= LARGE_BYTES:
            each = zip(starts.tolist(), (starts + counts).tolist(), strict=True)
            file.read_into(into, name, zip(at.tolist(), each, strict=True))
            return
        cuts = np.flatnonzero(np.diff(starts * row_bytes // READ_BYTES)) + 1
        for begin, end in pairwise([0, *cuts.tolist(), len(starts)]):
            some = slice(begin, end)
            spans, begins = _spans(row_bytes, starts[some], counts[some])
            lengths = [stop - start for start, stop in spans]
            (records,) = self._read([((sum(lengths), *place.shape[1:]), place.dtype)])
            file.read_into(records, name, zip(accumulate(lengths, initial=0), spans, strict=False))
            _copy(into, at[some], records, begins, counts[some])

    def _fill_decoded(
        self, number: int, stored: Mapping[str, Tensor], at: Tensor, starts: Tensor, counts: Tensor
    ) -> None:
        """From a file that another codec keeps, visit by visit."""
        shard = self._shards[number]
        records = StoredRecords(shard, self.stream, self._columns[number])
        for to, start, count in zip(at.tolist(), starts.tolist(), counts.tolist(), strict=True):
            arrays = records.read(start, start + count)
            rows = shard.codec(self.stream.name).decode(arrays, 0, count)
            for name, encoded in self._codec.encode(rows).items():
                if name in stored:
                    stored[name][to : to + count] = encoded


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


def _spans(row_bytes: int, starts: Places, counts: Places) -> tuple[list[tuple[int, int]], Places]:
    """What to read of some visits, in order: ranges of records; and where visits then begin."""
    ends = starts + counts
    gaps = starts[1:] - ends[:-1]
    cuts = np.flatnonzero(gaps * row_bytes > GAP_BYTES)
    first, last = [0, *(cuts + 1).tolist()], [*cuts.tolist(), len(starts) - 1]
    spans = list(zip(starts[first].tolist(), ends[last].tolist(), strict=True))
    skipped = np.zeros_like(starts)
    skipped[cuts + 1] = gaps[cuts]
    return spans, starts - starts[0] - skipped.cumsum()


def _copy(into: Tensor, at: Places, records: Tensor, places: Places, counts: Places) -> None:
    """`into[at + i] = records[places + i]` for i up to each count; in blocks as large as can be."""
    unit = int(np.gcd.reduce(counts))
    if unit > 1:
        unit = int(np.gcd.reduce(np.concatenate([at, places, [unit]])))
    target, source = _blocks(into, unit), _blocks(records, unit)
    if (counts == unit).all():
        begins, origins = at // unit, places // unit
    else:
        counts = counts // unit
        within = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
        begins, origins = (p.repeat(counts) + within for p in (at // unit, places // unit))
    target[begins] = source if np.array_equal(origins, np.arange(len(source))) else source[origins]


def _blocks(rows: Tensor, unit: int) -> NDArray[Any]:
    """(blocks, numbers): so many rows together, without those left at the end."""
    count = len(rows) // unit
    size = unit * math.prod(rows.shape[1:])
    return rows[: count * unit].view(count, size).view(_raw(rows.dtype)).numpy()


def _raw(dtype: torch.dtype) -> torch.dtype:
    """A type of the same size that numpy has too."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
