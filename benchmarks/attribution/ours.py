"""Our methods, from the recorded run alone; all but EK-FAC through the public API."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

import dualform
from benchmarks.attribution.ekfac import ekfac
from benchmarks.attribution.trained import Trained

OURS = ("ridge", "ridge-32", "accounting", "tracin", "fisher", "ekfac", "explain")
"""By the name of the method, and of how many directions are kept where that is not the default."""


def scores(trained: Trained, method: str) -> NDArray[np.float64]:
    """(samples, queries) in the order of the samples."""
    run, (x, y) = dualform.open(trained.ledger), trained.task.queries()

    def output(out: Tensor, label: Tensor) -> Tensor:
        return trained.task.output(out, label).sum()

    if method == "ekfac":
        return ekfac(run, trained.model(), x, (output, y))[np.argsort(np.array(run.ids))]
    if method == "explain":
        found = run.explain(trained.model(), x, (output, y))
    else:
        name, _, rank = method.partition("-")
        kept = int(rank) if rank else None
        found = run.influence(trained.model(), x, (output, y), method=name, rank=kept)
    return found.values[np.argsort(np.array(found.ids))]
