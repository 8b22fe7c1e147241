"""Which labels may be wrong, from one recorded run: samples whose errors stay large."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.errors import ReadingError
from dualform.read.contributions import Source
from dualform.read.scan import Chunk
from dualform.read.scores import Array, Scores
from dualform.read.stream_folds import CollectedRows


@dataclass(frozen=True)
class RowErrors:
    """The errors that came back to a layer: each row's size, sample (its place) and step."""

    sizes: Array
    samples: NDArray[np.int64]
    steps: NDArray[np.int64]

    @cached_property
    def relative(self) -> Array:
        """(rows,): sizes over the mean of all rows of steps with as many rows.

        Losses that are means make errors smaller in larger batches, sums do not; this fits both.
        """
        beside = np.bincount(self.steps)[self.steps]
        _, group = np.unique(beside, return_inverse=True)
        mean = np.bincount(group, self.sizes) / np.bincount(group)
        return np.asarray(self.sizes / np.where(mean > 0, mean, 1.0)[group])


@dataclass(frozen=True)
class ErrorSizes(CollectedRows):
    """The size of each row's error, the place of its sample, and its step."""

    numbers: Tensor
    """(samples,): the stored ids that occur, sorted."""

    def of(self, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
        """In main memory."""
        sizes, samples = chunk.values.norm(dim=1).double().cpu(), chunk.samples.long().cpu()
        return sizes, torch.searchsorted(self.numbers, samples), chunk.steps.cpu().clone()


def row_errors(source: Source, layer: str) -> RowErrors:
    """All rows of a layer, as far as they were recorded by the step that is read."""
    fold = ErrorSizes(source.ledger.info.stream(layer), source.numbers, device=source.device)
    found = source.reader.reduce(fold, source.until)
    if not found:
        raise ReadingError(
            f"layer '{layer}' has no rows up to step {source.until}; ask at a later step."
        )
    return RowErrors(*(torch.cat(parts).numpy() for parts in zip(*found, strict=True)))


def make_suspicion(source: Source, layer: str) -> Scores:
    """`mean ‖e‖` over each sample's rows, relative to other rows."""
    errors = row_errors(source, layer)
    count = len(source.ids)
    sums = np.bincount(errors.samples, errors.relative, minlength=count)
    rows = np.bincount(errors.samples, minlength=count)
    values = (sums / np.maximum(rows, 1))[:, None]
    return Scores(source.ids, values, ["its label"], None, source.labels, "suspicion")
