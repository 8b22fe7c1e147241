"""Pages: where backward passes write a layer's inputs and errors.

A row is copied at the one moment when both are certain: the error has just arrived, and autograd
still guards the input against changes. The copies go into pages that are used again and again, so
recording needs a fixed amount of memory and the allocator sees nothing of it. On a GPU, where every
copy is a call, what layers made is held instead of copied.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from dualform.layers import Site, sample_major
from dualform.owners import BatchSamples

PAGE_BYTES = 4 << 20
PAGE_SLOTS = 256

Order: TypeAlias = tuple[int, int]
"""How many samples there are, and how many neighboring rows belong to one."""
SlotType: TypeAlias = tuple[torch.Size, torch.Size, torch.dtype, torch.dtype, Order]
"""Shapes and dtypes of keys and values, and the order of their rows."""


def calls_are_dear(tensor: Tensor) -> bool:
    """Whether an operation on a tensor costs more than the copy that would spare it: on a GPU."""
    return tensor.is_cuda


class Page:
    """Slots of one type, and for each that is filled the step and the samples it belongs to.

    The training thread fills it. Once it is handed over, nobody changes it until it is given back.
    """

    is_reusable = True
    """Whether other rows can be put into it once it was given back."""

    def __init__(self, x: Tensor, error: Tensor, order: Order) -> None:
        self.slot_type = (x.shape, error.shape, x.dtype, error.dtype, order)
        self.slot_bytes = x.nbytes + error.nbytes
        self.marks: list[tuple[int, BatchSamples]] = []
        self.shared: list[Tensor] = []
        """The matrix of each slot, in streams whose rows share one; else none."""
        self.reach: dict[int, Tensor] = {}
        """The sum of the sizes of what a slot summarizes, number by number, where it was asked."""
        self._make(x, error)

    def _make(self, x: Tensor, error: Tensor) -> None:
        self.slots = max(1, min(PAGE_SLOTS, PAGE_BYTES // max(1, self.slot_bytes)))
        self._keys = x.new_empty((self.slots, *x.shape))
        self._values = error.new_empty((self.slots, *error.shape))
        self.key_slots, self.value_slots = list(self._keys), list(self._values)

    def put(self, x: Tensor, error: Tensor, is_ours: bool) -> None:
        """Copies a use of the layer into the next slot."""
        at = len(self.marks)
        self.key_slots[at].copy_(x)
        self.value_slots[at].copy_(error)

    def rows(self, chosen: list[int]) -> tuple[Tensor, Tensor]:
        """The chosen slots; without a copy where they are neighbors, as they nearly always are."""
        start, stop = chosen[0], chosen[-1] + 1
        if stop - start == len(chosen):
            return self._keys[start:stop], self._values[start:stop]
        return self._keys[chosen], self._values[chosen]

    def matrices(self, chosen: list[int]) -> Tensor | None:
        """(slots, height × width): the matrices of the chosen slots, where rows share any."""
        if not self.shared:
            return None
        return torch.stack([self.shared[at].flatten() for at in chosen])

    def release(self) -> None:
        """Its rows are written; they need no memory any more."""

    def clear(self) -> None:
        """Makes all slots free."""
        self.marks, self.shared, self.reach = [], [], {}


class HeldPage(Page):
    """The same where calls are dear: slots hold what layers made, and are read all at once.

    Should the loop change it before that, the rows will not explain the gradient, and a note says
    so. What the loop itself made, which it may well fill again, is copied.
    """

    def _make(self, x: Tensor, error: Tensor) -> None:
        self.slots = sys.maxsize
        self.clear()

    def put(self, x: Tensor, error: Tensor, is_ours: bool) -> None:
        """Holds a use of the layer."""
        if is_ours:
            self.key_slots.append(x)
            self.value_slots.append(error)
            return
        loops_own = x.grad_fn is None and x.numel()
        self.key_slots.append(x.clone() if loops_own else _lean(x))
        self.value_slots.append(_lean(error))

    def rows(self, chosen: list[int]) -> tuple[Tensor, Tensor]:
        """The chosen slots, one after the other."""
        keys, values = (
            torch.stack([slots[at] for at in chosen])
            for slots in (self.key_slots, self.value_slots)
        )
        return keys, values

    def release(self) -> None:
        """Lets go of all it holds, at once: memory on a GPU is dear."""
        self.clear()

    def clear(self) -> None:
        """Lets go of all it holds."""
        super().clear()
        self.key_slots, self.value_slots = [], []


def _lean(x: Tensor) -> Tensor:
    """The tensor without its graph; a copy of it where it is a small part of something large."""
    small = x.untyped_storage().nbytes() > 2 * x.nbytes
    return x.clone() if small else x.detach()


class PagePool:
    """Pages that wait to be used again.

    The training thread takes pages. Whoever has written their rows gives them back, on a thread of
    its own: `_returned` is a deque, which any thread may append to.
    """

    def __init__(self) -> None:
        self._free: dict[SlotType, list[Page]] = {}
        self._returned: deque[Page] = deque()

    def take(self, x: Tensor, error: Tensor, order: Order) -> Page:
        """A page whose slots fit."""
        while self._returned:
            page = self._returned.popleft()
            page.clear()
            self._free.setdefault(page.slot_type, []).append(page)
        free = self._free.get((x.shape, error.shape, x.dtype, error.dtype, order))
        if free:
            return free.pop()  # the one last used: still in cache
        return (HeldPage if calls_are_dear(error) else Page)(x, error, order)

    def give_back(self, pages: Sequence[Page]) -> None:
        """Takes pages whose rows are written, from any thread."""
        for page in pages:
            page.release()
            if page.is_reusable:
                self._returned.append(page)

    def forget(self) -> None:
        """Frees the memory of pages that wait."""
        self._returned.clear()
        self._free.clear()


class PageWriter:
    """Writes the rows of one stream to pages, slot by slot."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.pages: list[Page] = []

    def write(
        self,
        step: int,
        samples: BatchSamples,
        x: Tensor,
        error: Tensor,
        order: Order,
        shared: Tensor | None = None,
        reach: Tensor | None = None,
        is_ours: bool = False,
    ) -> int:
        """Puts one use of the layer into the next slot; returns its bytes.

        A matrix that its rows share was made for them, and is held as it is. So are records that
        were made for this slot alone (`is_ours`), where calls are dear.
        """
        page = self.pages[-1] if self.pages else None
        slot_type = (x.shape, error.shape, x.dtype, error.dtype, order)
        if page is None or len(page.marks) == page.slots or page.slot_type != slot_type:
            page = self._pool.take(x, error, order)
            self.pages.append(page)
        page.put(x, error, is_ours)
        if reach is not None:
            page.reach[len(page.marks)] = reach
        page.marks.append((step, samples))
        if shared is None:
            return page.slot_bytes
        page.shared.append(shared)
        return page.slot_bytes + shared.nbytes

    def take(self) -> list[Page]:
        """The pages written so far; the next row begins a new one."""
        pages, self.pages = self.pages, []
        return pages


