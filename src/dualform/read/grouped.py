"""Rows put together: what each group of them (a sample, a step) adds to a parameter.

`C[g] = Σ_{i ∈ g} c_i a_i ⊗ b_i` for many groups at once. Rows are read in the order of their groups
rather than of time, each once, so that repeated visits of a sample meet in one matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.ledger import Ledger, Stream, Term
from dualform.ledger.tensors import MappedFile
from dualform.memory.blocks import Sides
from dualform.read.progress import LateProgress
from dualform.read.scan import Chunk, RowColumns, widen
from dualform.record.layers import expand, positions

ROW_BYTES = 32 << 20
"""How many bytes of rows are gathered at a time."""


@dataclass(frozen=True)
class Region:
    """A part of a parameter's matrix.

    >>> Region.whole(4, 3).of(torch.zeros(2, 4, 3)).shape
    torch.Size([2, 4, 3])
    """

    rows: slice
    columns: slice

    @classmethod
    def whole(cls, height: int, width: int) -> Region:
        """All of a matrix."""
        return cls(slice(0, height), slice(0, width))

    @property
    def shape(self) -> tuple[int, int]:
        """Its height and width."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    def of(self, matrices: Tensor) -> Tensor:
        """The same part of matrices (…, height, width)."""
        return matrices[..., self.rows, self.columns]


@dataclass(frozen=True)
class Grouping:
    """Which rows belong together: `of(steps, samples, positions)` is the number of their group.

    >>> by_step = Grouping(4, lambda steps, samples, positions: steps)
    >>> by_step.of(torch.tensor([1, 1, 3]), torch.zeros(3), torch.zeros(3))
    tensor([1, 1, 3])
    """

    count: int
    of: Callable[[Tensor, Tensor, Tensor], Tensor]

    def of_chunk(self, chunk: Chunk) -> Tensor:
        """The group of each row of a chunk, where the chunk is."""
        columns = (c.cpu() for c in (chunk.steps, chunk.samples, chunk.positions))
        return self.of(*columns).to(chunk.keys.device)

    @classmethod
    def by_sample(cls, numbers: Tensor) -> Grouping:
        """One group for each of the samples, in the order of their stored ids."""
        return cls(len(numbers), lambda steps, samples, at: torch.searchsorted(numbers, samples))

    @classmethod
    def by_step(cls, until: int) -> Grouping:
        """One group for each step, by its number."""
        return cls(until + 1, lambda steps, samples, at: steps)

    @classmethod
    def by_position(cls, numbers: Tensor, most: int) -> Grouping:
        """One group for each position of each sample; a sample has at most so many."""
        return cls(
            len(numbers) * most,
            lambda steps, samples, at: torch.searchsorted(numbers, samples) * most + at,
        )


