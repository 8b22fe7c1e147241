"""A batch: one forward pass, and whose samples its rows are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from dualform.errors import SampleIdsError
from dualform.ledger.samples import SampleId


@dataclass(frozen=True, slots=True)
class BatchSamples:
    """Whose samples the rows of a batch are, once rows have been written."""

    number: int
    size: int
    ids: Tensor | Sequence[SampleId] | None
    whole: BatchSamples | None = None
    """The batch it is made of, where its samples are those of single rows."""
    places: Tensor | None = None
    """Then for each of them its place in the whole."""


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
    fixed: BatchSamples | None = None
    """Whose samples its rows are, once some were written."""

    def fix(self) -> BatchSamples:
        """Rows are written: what they belong to changes no more."""
        whole = None if self.whole is None else self.whole.fixed or self.whole.fix()
        self.fixed = BatchSamples(self.number, self.size, self.ids, whole, self.places)
        return self.fixed

    def begin(self, given: Iterator[Sequence[int]]) -> None:
        """Takes the size from the shapes of what the model is given, and holds the ids to it."""
        first = next(given, None)
        if first is None:
            return
        self.begun = True
        if self.ids is None:
            self.size = first[0]
        elif any(len(self.ids) in shape[:2] for shape in chain([first], given)):
            self.size = len(self.ids)
        elif len(self.ids) == 1 and len(first) == 1:
            self.size = 1  # one id for one sample that has no dimension of its own
        elif self.size < 0:
            raise SampleIdsError(
                f"recorder.samples got {len(self.ids)} ids, but the model was given a batch of "
                f"shape {tuple(first)}; give one id for each sample of the batch, or for each "
                "entry of its first dimension: of a graph network, one for each node."
            )

    def begin_inside(self, lead: Sequence[int]) -> None:
        """The same where the model is given no tensor: from the first rows of one of its layers."""
        self.size = (lead[0] if lead else 1) if self.ids is None else len(self.ids)

    def sample_of(self) -> Tensor:
        """(places,): the sample at each place of the batch, numbered; a sample may come twice."""
        if self.ids is None:
            return torch.arange(self.size, device="cpu")
        ids = self.ids.tolist() if isinstance(self.ids, Tensor) else self.ids
        known: dict[SampleId, int] = {}
        numbers = [known.setdefault(sample, len(known)) for sample in ids]
        return torch.tensor(numbers, device="cpu")
