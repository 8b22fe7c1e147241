"""Rows put together: what each group of them (a sample, a step) adds to a parameter.

`C[g] = Σ_{i ∈ g} c_i a_i ⊗ b_i` for many groups at once. Rows are read in the order of their groups
rather than of time, each once, so that repeated visits of a sample meet in one matrix product.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, starmap

import torch
from torch import Tensor

from dualform.ledger import Book, Term
from dualform.memory.blocks import Sides
from dualform.memory.forms import form_named
from dualform.memory.shared import AnySides, SharedSides
from dualform.memory.summary import Bases, Matrices, SummarySides
from dualform.memory.views import Region
from dualform.read.grouping import Grouping
from dualform.read.progress import LateProgress
from dualform.read.samples_matrix.buckets import Buckets, Gathered, OneByOne
from dualform.read.samples_matrix.coordinates import Coordinates
from dualform.read.samples_matrix.visit_weights import VisitWeights
from dualform.read.samples_matrix.visits import Visits
from dualform.read.scan import summary_sides


@dataclass(frozen=True)
class Receiver:
    """A part of a parameter's matrix, and how rows are added to it.

    `into` is (groups, height, width) of the part. `weights` says how much each visit counts.
    """

    book: Book
    into: Tensor
    term: Term
    region: Region
    weights: VisitWeights
    coordinates: Coordinates | None = None
    """What the part is in, where its book is not taken at its own size."""

    def sides(
        self, visits: Visits, rows: Sequence[Tensor], weights: Tensor, shared: Sequence[Tensor] = ()
    ) -> AnySides:
        """Rows as they are to be added: times a number each, on the side where it costs less.

        `shared` are their matrices, and which is whose.
        """
        keys, values = rows
        if self.coordinates is not None:
            return self.coordinates.sides(visits.stream, keys, values).weighted(weights)
        if visits.bases is not None:
            bases = visits.bases.to(values.device)
            return summary_sides(visits.stream, self.term, keys, values, bases).weighted(weights)
        plain = form_named(self.term.form).rows(keys, values, self.term.groups, self.term.at)
        weighed = plain.weighted(weights)
        return SharedSides(weighed, *shared) if shared else weighed


class InOrder:
    """The visits of a stream in the order of their groups, some at a time.

    The visits of a group lie all over the ledger. Of all visits no more is held than one number
    each, which has the group in front of the visit: so these numbers, sorted, are the order. Of
    their records a part is held, of as many groups as there is memory for.

    Args:
        receivers: visits that count for none of them are not read.
        room: memory to read into; see `Visits.room_for`.
        between: from which group to which; by default all.
    """

    def __init__(
        self,
        visits: Visits,
        grouping: Grouping,
        receivers: Sequence[Receiver],
        room: Tensor,
        between: tuple[int, int] | None = None,
    ) -> None:
        self.visits, self._grouping, self._room = visits, grouping, room
        with_keys = any(form_named(r.term.form).needs_keys for r in receivers)
        self._arrays = visits.arrays(with_keys)
        self._bits = len(visits).bit_length()
        found, count = torch.empty(len(visits), dtype=torch.long), 0
        for first, steps, samples in visits.by_shard():
            chosen = torch.arange(first, first + len(steps))
            weights = _weights(receivers, visits, chosen).values()
            counted = torch.stack([some != 0 for some in weights]).any(0)
            groups = grouping.of(steps, samples, torch.zeros_like(steps))  # of their first rows
            if between is not None:
                counted &= (groups >= between[0]) & (groups < between[1])
            packed = ((groups << self._bits) | chosen)[counted]
            found[count : count + len(packed)] = packed
            count += len(packed)
        self._order = found[:count]
        self._order.numpy().sort()
        self._ends = list(self._cut())
        self._loaded = -1
        """Which part is held."""
        self._opened = ExitStack()
        scans = 1 if visits.large else 2
        self._progress = LateProgress(visits.stream.name, scans * count)

    def __enter__(self) -> InOrder:
        self._opened.enter_context(self._progress)
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def between(
        self, begin: int, end: int
    ) -> Iterator[tuple[Tensor, Tensor, tuple[Tensor, Tensor]]]:
        """Visits of the groups from `begin` up to `end`, the group of each row, and the rows.

        To be asked in the order of groups. What is handed out is valid until the next.
        """
        bounds = torch.tensor([begin, end]) << self._bits
        at, last = torch.searchsorted(self._order, bounds).tolist()
        while at < last:
            first, stop = self._load(at)
            until = self._whole_groups(at, min(last, stop), self.visits.cached)
            visits = self._visits(at, until)
            if self._grouping.by_visit:
                own = self._order[at:until] >> self._bits
                groups = own.repeat_interleave(self.visits.rows(visits))
            else:
                groups = self._grouping.of(*self.visits.of_rows(visits))
            stored = self._gathered.records(at - first, until - first)
            yield visits, groups, self.visits.made(stored)
            self._progress.advance(until - at)
            at = until

    def _visits(self, begin: int, end: int) -> Tensor:
        return self._order[begin:end] & ((1 << self._bits) - 1)

    def _cut(self) -> Iterator[int]:
        """Where parts end whose records fit into memory: groups stay whole, if they can."""
        at, most = 0, (len(self._room) - self.visits.room_for(0)) // self.visits.record_bytes
        while at < len(self._order):
            ends = self.visits.records(self._visits(at, at + most)).cumsum(0)
            fitting = int(torch.searchsorted(ends, most, right=True))
            at = self._whole_groups(at, len(self._order), max(1, fitting))
            yield at

    def _load(self, at: int) -> tuple[int, int]:
        """Has the part in memory that a visit is in: from which visit to which."""
        number = bisect_right(self._ends, at)
        first, stop = [0, *self._ends][number], self._ends[number]
        if number != self._loaded:
            self._gathered.load(number, self._visits(first, stop))
            self._loaded = number
        return first, stop

    @cached_property
    def _gathered(self) -> Gathered:
        """How records come: made when they are first asked for."""
        visits = self.visits
        if visits.large:
            return OneByOne(visits, self._arrays, self._room)
        parts = starmap(self._visits, pairwise([0, *self._ends]))
        report = self._progress.advance
        return Buckets(visits, parts, self._arrays, self._room, self._opened, report)

    def _whole_groups(self, at: int, last: int, most: int) -> int:
        """Where so many visits end at most: groups stay whole, unless one alone has more."""
        if last - at <= most:
            return last
        group = self._order[at + most] >> self._bits
        begin = int(torch.searchsorted(self._order, (group << self._bits)[None]))
        return begin if begin > at else at + most


def _weights(receivers: Sequence[Receiver], visits: Visits, chosen: Tensor) -> dict[str, Tensor]:
    """How much some visits count for each book of the receivers, by its name."""
    books = {receiver.book.name: receiver for receiver in receivers}
    return {name: one.weights.of(one.book, visits, chosen) for name, one in books.items()}


def add_visits(ordered: InOrder, receivers: Sequence[Receiver], begin: int = 0) -> None:
    """Adds what the visits of the groups from `begin` on add to some parts of parameters."""
    seen = ordered.visits
    for chosen, groups, rows in ordered.between(begin, begin + len(receivers[0].into)):
        counts = seen.rows(chosen)
        shared: Sequence[Tensor] = ()
        if seen.stream.shared:
            matrices, which = seen.matrices(chosen)
            shared = (matrices, which.repeat_interleave(counts))
        by_book = _weights(receivers, seen, chosen)
        for receiver in receivers:
            device = receiver.into.device
            weights = by_book[receiver.book.name].repeat_interleave(counts)
            keys, values, weights = (t.to(device) for t in (*rows, weights))
            moved = [t.to(device) for t in shared]
            sides = receiver.sides(seen, (keys, values), weights, moved)
            add_groups(receiver.into, sides, groups - begin, receiver.region)


def add_groups(into: Tensor, sides: AnySides, numbers: Tensor, region: Region) -> None:
    """Adds each row to its group; see `add_visits`."""
    if not bool((numbers[1:] >= numbers[:-1]).all()):
        order = torch.argsort(numbers, stable=True)
        numbers, sides = numbers[order], sides[order.to(sides.device)]
    groups, counts = torch.unique_consecutive(numbers, return_counts=True)
    first = int(groups[0])
    if int(groups[-1]) - first == len(groups) - 1:
        add_segments(into[first : first + len(groups)], sides, counts, region)
    else:
        sums = into.new_zeros(len(groups), *into.shape[1:])
        add_segments(sums, sides, counts, region)
        into.index_add_(0, groups.to(into.device), sums)


def add_segments(into: Tensor, sides: AnySides | Matrices, counts: Tensor, region: Region) -> None:
    """Adds runs of so many rows each, of which the first belongs to the first group, and so on."""
    if isinstance(sides, SharedSides):
        begins = counts.cumsum(0) - counts
        for target, begin, count in zip(into, begins.tolist(), counts.tolist(), strict=True):
            _add_shared(target, sides[begin : begin + count], region)
        return
    if isinstance(sides, Matrices):
        runs = torch.arange(len(counts)).repeat_interleave(counts).to(into.device)
        into.index_add_(0, runs, region.of(sides.blocks).to(into))
        return
    if isinstance(sides, SummarySides):
        bases = sides.bases
        if isinstance(sides.kept, Sides) and _by_rows(sides.kept, bases, len(counts), region):
            add_segments(into, bases.expand_rows(sides.kept), counts, region)
            return
        rows = region.rows if bases.outputs is None else slice(0, bases.outputs.shape[1])
        columns = region.columns if bases.inputs is None else slice(0, bases.inputs.shape[1])
        sums = into.new_zeros(len(counts), *Region(rows, columns).shape)
        add_segments(sums, sides.kept, counts, Region(rows, columns))
        into += bases.part(region.rows, region.columns).expand(sums)
        return
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
        _add_places(into[:, :, here], (segment * height + place)[inside], b[inside])
        return
    first, last = max(region.rows.start, top), min(region.rows.stop, top + sides.a.shape[1])
    if first < last:
        target = into[:, first - region.rows.start : last - region.rows.start, here]
        _add_products(target, Sides(sides.a, b), counts, slice(first - top, last - top))


def _by_rows(kept: Sides, bases: Bases, groups: int, region: Region) -> bool:
    """Whether to expand each row costs less than to expand what the rows of a group add up to."""
    (height, width), rows = region.shape, len(kept)
    U, V = bases.outputs, bases.inputs
    tall, wide = (height if U is None else U.shape[1]), (width if V is None else V.shape[1])
    expanded = (0 if V is None else tall * wide * width) + (
        0 if U is None else tall * width
    ) * height
    each = (0 if U is None else U.numel()) + (0 if V is None else V.numel())
    return rows * (each + height * width) < rows * tall * wide + groups * expanded


def _add_shared(into: Tensor, sides: SharedSides, region: Region) -> None:
    """Adds rows that share matrices to a part of one matrix."""
    part = Region(region.rows, slice(0, 1) if sides.narrow else region.columns)
    for M, rows in sides.by_matrix():
        block = into.new_zeros(1, *part.shape)
        add_segments(block, sides.plain[rows], torch.tensor([len(rows)]), part)
        lines = M if len(M) == 1 else M[region.rows]
        into += block[0] * lines[:, region.columns].to(block)


def _add_places(into: Tensor, places: Tensor, b: Tensor) -> None:
    """Adds each row where it belongs, counted through the groups; first those of one place."""
    found, inverse = torch.unique(places, return_inverse=True)
    sums = into.new_zeros(len(found), b.shape[1]).index_add_(0, inverse, b.to(into))
    group, place = found // into.shape[1], found % into.shape[1]
    into[group, place] += sums


def _add_products(into: Tensor, sides: Sides, counts: Tensor, rows: slice) -> None:
    """Adds `Σ a[rows] ⊗ b` over each segment."""
    a, b = _padded(sides.a, counts).to(into), sides.b
    if b is None:
        into += a[:, :, rows].sum(1)[:, :, None]
        return
    b = _padded(b, counts).to(into)
    if b.ndim == 3:
        _add_product(into, a[:, :, rows].mT, b)
        return
    by_groups = a.reshape(*a.shape[:2], b.shape[2], -1)
    into += torch.einsum("mcgo,mcgi->mgoi", by_groups, b).flatten(1, 2)[:, rows]


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds `left @ right`, turned if the target is: only in the order of memory it is fast."""
    if into.stride(2) > into.stride(1):
        into.mT.baddbmm_(right.mT, left.mT)
    else:
        into.baddbmm_(left, right)


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
