"""How much each visit of a sample counts in the matrix; plain data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.ledger import Book
from dualform.read.samples_matrix.visits import Visits


class VisitWeights(ABC):
    """How much each visit of a sample counts; plain data."""

    @abstractmethod
    def of(self, book: Book, visits: Visits, chosen: Tensor) -> Tensor:
        """(chosen,): one number for each of some visits."""


@dataclass(frozen=True)
class StepWeights(VisitWeights):
    """One number for all visits of a step."""

    numbers: Mapping[str, Tensor]
    """(T + 1,) for each book, by the step's number."""

    def of(self, book: Book, visits: Visits, chosen: Tensor) -> Tensor:
        """Each visit as its step."""
        return self.numbers[book.name].cpu()[visits.steps(chosen)]


@dataclass(frozen=True)
class LastVisitWeights(VisitWeights):
    """Minus the number of samples in the batch, for the last visit of each sample; else 0.

    So each sample has its own gradient, as it was when training last saw it.
    """

    samples: Mapping[str, Tensor]
    """The stored ids that a stream saw, sorted; by stream."""
    last: Mapping[str, Tensor]
    """The last step that saw each of them."""
    batch_sizes: Mapping[str, Tensor]
    """(T + 1,): how many of them each step saw."""

    @classmethod
    def of_visits(cls, visits: Mapping[str, Visits], until: int) -> LastVisitWeights:
        """From the visits of all shards."""
        samples, last, sizes = {}, {}, {}
        for name, seen in visits.items():
            every = torch.arange(len(seen))
            at, who = seen.steps(every), seen.samples(every)
            samples[name], place = torch.unique(who, return_inverse=True)
            steps = torch.zeros(len(samples[name]), dtype=torch.long)
            last[name] = steps.scatter_reduce_(0, place, at, "amax")
            pairs = torch.unique(torch.stack([at, who]), dim=1)
            sizes[name] = torch.bincount(pairs[0], minlength=until + 1)
        return cls(samples, last, sizes)

    def of(self, book: Book, visits: Visits, chosen: Tensor) -> Tensor:
        """Each visit by its step and sample."""
        name, steps = visits.stream.name, visits.steps(chosen)
        last = self.last[name][torch.searchsorted(self.samples[name], visits.samples(chosen))]
        return -torch.where(steps == last, self.batch_sizes[name][steps], 0).double()