class Records:
    """All records of a stream between two steps, to be gathered in any order."""

    def __init__(self, ledger: Ledger, stream: Stream, until: int, first: int = 1) -> None:
        self.stream, self.each = stream, positions(stream)
        names = (f"{stream.name}/keys", f"{stream.name}/values")
        self._names = names
        self._files: list[MappedFile] = []
        self._buffers: dict[str, Tensor] = {}
        parts: list[Tensor] = []
        for shard in ledger.shards:
            if names[0] in shard.file and shard.record["first"] <= until:
                columns = RowColumns(shard, stream.name)
                start, stop = columns.between(first, until)
                kept = [columns.steps, columns.samples, columns.positions]
                places = torch.arange(start, stop)
                file = torch.full_like(places, len(self._files))
                parts.append(torch.stack([file, places, *(c[start:stop] for c in kept)]))
                self._files.append(shard.file.mapped())
        empty = torch.zeros(5, 0, dtype=torch.long)
        self._file, self._place, self.steps, self.samples, self.positions = torch.cat(
            [empty, *parts], 1
        )

    def __len__(self) -> int:
        return len(self.steps)

    def last_visits(self) -> Tensor:
        """(records,): whether each is of the last step that saw its sample."""
        _, sample = torch.unique(self.samples, return_inverse=True)
        last = torch.zeros(int(sample.max()) + 1 if len(sample) else 0, dtype=torch.long)
        last.scatter_reduce_(0, sample, self.steps, "amax")
        return torch.eq(self.steps, last[sample])

    def batch_sizes(self) -> Tensor:
        """(records,): how many samples the record's step saw."""
        pairs = torch.unique(torch.stack([self.steps, self.samples]), dim=1)
        steps, counts = torch.unique(pairs[0], return_counts=True)
        return torch.index_select(counts, 0, torch.searchsorted(steps, self.steps))

    def gather(self, chosen: Tensor, with_keys: bool = True) -> tuple[Tensor, Tensor]:
        """The rows of some records, keys and values; valid until the next are gathered."""
        values = self._gathered(self._names[1], chosen)
        if not with_keys and not self.stream.layout:
            return values[:, :0], values
        rows, errors = expand(self.stream, self._gathered(self._names[0], chosen), values)
        assert errors is not None
        return rows, errors

    def rows_of(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Step, sample and position of each row of some records."""
        steps, samples, at = (c[chosen] for c in (self.steps, self.samples, self.positions))
        if self.each == 1:
            return steps, samples, at
        within = torch.arange(self.each).repeat(len(chosen))
        steps, samples, at = (c.repeat_interleave(self.each) for c in (steps, samples, at))
        return steps, samples, at * self.each + within

    def record_bytes(self) -> int:
        """What one record takes once it is expanded, at least 1."""
        if not len(self):
            return 1
        keys, values = self.gather(torch.zeros(1, dtype=torch.long))
        return keys.nbytes + values.nbytes

    def _gathered(self, name: str, chosen: Tensor) -> Tensor:
        """Rows in memory that is used again: to allocate it would cost more than to fill it."""
        files, order = self._file[chosen].sort(stable=True)
        numbers, counts = torch.unique_consecutive(files, return_counts=True)
        places, found = self._place[chosen], torch.empty(0)
        for number, mine in zip(numbers.tolist(), order.split(counts.tolist()), strict=True):
            part = widen(self._files[number].take(name, places[mine]))
            if not len(found):
                found = self._buffer(name, len(chosen), part)
            found[mine] = part
        return found

    def _buffer(self, name: str, rows: int, like: Tensor) -> Tensor:
        """Memory for so many rows of an array, of which there is one for each."""
        if name not in self._buffers or len(self._buffers[name]) < rows:
            self._buffers[name] = like.new_empty(rows, *like.shape[1:])
        return self._buffers[name][:rows]


@dataclass(frozen=True)
class Receiver:
    """A part of a parameter's matrix, and how rows are added to it.

    `into` is (groups, height, width) of the part. `weights` says how much each record counts.
    """

    into: Tensor
    term: Term
    region: Region
    weights: Tensor
    turn: Callable[[Sides], Sides] | None = None

    def sides(self, keys: Tensor, values: Tensor, weights: Tensor) -> Sides:
        """Rows as they are to be added."""
        found = Sides.of(self.term.form, keys, values, self.term.groups, self.term.at)
        return _weighed(found if self.turn is None else self.turn(found), weights)


def _weighed(sides: Sides, weights: Tensor) -> Sides:
    """Rows times a number each, on the side where that costs less."""
    a, b, column = sides.a, sides.b, weights[:, None]
    if b is None:
        return Sides(a, column.to(a), sides.at)
    if b.ndim == 2 and (a.ndim == 1 or b.shape[1] <= a.shape[1]):
        return Sides(a, b * column.to(b), sides.at)
    return Sides(a * column.to(a), b, sides.at)


def add_records(records: Records, grouping: Grouping, receivers: Sequence[Receiver]) -> None:
    """Adds what the records of each group add to some parts of parameters; each is read once.

    Records that count for nothing are not read.
    """
    counted = torch.stack([receiver.weights != 0 for receiver in receivers]).any(0)
    chosen = torch.nonzero(counted).flatten()
    if not len(chosen):
        return
    columns = (c[chosen] for c in (records.steps, records.samples, records.positions))
    numbers, by_group = grouping.of(*columns).sort(stable=True)
    with_keys = any(receiver.term.form != "sum" for receiver in receivers)
    each = max(1, ROW_BYTES // records.record_bytes())
    with LateProgress(records.stream.name, len(chosen)) as progress:
        for part in torch.split(chosen[by_group], _whole_groups(numbers, each)):
            rows = records.gather(part, with_keys)
            groups = grouping.of(*records.rows_of(part))
            for receiver in receivers:
                weights = receiver.weights[part].repeat_interleave(records.each)
                device = receiver.into.device
                keys, values, weights = (t.to(device) for t in (*rows, weights))
                sides = receiver.sides(keys, values, weights)
                add_groups(receiver.into, sides, groups, receiver.region)
            progress.advance(len(part))


def _whole_groups(numbers: Tensor, each: int) -> list[int]:
    """Sizes of parts of sorted records: groups stay whole unless one alone is larger than `each`.

    >>> _whole_groups(torch.tensor([0, 0, 1, 1, 2, 2, 2, 2, 2]), 4)
    [4, 4, 1]
    """
    sizes: list[int] = []
    for count in torch.unique_consecutive(numbers, return_counts=True)[1].tolist():
        if sizes and sizes[-1] + count <= each:
            sizes[-1] += count
        else:
            sizes += [each] * (count // each) + [count % each] * bool(count % each)
    return sizes


def add_groups(into: Tensor, sides: Sides, numbers: Tensor, region: Region) -> None:
    """Adds each row to its group; see `add_records`."""
    if not bool((numbers[1:] >= numbers[:-1]).all()):
        order = torch.argsort(numbers, stable=True)
        numbers, sides = numbers[order], sides[order.to(sides.a.device)]
    groups, counts = torch.unique_consecutive(numbers, return_counts=True)
    first = int(groups[0])
    if int(groups[-1]) - first == len(groups) - 1:
        add_segments(into[first : first + len(groups)], sides, counts, region)
    else:
        sums = into.new_zeros(len(groups), *into.shape[1:])
        add_segments(sums, sides, counts, region)
        into.index_add_(0, groups.to(into.device), sums)


def add_segments(into: Tensor, sides: Sides, counts: Tensor, region: Region) -> None:
    """Adds runs of so many rows each, of which the first belongs to the first group, and so on."""
    (top, left), (height, _), across = sides.at, region.shape, region.columns
    width = 1 if sides.b is None else sides.b.shape[-1]
    begin, end = max(across.start, left), min(across.stop, left + width)
    if begin >= end:
        return
    here = slice(begin - across.start, end - across.start)
    b = None if sides.b is None else sides.b[..., begin - left : end - left]
    if sides.a.ndim == 1:
        assert b is not None
        segment = torch.arange(len(counts)).repeat_interleave(counts).to(into.device)
        place = sides.a + top - region.rows.start
        inside = (place >= 0) & (place < height)
        flat = into.flatten(0, 1)[:, here]
        flat.index_add_(0, (segment * height + place)[inside], b[inside].to(into))
        return
    first, last = max(region.rows.start, top), min(region.rows.stop, top + sides.a.shape[1])
    if first < last:
        target = into[:, first - region.rows.start : last - region.rows.start, here]
        _add_products(target, Sides(sides.a, b), counts, slice(first - top, last - top))


def _add_products(into: Tensor, sides: Sides, counts: Tensor, rows: slice) -> None:
    """Adds `Σ a[rows] ⊗ b` over each segment."""
    a, b = _padded(sides.a, counts).to(into), sides.b
    if b is None:
        into += a[:, :, rows].sum(1)[:, :, None]
        return
    b = _padded(b, counts).to(into)
    if b.ndim == 3:
        into.baddbmm_(a[:, :, rows].transpose(1, 2), b)
        return
    by_groups = a.reshape(*a.shape[:2], b.shape[2], -1)
    into += torch.einsum("mcgo,mcgi->mgoi", by_groups, b).flatten(1, 2)[:, rows]


def _padded(rows: Tensor, counts: Tensor) -> Tensor:
    """(segments, longest, …): runs of rows side by side, filled up with zeros."""
    longest = int(counts.max())
    if bool((counts == longest).all()):
        return rows.reshape(len(counts), longest, *rows.shape[1:])
    within = torch.arange(longest)
    filled = (within < counts[:, None]).to(rows.device)
    padded = rows.new_zeros(len(counts), longest, *rows.shape[1:])
    padded[filled] = rows
    return padded
