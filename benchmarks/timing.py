"""Interleaved timing: noise that comes and goes hits both sides of a ratio alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """Two things timed in turns."""

    seconds: float
    """Median of the subject."""
    reference: float
    """Median of the reference."""
    ratio: float
    """Median of the ratios of neighboring turns."""
    spread: tuple[float, float]
    """Quartiles of those ratios."""

    def __str__(self) -> str:
        low, high = self.spread
        return f"{self.ratio:.3f} (quartiles {low:.3f}–{high:.3f})"


def compare(
    subject: Callable[[], object],
    reference: Callable[[], object],
    turns: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Times both `turns` times, alternating which goes first.

    On a busy machine, `time.process_time` with one thread counts only what the work itself took.
    """
    times: list[tuple[float, float]] = []
    for turn in range(turns):
        if turn % 2:
            second, first = seconds(reference, clock), seconds(subject, clock)
        else:
            first, second = seconds(subject, clock), seconds(reference, clock)
        times.append((first, second))
    ratios = [a / b for a, b in times]
    low, _, high = statistics.quantiles(ratios, n=4)
    return Comparison(
        statistics.median(a for a, _ in times),
        statistics.median(b for _, b in times),
        statistics.median(ratios),
        (low, high),
    )


def seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """How long it took."""
    began = clock()
    work()
    return clock() - began
