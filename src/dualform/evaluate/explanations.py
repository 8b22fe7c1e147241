"""Completeness: do the parts of explanations add up to what they explain?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Group
from rich.table import Table

from dualform.errors import EvaluationError
from dualform.read.display import Displayed, framed
from dualform.read.scores import Array

TOLERANCE = 1e-3


@dataclass(frozen=True, repr=False)
class Completeness(Displayed):
    """How far the parts of each explanation miss its total, relative to it: size only.

    >>> Completeness(np.array([0.001, 0.0, 0.02])).worst
    0.02
    """

    errors: Array
    """(explanations,)."""

    @property
    def median(self) -> float:
        """The median over the explanations."""
        return float(np.median(self.errors))

    @property
    def worst(self) -> float:
        """The largest over the explanations."""
        return float(self.errors.max())

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values, for JSON."""
        return {"median": self.median, "worst": self.worst, "explanations": len(self.errors)}

    def __rich__(self) -> Group:
        table = Table()
        for name in ("median", "95 % are below", "worst", f"below {TOLERANCE:.1%}"):
            table.add_column(name, justify="right")
        figures = (self.median, float(np.quantile(self.errors, 0.95)), self.worst)
        within = (self.errors < TOLERANCE).mean()
        table.add_row(*(f"{figure:.2e}" for figure in figures), f"{within:.1%}")
        return framed(f"completeness errors of {len(self.errors):,} explanations", table)


def completeness(errors: ArrayLike) -> Completeness:
    """Median and worst of relative errors, `|Σ parts − total| / |total|`, one an explanation.

    >>> result = completeness([0.001, -0.002, 0.0])
    >>> result.median, result.worst
    (0.001, 0.002)
    """
    found = np.abs(np.asarray(errors, dtype=np.float64)).ravel()
    if not found.size or not np.isfinite(found).all():
        raise EvaluationError(
            f"completeness got {found.size} errors, {int((~np.isfinite(found)).sum())} of them not "
            "finite; give one finite relative error for each explanation."
        )
    return Completeness(found)
