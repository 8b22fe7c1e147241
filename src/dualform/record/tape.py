"""Tapes: where backward passes write a layer's inputs and errors.

A row is copied at the one moment when both are certain: the error has just arrived, and autograd
still guards the input against changes. The copies go into pages that are used again and again, so
recording needs a fixed amount of memory and the allocator sees nothing of it. On a GPU, where every
copy is a call, what layers made is held instead of copied.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor

from dualform.errors import SampleIdsError
from dualform.ledger.samples import SampleId

PAGE_BYTES = 4 << 20
PAGE_SLOTS = 256

Order: TypeAlias = tuple[int, int]
"""How many samples there are, and how many neighboring rows belong to one."""
Form: TypeAlias = tuple[torch.Size, torch.Size, torch.dtype, torch.dtype, Order]
"""Shapes and dtypes of keys and values, and the order of their rows."""


def calls_are_dear(tensor: Tensor) -> bool:
    """Whether an operation on a tensor costs more than the copy that would spare it: on a GPU."""
    return tensor.is_cuda


@dataclass(slots=True)
class Batch:
    """One forward pass: whose samples its rows are. Without ids they are numbered in order."""

    number: int
    ids: Tensor | Sequence[SampleId] | None
    step: int
    size: int = -1
    """How many samples; -1 until that is known."""
    begun: bool = False
    """Whether a forward pass of the model has begun it."""
    calls: int = 0
    """How many uses of parameters have been seen in it."""
    whole: Batch | None = None
    """The batch it is made of, where its samples are those of single rows."""
    places: Tensor | None = None
    """Then for each of them its place in the whole."""

    def begin(self, given: Iterator[Sequence[int]]) -> None:
        """Takes the size from the shapes of what the model is given, and holds the ids to it."""
        first = next(given, None)
        if first is None:
            return
        self.begun = True
        if self.ids is None:
            self.size = first[0]
        elif not self._fits(chain([first], given)) and not self._is_one(first):
            raise SampleIdsError(
                f"recorder.samples got {len(self.ids)} ids, but the model was given a batch of "
                f"shape {tuple(first)}; give one id for each sample of the batch, or for each "
                "entry of its first dimension: of a graph network, one for each node."
            )

    def begin_inside(self, lead: Sequence[int]) -> None:
        """The same where the model is given no tensor: from the first rows of one of its layers."""
        self.size = (lead[0] if lead else 1) if self.ids is None else len(self.ids)

    def alone(self) -> None:
        """What was taken for a batch is a single sample: a layer saw it without a dimension."""
        if self.ids is None:
            self.size = 1

    def sample_of(self) -> Tensor:
        """(places,): the sample at each place of the batch, numbered; a sample may come twice."""
        if self.ids is None:
            return torch.arange(self.size, device="cpu")
        ids = self.ids.tolist() if isinstance(self.ids, Tensor) else self.ids
        known: dict[SampleId, int] = {}
        numbers = [known.setdefault(sample, len(known)) for sample in ids]
        return torch.tensor(numbers, device="cpu")

    def _fits(self, given: Iterable[Sequence[int]]) -> bool:
        """Whether a shape has as many samples as there are ids."""
        assert self.ids is not None
        if any(len(self.ids) in shape[:2] for shape in given):
            self.size = len(self.ids)
        return self.size >= 0

    def _is_one(self, shape: Sequence[int]) -> bool:
        """Whether one id is meant for one sample that has no dimension of its own."""
        assert self.ids is not None
        if len(self.ids) == 1 and len(shape) == 1:
            self.size = 1
        return self.size == 1


class Page:
    """Slots of one form, and for each that is filled the step and the batch it belongs to."""

    def __init__(self, x: Tensor, error: Tensor, order: Order) -> None:
        self.form = (x.shape, error.shape, x.dtype, error.dtype, order)
        self.slot_bytes = x.nbytes + error.nbytes
        self.marks: list[tuple[int, Batch]] = []
        self._make(x, error)

    def _make(self, x: Tensor, error: Tensor) -> None:
        self.slots = max(1, min(PAGE_SLOTS, PAGE_BYTES // max(1, self.slot_bytes)))
        self._keys = x.new_empty((self.slots, *x.shape))
        self._values = error.new_empty((self.slots, *error.shape))
        self.key_slots, self.value_slots = list(self._keys), list(self._values)

    def put(self, x: Tensor, error: Tensor) -> None:
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

    def clear(self) -> None:
        """Makes all slots free."""
        self.marks = []


class HeldPage(Page):
    """The same where calls are dear: slots hold what layers made, and are read all at once.

    Should the loop change it before that, the rows will not explain the gradient, and a note says
    so. What the loop itself made, which it may well fill again, is copied.
    """

    def _make(self, x: Tensor, error: Tensor) -> None:
        self.slots = sys.maxsize
        self.clear()

    def put(self, x: Tensor, error: Tensor) -> None:
        """Holds a use of the layer."""
        self.key_slots.append(_lean(x) if x.grad_fn is not None else x.clone())
        self.value_slots.append(_lean(error))

    def rows(self, chosen: list[int]) -> tuple[Tensor, Tensor]:
        """The chosen slots, one after the other."""
        keys, values = (
            torch.stack([slots[at] for at in chosen])
            for slots in (self.key_slots, self.value_slots)
        )
        return keys, values

    def clear(self) -> None:
        """Lets go of all it holds."""
        self.marks, self.key_slots, self.value_slots = [], [], []


def _lean(x: Tensor) -> Tensor:
    """The tensor without its graph; a copy of it where it is a small part of something large."""
    small = x.untyped_storage().nbytes() > 2 * x.nbytes
    return x.clone() if small else x.detach()


class Pool:
    """Pages that wait to be used again."""

    def __init__(self) -> None:
        self._free: dict[Form, deque[Page]] = {}

    def take(self, x: Tensor, error: Tensor, order: Order) -> Page:
        """A page whose slots fit."""
        form = (x.shape, error.shape, x.dtype, error.dtype, order)
        free = self._free.setdefault(form, deque())
        if free:
            return free.pop()  # the one last used: still in cache
        return (HeldPage if calls_are_dear(error) else Page)(x, error, order)

    def give_back(self, pages: Sequence[Page]) -> None:
        """Takes pages whose rows are written (from the writer's thread, too)."""
        for page in pages:
            page.clear()
            self._free[page.form].append(page)

    def forget(self) -> None:
        """Frees the memory of pages that wait."""
        for free in self._free.values():
            free.clear()


class Tape:
    """The pages one layer's rows are written to."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.pages: list[Page] = []

    def write(self, step: int, batch: Batch, x: Tensor, error: Tensor, order: Order) -> int:
        """Puts one use of the layer into the next slot; returns its bytes."""
        page = self.pages[-1] if self.pages else self._turn(x, error, order)
        form = (x.shape, error.shape, x.dtype, error.dtype, order)
        if len(page.marks) == page.slots or page.form != form:
            page = self._turn(x, error, order)
        page.put(x, error)
        page.marks.append((step, batch))
        return page.slot_bytes

    def take(self) -> list[Page]:
        """The pages written so far; the next row begins a new one."""
        pages, self.pages = self.pages, []
        return pages

    def _turn(self, x: Tensor, error: Tensor, order: Order) -> Page:
        self.pages.append(self._pool.take(x, error, order))
        return self.pages[-1]
