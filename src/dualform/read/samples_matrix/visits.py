"""The visits of samples to a stream, to be gathered in any order.

A visit is what one use of a layer left of one sample: records that stand side by side. Files are
read, not mapped: to have a page mapped costs more than to copy it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, reduce
from itertools import accumulate
from typing import Any

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
"""How many bytes of records are gathered at a time."""
CACHED_BYTES = 8 << 20
"""How many bytes of rows are made of them at a time, so that a processor's cache holds them."""
LARGE_BYTES = 16 << 10
"""Visits of so many bytes are read one by one: copying them costs more than asking for each."""
GAP_BYTES = 16 << 10
"""Up to how many bytes between two visits are read along: to ask once more costs as much."""
ALIGNED = 64

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

    def __call__(self, arrays: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
        """Arrays of these shapes; what was there before is lost."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in arrays]
        places = [-(-size // ALIGNED) * ALIGNED for size in sizes]
        if len(self._bytes) < sum(places):
            self.clear()  # before more is taken
            self._bytes = torch.empty(max(self.least, sum(places)), dtype=torch.uint8)
        parts = torch.split(self._bytes[: sum(places)], places)
        made = zip(parts, sizes, arrays, strict=True)
        return [part[:size].view(dtype).view(*shape) for part, size, (shape, dtype) in made]

    def clear(self) -> None:
        """Gives everything back."""
        self._bytes = torch.empty(0, dtype=torch.uint8)


class Visits:
    """All visits of samples to a stream in some shards, in the order given."""

    def __init__(
        self, shards: Sequence[ShardRange], stream: Stream, memory: Reused | None = None
    ) -> None:
        self.stream, self._each = stream, positions(stream)
        self._gathered = memory or Reused()
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
        parts = [
            own.visits(shard.first, shard.last)
            for own, shard in zip(self._columns, held, strict=True)
        ]
        counts = torch.tensor([part.shape[1] for part in parts], dtype=torch.long)
        self._file = torch.arange(len(parts)).repeat_interleave(counts)
        found = torch.cat([torch.zeros(6, 0, dtype=torch.long), *parts], 1)
        self._start, self.records, self.steps, self.samples, self._use, self._keys = found
        """Of each visit: its first record, how many it has, its step, sample, use and keys."""

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def rows(self) -> Tensor:
        """(visits,): how many rows each has."""
        return torch.mul(self.records, self._each)

    @cached_property
    def together(self) -> int:
        """How many visits are gathered at a time."""
        return max(1, GATHERED_BYTES // max(1, self._record_bytes * self._longest))

    @property
    def nbytes(self) -> int:
        """How many bytes those have, at most."""
        records = min(int(self.records.sum()), self.together * self._longest)
        return records * self._record_bytes + 2 * ALIGNED

    @cached_property
    def cached(self) -> int:
        """How many of them are made rows at a time."""
        columns = self._arrays.items()
        record = {
            name: torch.zeros(1, column.width, dtype=column.dtype) for name, column in columns
        }
        made = expand(self.stream, *self._codec.decode(record, 0, 1))
        each = sum(rows.nbytes for rows in made if rows is not None)
        shared = math.prod(self.stream.shared) * 4 if self.stream.shared else 0
        return max(1, CACHED_BYTES // max(1, each * self._longest + shared))

    @property
    def _longest(self) -> int:
        return int(self.records.max()) if len(self) else 1

    def load(self, chosen: Tensor, with_keys: bool = True) -> dict[str, Tensor]:
        """The arrays of some visits' records, one visit after the other; keys only if needed."""
        arrays = self._arrays
        if not (with_keys or self.stream.layout):
            arrays = {name: arrays[name] for name in self._codec.value_arrays}
        count = int(self.records[chosen].sum())
        parts = self._gathered(
            [((count, column.width), column.dtype) for column in arrays.values()]
        )
        stored = dict(zip(arrays, parts, strict=True))
        self._fill(stored, chosen)
        return stored

    def made(self, stored: Mapping[str, Tensor], begin: int, end: int) -> tuple[Tensor, Tensor]:
        """The rows, keys and values, of some of the records that were loaded."""
        rows, errors = expand(self.stream, *self._codec.decode(stored, begin, end))
        assert errors is not None
        return rows, errors

    def matrices(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The matrices (count, height, width) of some visits, and which is each visit's."""
        pairs = torch.stack([self._file[chosen], self._use[chosen]])
        found, which = torch.unique(pairs, dim=1, return_inverse=True)
        name, shape = f"{self.stream.name}/shared", self.stream.shared
        stored = [self._shards[at].file.read(name, use, use + 1) for at, use in found.T.tolist()]
        return at_least_32_bits(torch.cat(stored)).reshape(-1, *shape), which

    def of_rows(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Step, sample and position of each row of some visits."""
        counts = self.rows[chosen]
        begins = counts.cumsum(0) - counts
        steps, samples, begin = (
            column.repeat_interleave(counts)
            for column in (self.steps[chosen], self.samples[chosen], begins)
        )
        return steps, samples, torch.arange(len(begin)) - begin

    def _fill(self, stored: Mapping[str, Tensor], chosen: Tensor) -> None:
        """The records of some visits, one visit after the other."""
        counts, (ordered, order) = self.records[chosen], chosen.sort()
        numbers, sizes = torch.unique_consecutive(self._file[ordered], return_counts=True)
        at = (counts.cumsum(0) - counts)[order]
        every = (at, self._start[ordered], self._keys[ordered], counts[order])
        columns = (torch.split(column, sizes.tolist()) for column in every)
        for number, *some in zip(numbers.tolist(), *columns, strict=True):
            shard, (own, starts, keys, lengths) = self._shards[number], some
            if shard.codec(self.stream.name) != self._codec:
                self._fill_decoded(number, stored, own, starts, lengths)
                continue
            for name, into in stored.items():
                for file, full, which, begins in self._places(number, name, starts, keys):
                    places = (own[which], begins, lengths[which])
                    self._fill_array(file, into, full, *(column.numpy() for column in places))

    def _places(
        self, number: int, name: str, starts: Tensor, keys: Tensor
    ) -> Iterator[tuple[TensorFile, str, Tensor, Tensor]]:
        """The files that have an array of some visits: what it is called, which, and where."""
        shard, places = self._shards[number], self._columns[number].places
        full = shard.array(self.stream.name, name)
        if places is None or name in self._codec.value_arrays:
            yield shard.file, full, torch.arange(len(starts)), starts
            return
        for other, which, begins in places[1].parts(keys):
            begins, order = begins.sort()
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
        spans, begins = _spans(row_bytes, starts, counts)
        lengths = [stop - start for start, stop in spans]
        (records,) = self._read([((sum(lengths), *place.shape[1:]), place.dtype)])
        file.read_into(records, name, zip(accumulate(lengths, initial=0), spans, strict=False))
        _copy(into, at, records, begins, counts)

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
    unit = int(np.gcd.reduce(np.concatenate([at, places, counts])))
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
