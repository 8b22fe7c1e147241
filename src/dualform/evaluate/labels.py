"""Which labels may be wrong, from one recorded run: samples whose errors stay large."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dualform.read import Reading, Run, Scores
from dualform.read.scan import Scan
from dualform.read.scores import Array


@dataclass(frozen=True)
class _Errors:
    """Each row's error: its size, the place of its sample among the ids, and its step."""

    sizes: Array
    samples: NDArray[np.int64]
    steps: NDArray[np.int64]


def suspicion(run: Run, layer: str | None = None) -> Scores:
    """`mean ‖e‖` over a sample's rows: how large the errors were that came back to a layer.

    A network learns what samples have in common before it learns the exceptions by heart, so that
    the errors of a wrong label are large in most visits, even if the last ones are small. Sizes are
    relative to the mean over steps with as many rows: a short batch weighs like the others.

    >>> from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run()
    >>> suspicion(run).top(2).ids
    [3, 0]

    Args:
        layer: by default the last one, whose errors are those of the model's output.
    """
    spotlight = run.revisit(run.ids[:1])
    errors = _errors(spotlight.last if layer is None else spotlight[layer])
    relative = errors.sizes / _usual(errors)
    sums, rows = (
        np.bincount(errors.samples, weights, minlength=len(run.ids))
        for weights in (relative, np.ones_like(relative))
    )
    values = (sums / np.maximum(rows, 1))[:, None]
    return Scores(run.ids, values, ["its label"], None, run.samples.labels, "suspicion")


def _errors(reading: Reading) -> _Errors:
    """All rows of a layer, as far as they were recorded by the step the run is read at."""
    source = reading.source
    stream = source.ledger.info.stream(reading.layer)
    numbers = source.numbers.to(source.device)
    found = [
        (c.values.norm(dim=1).double(), torch.searchsorted(numbers, c.samples.long()), c.steps)
        for c in Scan(source.ledger, stream, source.until, source.device)
    ]
    return _Errors(*(torch.cat(parts).cpu().numpy() for parts in zip(*found, strict=True)))


def _usual(errors: _Errors) -> Array:
    """(rows,): the mean size over all rows of steps with as many rows; 1 where that is 0.

    Losses that are means make errors smaller in larger batches, sums do not; this fits both.
    """
    beside = np.bincount(errors.steps)[errors.steps]
    _, group = np.unique(beside, return_inverse=True)
    mean = np.bincount(group, errors.sizes) / np.bincount(group)
    return np.asarray(np.where(mean > 0, mean, 1.0)[group])
