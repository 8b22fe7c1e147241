"""Batches so much smaller than others that a mean loss gives their samples far more weight."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from dualform.recording.accounts import Evidence
from dualform.recording.messages import RecordedStep

SEVERAL = 3
"""A batch is short if others are so many times as large."""


class SeenBatch(NamedTuple):
    """One batch in one layer: its step's index, how many samples it has, and their errors."""

    at: int
    samples: int
    errors: Tensor

    def weight(self, factors: Tensor) -> float:
        """The size of a sample's error, on average, as the optimizer saw it."""
        size = float(self.errors.float().norm()) * float(factors[self.at].abs())
        return size / math.sqrt(self.samples)


class BatchSizes:
    """Looks at the errors of short batches: under a mean loss they are larger, under a sum not."""

    def __init__(self) -> None:
        self._stream = ""
        self._usual: tuple[int, float] = (0, 0.0)
        """How many samples the largest batch had, and the weight of one of them."""
        self._told = False

    def remark(
        self, steps: Sequence[RecordedStep], evidence: Sequence[Evidence], factors: Tensor
    ) -> str:
        """What to tell the user of these steps, once; else nothing."""
        if self._told:
            return ""
        for at, account in enumerate(evidence):
            batches = list(self._batches(account))
            if batches:
                text = self._compare(steps, batches, factors[:, at])
                self._told = bool(text)
                return text
        return ""

    def _batches(self, account: Evidence) -> Iterator[SeenBatch]:
        """The batches of one stream, the same for all of the run."""
        for feed, rows in account.pieces:
            self._stream = self._stream or feed.stream.name
            if feed.stream.name == self._stream:
                errors = rows.values.split(rows.counts.tolist())  # type: ignore[no-untyped-call]
                for (at, _, each), part in zip(rows.segments.tolist(), errors, strict=True):
                    if each and len(part):
                        yield SeenBatch(at, len(part) // each, part)

    def _compare(
        self, steps: Sequence[RecordedStep], batches: Sequence[SeenBatch], factors: Tensor
    ) -> str:
        largest = max(batches, key=lambda batch: (batch.samples, batch.at))
        if largest.samples >= self._usual[0]:
            self._usual = (largest.samples, largest.weight(factors))
        usual, weight = self._usual
        for batch in batches:
            times = usual / batch.samples
            if times >= SEVERAL and batch.weight(factors) >= max(2.0, times / 2) * weight > 0:
                return (
                    f"the batch of step {steps[batch.at].number} has {batch.samples} samples, "
                    f"others have {usual}: under a mean loss each of its samples counts about "
                    f"{times:.0f} times as much. Use drop_last=True, or multiply the loss by "
                    f"len(batch) / {usual}."
                )
        return ""