@dataclass(frozen=True)
class StreamRows:
    """The records of one stream over some steps, sample by sample."""

    keys: Tensor
    values: Tensor
    segments: Tensor
    """(segments, 3): index of the step, batch number, records of each sample."""
    counts: Tensor
    """(segments,): records."""
    shared: Tensor | None = None
    """(segments, height × width): the matrix that a segment's rows share, where they do."""
    reach: Tensor | None = None
    """(segments, numbers): the sizes of what each segment's records summarize, added up."""
    known: dict[object, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)
    """Probes that were computed of these records, and will be asked for again."""

    @cached_property
    def sizes(self) -> Tensor:
        """(records,): the length of each record's values."""
        found: Tensor = torch.linalg.vector_norm(self.values, dim=1)
        return found

    @property
    def at(self) -> Tensor:
        """(records,): the index of each record's step."""
        return self.segments[:, 0].repeat_interleave(self.counts)

    def keep(self, segments: Tensor) -> StreamRows:
        """Only the segments where the mask is true."""
        chosen = segments.repeat_interleave(self.counts)
        rows = torch.nonzero(chosen).flatten().to(self.keys.device)  # else a GPU is waited for
        shared = None if self.shared is None else self.shared[segments.to(self.shared.device)]
        table, counts = self.segments[segments], self.counts[segments]
        reach = None if self.reach is None else self.reach[segments.to(self.reach.device)]
        return StreamRows(self.keys[rows], self.values[rows], table, counts, shared, reach)

    def by_segment(self) -> Iterator[StreamRows]:
        """The records of each segment by themselves, of which all have the same number."""
        count = max(1, len(self.counts))
        size = len(self.keys) // count
        for at in range(len(self.counts)):
            rows, own = slice(at * size, (at + 1) * size), slice(at, at + 1)
            shared = None if self.shared is None else self.shared[own]
            table, counts = self.segments[own], self.counts[own]
            yield StreamRows(self.keys[rows], self.values[rows], table, counts, shared)


def rows_by_sample(site: Site, page: Page, first: int, last: int) -> StreamRows | None:
    """A page's slots of steps `first` to `last` as records; None where it has none."""
    chosen = [
        (at, step - first, samples)
        for at, (step, samples) in enumerate(page.marks)
        if first <= step <= last
    ]
    if not chosen:
        return None
    samples, stretch = page.slot_type[4]
    slots = [at for at, _, _ in chosen]
    keys, values = page.rows(slots)
    keys = sample_major(keys, samples, stretch, site.key_dims)
    values = sample_major(values, samples, stretch, site.value_dims)
    count = len(keys) // len(chosen)
    table = [(step, batch.number, count // samples) for _, step, batch in chosen]
    counts = torch.full((len(chosen),), count)
    known = page.reach.keys() >= set(slots)
    reach = torch.stack([page.reach[at] for at in slots]) if known else None
    return StreamRows(keys, values, torch.tensor(table), counts, page.matrices(slots), reach)
