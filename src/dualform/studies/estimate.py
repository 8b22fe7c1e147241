"""A mean with its interval: what a study says of a number that it measured several times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

T_97_5 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t at 97.5 %, for 1 to 9 degrees of freedom."""


@dataclass(frozen=True)
class Estimate:
    """A mean, and half the width of its 95 % interval.

    >>> print(Estimate(0.9731, 0.0042, 5), Estimate(0.5, math.nan, 1))
    0.973 ± 0.004 0.5
    """

    mean: float
    interval: float
    """Half the width of the 95 % interval; NaN where one value tells nothing of it."""
    count: int
    """How many values the mean has."""

    def __str__(self) -> str:
        if math.isnan(self.interval):
            return f"{self.mean:.3g}"
        if self.interval == 0:
            return f"{self.mean:.3g} ± 0"
        digits = max(0, -math.floor(math.log10(abs(self.interval))))
        return f"{self.mean:.{digits}f} ± {self.interval:.{digits}f}"


def estimate(values: Iterable[float], scale: float = 1.0) -> Estimate:
    """The mean of some values, with the 95 % interval by Student's t.

    >>> print(estimate([1.0, 2.0, 3.0, 4.0, 5.0]))
    3 ± 2
    >>> print(estimate([0.91, 0.93, 0.92], scale=100))
    92 ± 2
    """
    found = [scale * float(value) for value in values]
    if not found:
        return Estimate(math.nan, math.nan, 0)
    mean, free = statistics.fmean(found), len(found) - 1
    if free < 1:
        return Estimate(mean, math.nan, len(found))
    t = T_97_5[free - 1] if free <= len(T_97_5) else 1.96 + 2.4 / free
    return Estimate(mean, t * statistics.stdev(found) / math.sqrt(len(found)), len(found))


def differs(found: Estimate, other: float = 0.0) -> bool:
    """Whether an interval leaves a number out; without an interval, nothing is known.

    >>> differs(Estimate(1.0, 0.5, 3)), differs(Estimate(1.0, 2.0, 3))
    (True, False)
    """
    return abs(found.mean - other) > found.interval
