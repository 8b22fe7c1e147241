"""The records of visits, gathered in another order than that of time, part by part.

A part is what fits into memory of the visits in that order; they lie all over the run. Large visits
are read one by one. Of small ones that would cost as much as to read all that lies between them,
for each part anew. So one scan of the run puts them into *buckets*, one for each part, each in the
order of time. A bucket is then read as a whole, and visits are picked from it in memory. A single
bucket stays in memory; several are parts of one temporary file.
"""

from __future__ import annotations

import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from errno import ENOSPC
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from dualform.errors import ReadingError
from dualform.ledger.codecs import Column
from dualform.ledger.tensors import pieces, raw
from dualform.read.samples_matrix.visits import (
    Arrays,
    Reused,
    Visits,
    carved,
    room_of,
    sorted_pairs,
)


class Gathered(ABC):
    """The records of some visits, part by part."""

    @abstractmethod
    def load(self, number: int, chosen: Tensor) -> None:
        """Has a part in memory: which one, and its visits."""

    @abstractmethod
    def records(self, begin: int, end: int) -> dict[str, Tensor]:
        """The arrays of some of its visits' records, one visit after the other.

        They are valid until the next are asked for.
        """


class OneByOne(Gathered):
    """Each visit is read from where it lies."""

    def __init__(self, visits: Visits, arrays: Mapping[str, Column], room: Tensor) -> None:
        self._visits, self._arrays, self._room = visits, arrays, room
        self._stored: dict[str, Tensor] = {}
        self._begins: list[int] = []

    def load(self, number: int, chosen: Tensor) -> None:
        """Reads the part's visits."""
        ends = self._visits.records(chosen).cumsum(0)
        self._begins = [0, *ends.tolist()]
        self._stored = self._visits.load(chosen, self._arrays, self._room)

    def records(self, begin: int, end: int) -> dict[str, Tensor]:
        """A part of what was read."""
        some = slice(self._begins[begin], self._begins[end])
        return {name: array[some] for name, array in self._stored.items()}


