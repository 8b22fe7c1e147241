"""Step, sample and position of each record of a stream in a shard; and which arrays it has."""

from __future__ import annotations

import math
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from dualform.errors import CorruptError
from dualform.ledger import Shard, Stream
from dualform.ledger.codecs import Column
from dualform.ledger.key_table import key_places
from dualform.read.engine import ShardRange
from dualform.read.free_memory import check_record


class RowColumns:
    """Step, sample and position of each record of a stream in one shard; from its segments."""

    def __init__(self, shard: ShardRange, stream: Stream) -> None:
        check_record(stream)
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
        stored, each = stored_arrays(shard.shard, stream), self._segments[:, 2]
        self.places = key_places(shard.shard, stream.name, stored, self._sizes, each)
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
        begins, total = self._begins[uses] - (sizes.cumsum(0) - sizes), int(sizes.sum())
        at = np.arange(total) + repeated(begins, sizes).numpy()
        return torch.from_numpy(self._shard.samples().numpy()[at])

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
        each = repeated(self._segments[:, 2], self._sizes)
        return torch.from_numpy(repeated(self.places[0], each).numpy() + self.positions.numpy())

    @cached_property
    def steps(self) -> Tensor:
        """(rows,): the number of each row's step."""
        return repeated(self._segments[:, 0], self._counts)

    @cached_property
    def uses(self) -> Tensor:
        """(rows,): the number of each row's segment: a use of the layer in a backward pass."""
        return repeated(torch.arange(len(self._counts)), self._counts)

    def step_and_batch(self, use: int) -> tuple[int, int]:
        """Where a use belongs."""
        step, batch = self._segments[use, :2].tolist()
        return step, batch

    @cached_property
    def samples(self) -> Tensor:
        """(rows,): the stored id of each row's sample."""
        return repeated(self.samples_of(self._with_records), self._each)

    @cached_property
    def positions(self) -> Tensor:
        """(rows,): which of its sample's rows it is: the token, patch or pixel."""
        each = self._each.numpy()
        begins = torch.from_numpy(each.cumsum() - each)
        rows = np.arange(int(self._counts.sum()))
        rows -= repeated(begins, self._each).numpy()
        return torch.from_numpy(rows)

    @cached_property
    def _each(self) -> Tensor:
        """(visits,): how many records each visit of a sample left, of uses that left any."""
        uses = self._with_records
        return repeated(self._segments[uses, 2], self._sizes[uses])

    @cached_property
    def _with_records(self) -> Tensor:
        """The uses that left records: others may have any number of visits, in a forged run."""
        return torch.nonzero(self._counts).flatten()


def repeated(numbers: Tensor, counts: Tensor) -> Tensor:
    """Each number so many times.

    By numpy, as all columns here: torch would wake a thread for each processor, and these wait
    busily for more to do while other threads want to read files.

    >>> repeated(torch.tensor([5, 7]), torch.tensor([1, 2]))
    tensor([5, 7, 7])
    """
    if (counts.numpy() == 1).all():
        return numbers
    return torch.from_numpy(np.repeat(numbers.numpy(), counts.numpy()))


def widths(stream: Stream) -> tuple[int, int]:
    """How many numbers a record's key and value have."""
    return math.prod(stream.keys), math.prod(stream.values)


def stored_arrays(shard: Shard, stream: Stream) -> dict[str, Column]:
    """What one record of a stream takes of each array in a shard."""
    return shard.codec(stream.name).arrays(*widths(stream))


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
