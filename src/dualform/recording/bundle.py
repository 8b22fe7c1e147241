"""Bundles: the summaries of many layers in one tensor, a forward pass each.

A compiled model's backward pass gives the summaries of all layers at once. To write each to a page
of its own takes the interpreter longer than the model takes to run. So a pass is kept as it comes,
and cut into the records of each layer when they are booked, on the writer's thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dualform.owners import BatchSamples
from dualform.recording.pages import Page


class BundlePlace(NamedTuple):
    """Where a bundle has the summaries of one stream."""

    columns: slice
    shape: tuple[int, int]
    """Of one summary."""


@dataclass(eq=False)
class Bundle:
    """Some passes, each a tensor (samples, numbers of all streams).

    The training thread fills it. Once it is handed over, nobody adds to it.

    >>> bundle = Bundle()
    >>> bundle.add(1, BatchSamples(1, 2, None), torch.arange(12.0).reshape(2, 6))
    48
    >>> [page] = bundle.pages(BundlePlace(slice(2, 6), (2, 2)))
    >>> page.rows([0])[1].tolist()
    [[[[2.0, 3.0], [4.0, 5.0]], [[8.0, 9.0], [10.0, 11.0]]]]
    """

    marks: list[tuple[int, BatchSamples]] = field(default_factory=list)
    """The step and the samples of each pass."""
    passes: list[Tensor] = field(default_factory=list)
    _joined: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    """Passes that were asked for together, one after the other."""

    def add(self, step: int, samples: BatchSamples, records: Tensor) -> int:
        """Keeps a pass; returns its bytes."""
        self.marks.append((step, samples))
        self.passes.append(records)
        return records.nbytes

    def split(self, step: int) -> tuple[Bundle, Bundle]:
        """The passes of other steps, and those of this one."""
        parts = (Bundle(), Bundle())
        for (at, samples), records in zip(self.marks, self.passes, strict=True):
            parts[at == step].add(at, samples, records)
        return parts

    def pages(self, place: BundlePlace) -> list[BundlePage]:
        """The records of one stream: a page for neighboring passes of one size, in their order."""
        runs = itertools.groupby(range(len(self.marks)), lambda at: self.marks[at][1].size)
        return [BundlePage(self, place, size, list(passes)) for size, passes in runs]

    def joined(self, chosen: Sequence[int], size: int) -> Tensor:
        """(passes, samples, numbers): some passes. All streams ask for the same ones."""
        key = tuple(chosen)
        if key not in self._joined:
            self._joined[key] = torch.stack([self.passes[at][:size] for at in chosen])
        return self._joined[key]

    def clear(self) -> None:
        """Lets go of all passes."""
        self.passes.clear()
        self._joined.clear()


class BundlePage(Page):
    """The records of one stream in a bundle, as a page."""

    is_reusable = False

    def __init__(self, bundle: Bundle, place: BundlePlace, size: int, passes: list[int]) -> None:
        self._bundle, self._place, self._at = bundle, place, passes
        self.marks = [bundle.marks[at] for at in self._at]
        self.shared, self.reach = [], {}
        first = bundle.passes[self._at[0]]
        keys, values = torch.Size((size, 0)), torch.Size((size, *place.shape))
        self.slot_type = (keys, values, first.dtype, first.dtype, (size, 1))

    def rows(self, chosen: list[int]) -> tuple[Tensor, Tensor]:
        """The chosen passes."""
        size = self.slot_type[4][0]
        records = self._bundle.joined([self._at[at] for at in chosen], size)
        values = records[:, :, self._place.columns]
        shape = (len(chosen), size, *self._place.shape)
        return values.new_empty(len(chosen), size, 0), values.reshape(shape)

    def release(self) -> None:
        """Its rows are written; they need no memory any more."""
        self._bundle.clear()