class Buckets(Gathered):
    """One scan puts the records of each part's visits side by side.

    Args:
        parts: the visits of each part.
        room: memory that holds any of the parts.
        opened: what closes the temporary file.
        report: is told how many visits were put where they belong.
    """

    def __init__(
        self,
        visits: Visits,
        parts: Iterable[Tensor],
        arrays: Mapping[str, Column],
        room: Tensor,
        opened: ExitStack,
        report: Callable[[float], None],
    ) -> None:
        self._visits, self._arrays, self._room = visits, arrays, room
        self._picked = Reused()
        self._stored: dict[str, Tensor] = {}
        """The arrays of the bucket that is loaded."""
        self._begins = self._counts = torch.empty(0, dtype=torch.long)
        """(visits,): where the records of each of its visits begin, and how many it has."""
        bucket_of = torch.full((len(visits),), -1, dtype=torch.int32)
        counts = []
        for number, chosen in enumerate(parts):
            bucket_of[chosen] = number
            counts.append(int(visits.records(chosen).sum()))
        self._shapes = [self._arrays_of(count) for count in counts]
        """Of each bucket."""
        self._starts = list(accumulate(map(room_of, self._shapes), initial=0))
        """Where each begins in the file, and where the last ends."""
        self._disk: TemporaryDisk | None = None
        if len(counts) > 1:
            disk = TemporaryDisk(self._starts[-1], f"the records of '{visits.stream.name}'")
            self._disk = opened.enter_context(disk)
        self._spread(bucket_of, report)

    def load(self, number: int, chosen: Tensor) -> None:
        """Reads a bucket as a whole, and finds its visits in it."""
        if self._disk is not None:
            start, end = self._starts[number : number + 2]
            self._disk.read(start, self._room[: end - start])
        self._stored = dict(
            zip(self._arrays, carved(self._room, self._shapes[number]), strict=True)
        )
        _, in_time = sorted_pairs(chosen)
        counts = self._visits.records(chosen[in_time])
        self._begins = torch.empty_like(chosen)
        self._begins[in_time] = counts.cumsum(0) - counts
        self._counts = self._visits.records(chosen)

    def records(self, begin: int, end: int) -> dict[str, Tensor]:
        """Picked from the bucket."""
        some = slice(begin, end)
        return self._pick(self._stored, self._begins[some], self._counts[some])

    def _spread(self, bucket_of: Tensor, report: Callable[[float], None]) -> None:
        """Puts the records of all visits where they belong, in the order of time."""
        filled = [0] * len(self._shapes)
        for seen, counts, arrays in self._visits.in_time():
            buckets, which = sorted_pairs(bucket_of[seen].long() + 1)
            first = int(torch.searchsorted(buckets, 1))  # those before count for nothing
            buckets, which = buckets[first:] - 1, which[first:]
            begins, counts = (counts.cumsum(0) - counts)[which], counts[which]
            picked = self._pick(arrays, begins, counts)
            cuts = torch.searchsorted(buckets, torch.arange(len(filled) + 1))
            ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])[cuts].tolist()
            for number, (begin, end) in enumerate(pairwise(ends)):
                if begin < end:
                    rows = [array[begin:end] for array in picked.values()]
                    self._put(number, filled[number], rows)
                    filled[number] += end - begin
            report(len(which))

    def _put(self, number: int, at: int, arrays: Sequence[Tensor]) -> None:
        """Some records into a bucket, from one of its records on."""
        if self._disk is None:
            for into, rows in zip(carved(self._room, self._shapes[number]), arrays, strict=True):
                into[at : at + len(rows)] = rows
            return
        start = self._starts[number]
        for shape, rows in zip(self._shapes[number], arrays, strict=True):
            each = rows[:1].nbytes
            self._disk.write(start + at * each, rows)
            start += room_of([shape])

    def _pick(
        self, stored: Mapping[str, Tensor], begins: Tensor, counts: Tensor
    ) -> dict[str, Tensor]:
        """The arrays of so many records each, from where they begin."""
        records, total = begins, int(counts.sum())
        if total != len(begins):
            skipped = begins - (counts.cumsum(0) - counts)
            records = torch.arange(total) + skipped.repeat_interleave(counts)
        found = self._picked(self._arrays_of(total))
        for name, into in zip(self._arrays, found, strict=True):
            pieces(stored[name]).take(records.numpy(), out=pieces(into), mode="clip")
        return dict(zip(self._arrays, found, strict=True))

    def _arrays_of(self, records: int) -> Arrays:
        return [((records, column.width), column.dtype) for column in self._arrays.values()]


class TemporaryDisk:
    """So many bytes in a temporary file, which is gone once it is closed or the process ends.

    >>> with TemporaryDisk(3, "three numbers") as disk:
    ...     disk.write(1, torch.tensor([7, 8], dtype=torch.uint8))
    ...     disk.read(0, found := torch.ones(3, dtype=torch.uint8))
    >>> found
    tensor([0, 7, 8], dtype=torch.uint8)
    """

    def __init__(self, needed: int, what: str) -> None:
        self._needed, self._what, self._folder = needed, what, tempfile.gettempdir()

    def __enter__(self) -> TemporaryDisk:
        if self._needed > shutil.disk_usage(self._folder).free:
            raise self._full()
        self._file = tempfile.TemporaryFile(buffering=0, prefix="dualform-")
        self._file.truncate(self._needed)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, at: int, rows: Tensor) -> None:
        """Bytes from a place on."""
        left = raw(rows)
        self._file.seek(at)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            if error.errno != ENOSPC:
                raise
            raise self._full() from error

    def read(self, at: int, into: Tensor) -> None:
        """Bytes from a place on."""
        left = raw(into)
        self._file.seek(at)
        while left:
            count = self._file.readinto(left)
            if not count:
                raise ReadingError(f"the temporary file of {self._what} was cut by somebody else.")
            left = left[count:]

    def _full(self) -> ReadingError:
        free = shutil.disk_usage(self._folder).free
        return ReadingError(
            f"to bring {self._what} together by sample takes {self._needed / 1e6:,.1f} MB in the "
            f"folder for temporary files for a while; '{self._folder}' has {free / 1e6:,.1f} MB "
            "free. Make room, or name a folder that has more by the environment variable TMPDIR."
        )
