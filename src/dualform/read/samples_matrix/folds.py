"""What shards add to the matrix: rows read by group, or by step where each has an operator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dualform.ledger import Book, Stream, Term
from dualform.memory.blocks import as_matrix, from_matrix
from dualform.memory.views import Region
from dualform.optimizers import Operator
from dualform.read.engine import BlockFold, Scratch, ShardRange
from dualform.read.grouping import Grouping
from dualform.read.questions import seen_as
from dualform.read.samples_matrix.columns import Columns, shape_of
from dualform.read.samples_matrix.coordinates import Coordinates
from dualform.read.samples_matrix.group_sums import InOrder, Receiver, add_groups, add_visits
from dualform.read.samples_matrix.visit_weights import VisitWeights
from dualform.read.samples_matrix.visits import GATHERED_BYTES, Reused, Visits
from dualform.read.scan import chunks, row_sides
from dualform.read.stream_folds import StreamFold


@dataclass(frozen=True)
class GroupedRows(BlockFold[Columns]):
    """Rows with a number each, read in the order of their groups."""

    plan: Sequence[tuple[Sequence[Columns], int]]
    """Parts of books that are fed by the same streams, and how many groups a block has."""
    fed_by: tuple[Stream, ...]
    grouping: Grouping
    weights: VisitWeights
    device: torch.device | str = "cpu"
    scratch: Scratch = field(default_factory=Scratch)
    """Where visits lie in the shards, and memory to read them into."""
    coordinates: Mapping[str, Coordinates] = field(default_factory=dict)
    """What some books are in, by name."""
    between: tuple[int, int] | None = None
    """From which group to which; by default all."""

    def blocks(self, shards: Sequence[ShardRange]) -> Iterator[Columns]:
        """Part by part; some groups at a time."""
        visits = self.visits(shards)
        widths = [sum(part.width for part in parts) for parts, _ in self.plan]
        sizes = [each * width for width, (_, each) in zip(widths, self.plan, strict=True)]
        buffer = torch.empty(max(sizes, default=0), device=self.device)
        rooms = [_rooms([visits[name] for name in parts[0].book.terms]) for parts, _ in self.plan]
        self._memory.least = max((sum(sizes) for sizes in rooms), default=0)
        for (parts, each), room in zip(self.plan, rooms, strict=True):
            yield from self._filled(parts, each, visits, buffer, room)
        self._memory.clear()

    def merge(self, one: Columns, other: Columns) -> Columns:
        """The sum."""
        one.values.add_(other.values)
        return one

    def visits(self, shards: Sequence[ShardRange]) -> dict[str, Visits]:
        """The visits of each stream in some shards."""
        key = tuple((str(shard.shard.path), shard.first, shard.last) for shard in shards)
        found: dict[str, Visits] = self.scratch.get(
            key, lambda: {s.name: Visits(shards, s) for s in self.fed_by}
        )
        return found

    @property
    def _memory(self) -> Reused:
        memory: Reused = self.scratch.get("memory", Reused)
        return memory

    def _filled(
        self,
        parts: Sequence[Columns],
        each: int,
        visits: Mapping[str, Visits],
        buffer: Tensor,
        room: Sequence[int],
    ) -> Iterator[Columns]:
        """Some parts, block by block; the visits of a stream are read once for all blocks."""
        streams = list(parts[0].book.terms)
        first, last = self.between or (0, self.grouping.count)
        memory = self._memory([((size,), torch.uint8) for size in room])
        with ExitStack() as opened:
            ordered: dict[str, InOrder] = {}
            for begin in range(first, last, each):
                filled = cut(buffer, parts, slice(begin, min(begin + each, last)))
                for stream, own in zip(streams, memory, strict=True):
                    receivers = [self._receiver(part, stream) for part in filled]
                    if stream not in ordered:
                        found = InOrder(visits[stream], self.grouping, receivers, own, self.between)
                        ordered[stream] = opened.enter_context(found)
                    add_visits(ordered[stream], receivers, begin)
                    add_turned(filled, receivers)
                yield from filled

    def _receiver(self, part: Columns, stream: str) -> Receiver:
        found = receiver(part, stream, self.weights)
        return replace(found, coordinates=self.coordinates.get(part.book.name))


def _rooms(streams: Sequence[Visits]) -> list[int]:
    """How many bytes each of some streams gathers at a time: as much of the ledger as the others.

    Streams that feed the same book are gone through side by side.
    """
    total = sum(visits.nbytes for visits in streams)
    share = min(1.0, GATHERED_BYTES / max(1, total))
    return [
        visits.room_for(max(1, min(len(visits), int(share * visits.nbytes) // visits.longest)))
        for visits in streams
    ]


@dataclass(frozen=True)
class SteppedRows(StreamFold[Tensor]):
    """Rows of some steps put through the operators of their steps, in the order of time."""

    book: Book
    stream: Stream
    region: Region
    operators: Mapping[int, Operator]
    grouping: Grouping
    device: torch.device | str = "cpu"

    @property
    def read_streams(self) -> list[Stream]:
        """One."""
        return [self.stream]

    def start(self) -> Tensor:
        """(groups, height, width) of zeros."""
        return torch.zeros(self.grouping.count, *self.region.shape, device=self.device)

    def fold(self, partial: Tensor, shard: ShardRange) -> Tensor:
        """Adds what each step of a shard made of its rows, group by group."""
        term = self.book.terms[self.stream.name]
        view = seen_as(self.book, term)
        for chunk in chunks(shard, self.stream, self.device):
            sides = row_sides(chunk, term)
            groups, numbers = torch.unique(self.grouping.of_chunk(chunk).cpu(), return_inverse=True)
            for step, some in chunk.by_step():
                if step not in self.operators:
                    continue
                operator = self.operators[step].restricted(self.region, view)
                here, places = torch.unique(numbers[some], return_inverse=True)
                sums = partial.new_zeros(len(here), *operator.needs.shape)
                add_groups(sums, sides[some], places, operator.needs)
                partial.index_add_(0, groups[here].to(partial.device), operator.apply(sums))
        return partial

    def merge(self, one: Tensor, other: Tensor) -> Tensor:
        """The sum."""
        return one.add_(other)

    @property
    def partial_bytes(self) -> int:
        """Of the part of the matrix."""
        return 4 * self.grouping.count * math.prod(self.region.shape)


def cut(buffer: Tensor, parts: Sequence[Columns], groups: slice) -> list[Columns]:
    """The parts with values of these groups, 0 so far."""
    count = groups.stop - groups.start
    sizes = [count * part.width for part in parts]
    views = torch.split(buffer[: sum(sizes)].zero_(), sizes)
    filled = zip(parts, views, strict=True)
    return [replace(p, values=v.view(count, -1), groups=groups) for p, v in filled]


def receiver(part: Columns, stream: str, weights: VisitWeights) -> Receiver:
    """Where a stream's rows are added: the part itself, or a matrix as the stream sees it."""
    own = part.book.terms[stream]
    into, region = part.dense(), part.region
    if not alike(part.term, own):
        shape = shape_of(part.book, own)
        into, region = into.new_zeros(len(into), *shape), Region.whole(*shape)
    return Receiver(part.book, into, own, region, weights)


def add_turned(parts: Sequence[Columns], receivers: Sequence[Receiver]) -> None:
    """Adds what was put into matrices of another view."""
    for part, found in zip(parts, receivers, strict=True):
        own, term, shape = found.term, part.term, part.book.shape
        if not alike(term, own):
            parameters = [from_matrix(d, shape, own.view, own.groups) for d in found.into]
            turned = [as_matrix(p, term.view, term.groups) for p in parameters]
            part.dense().add_(torch.stack(turned))


def alike(term: Term, other: Term) -> bool:
    """Whether they see the parameter as the same matrix."""
    same_groups = term.groups == other.groups or term.view != "swapped"
    return term.view == other.view and same_groups
