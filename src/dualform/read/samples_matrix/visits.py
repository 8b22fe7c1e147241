"""The visits of samples to a stream, to be gathered in any order.

A visit is what one use of a layer left of one sample: records that stand side by side. Files are
read, not mapped: to have a page mapped costs more than to copy it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property, reduce
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.layers import expand, positions
from dualform.ledger import Codec, Records, Shard, Stream
from dualform.ledger.codecs import Exact
from dualform.read.engine import ShardRange
from dualform.read.scan import RowColumns, at_least_32_bits, stored_arrays, widths

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
        parts = [RowColumns(s, stream).visits(s.first, s.last) for s in held]
        counts = torch.tensor([part.shape[1] for part in parts], dtype=torch.long)
        self._file = torch.arange(len(parts)).repeat_interleave(counts)
        found = torch.cat([torch.zeros(5, 0, dtype=torch.long), *parts], 1)
        self._start, self.records, self.steps, self.samples, self._use = found
        """Of each visit: its first record, how many it has, its step, its sample and its use."""

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
        at, starts = (counts.cumsum(0) - counts)[order], self._start[ordered]
        columns = (torch.split(c, sizes.tolist()) for c in (at, starts, counts[order]))
        for number, *some in zip(numbers.tolist(), *columns, strict=True):
            shard, places = self._shards[number], [column.numpy() for column in some]
            if shard.codec(self.stream.name) == self._codec:
                for name, into in stored.items():
                    self._fill_array(shard, into, f"{self.stream.name}/{name}", *places)
            else:
                self._fill_decoded(shard, stored, *places)

    def _fill_array(
        self, shard: Shard, into: Tensor, name: str, at: Places, starts: Places, counts: Places
    ) -> None:
        """One array from one file; large visits straight to where they belong."""
        place = shard.file.arrays[name]
        row_bytes = place.row_bytes
        if counts.min() * row_bytes >= LARGE_BYTES:
            each = zip(starts.tolist(), (starts + counts).tolist(), strict=True)
            shard.file.read_into(into, name, zip(at.tolist(), each, strict=True))
            return
        spans, begins = _spans(row_bytes, starts, counts)
        lengths = [stop - start for start, stop in spans]
        (records,) = self._read([((sum(lengths), *place.shape[1:]), place.dtype)])
        shard.file.read_into(
            records, name, zip(accumulate(lengths, initial=0), spans, strict=False)
        )
        _copy(into, at, records, begins, counts)

    def _fill_decoded(
        self, shard: Shard, stored: Mapping[str, Tensor], at: Places, starts: Places, counts: Places
    ) -> None:
        """From a file that another codec keeps, visit by visit."""
        names = stored_arrays(shard, self.stream)
        for to, start, count in zip(at.tolist(), starts.tolist(), counts.tolist(), strict=True):
            arrays = {
                name: shard.file.read(f"{self.stream.name}/{name}", start, start + count)
                for name in names
            }
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
    target[begins] = source if len(source) == len(origins) else source[origins]


def _blocks(rows: Tensor, unit: int) -> NDArray[Any]:
    """(blocks, numbers): so many rows together, without those left at the end."""
    count = len(rows) // unit
    size = unit * math.prod(rows.shape[1:])
    return rows[: count * unit].view(count, size).view(_raw(rows.dtype)).numpy()


def _raw(dtype: torch.dtype) -> torch.dtype:
    """A type of the same size that numpy has too."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
