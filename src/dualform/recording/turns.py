"""What recorded steps take, timed in turns with the same steps without a recorder.

A machine that is busy makes both sides of a turn slow, so their ratio is steadier than seconds. The
steps of a turn are written while those of the next one are made, as in a run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from dualform.recording.spot_checks import EVERY
from dualform.recording.step_recorder import StepRecorder

SECONDS, LEAST, MOST = 0.1, 32, 400
"""The recorded steps of a turn take about so long, and are at least and at most so many."""
LONG = 1.0
"""A turn has fewer steps than the least if they would take longer than so many seconds."""
TURN_BYTES = 1 << 29
"""A turn has fewer steps if they would store more bytes than these."""
TURNS, FEWEST = 5, 3
"""So many turns are made; the fewest where one takes longer than `LONG`."""
CHECKS = 3
"""So many steps are made twice, to see what a spot check takes."""
WARM = 8
"""So many steps come before those that are timed, fewer where they take longer than `LONG`; the
fastest says how many make a turn."""


@dataclass(frozen=True)
class StepTimes:
    """What steps took.

    >>> StepTimes(plain=0.01, ratio=1.5, spot_check=0.0, count=10).seconds
    0.015
    """

    plain: float
    """Seconds of a step without a recorder."""
    ratio: float
    """How many times as long a recorded step took, with what it takes to write it."""
    spot_check: float
    """Seconds that a spot check adds to its step."""
    count: int
    """How many recorded steps were made."""

    @property
    def seconds(self) -> float:
        """Of a recorded step."""
        return self.ratio * self.plain


def time_in_turns(
    recording: StepRecorder,
    recorded: Callable[[], None],
    plain: Callable[[], None],
    now: Callable[[], float],
    step_bytes: float = 0.0,
) -> StepTimes:
    """Times recorded steps in turns with plain ones: a median of their ratios.

    A step stores `step_bytes`: turns that would store much are shorter.

    Early steps have more spot checks than later ones. Here they are made apart.
    """
    checks, first = recording.stages.spot_checks, recording.step
    checks.wait(None)
    each, began = math.inf, now()
    for _ in range(WARM):
        if each < math.inf and now() - began > LONG:
            break
        plain()
        start = now()
        recorded()
        each = min(each, max(now() - start, 1e-9))
    count = _steps_of_a_turn(each, step_bytes)

    def turn() -> float:
        start = now()
        recording.hand_over(flush=True)
        for _ in range(count):
            recorded()
        recording.stages.delivery.wait()
        return (now() - start) / count

    def without() -> float:
        start = now()
        for _ in range(count):
            plain()
        return (now() - start) / count

    turn()
    pairs = [(turn(), without())]
    turns = TURNS if sum(pairs[0]) * count < LONG else FEWEST
    pairs += [(turn(), without()) for _ in range(turns - 1)]
    ratio = statistics.median(mine / other for mine, other in pairs)
    usual = statistics.median(other for _, other in pairs)
    check = max(0.0, _checked(recording, recorded, now))
    return StepTimes(usual, ratio + check / EVERY / usual, check, recording.step - first)


def bytes_stored(step_bytes: float) -> float:
    """How much all recorded steps of all turns store, at most.

    >>> bytes_stored(1 << 20) / (1 << 20)
    2420.0
    """
    apart = WARM + 4 * CHECKS
    return apart * step_bytes + (TURNS + 1) * min(MOST * step_bytes, max(TURN_BYTES, step_bytes))


def _steps_of_a_turn(seconds: float, step_bytes: float) -> int:
    """How many steps make a turn, if each takes so long and stores so much.

    A turn of few steps pays for a hand-over of all streams, which a run makes more seldom.

    >>> [_steps_of_a_turn(seconds, 1e6) for seconds in (1e-4, 1e-3, 0.02, 0.1, 3.0)]
    [400, 100, 32, 10, 1]
    >>> _steps_of_a_turn(0.02, 1e8)
    5
    """
    most = min(MOST, LONG / seconds, TURN_BYTES / max(step_bytes, 1.0))
    return max(1, min(round(most), max(LEAST, round(SECONDS / seconds))))


def _checked(
    recording: StepRecorder, recorded: Callable[[], None], now: Callable[[], float]
) -> float:
    """What a spot check adds to its step, and to the step after it, which compares again."""

    def two_steps(steps: int | None) -> float:
        recording.stages.spot_checks.wait(steps)
        start = now()
        recorded()
        recorded()
        return now() - start

    pairs = [(two_steps(1), two_steps(None)) for _ in range(CHECKS)]
    return statistics.median(checked - usual for checked, usual in pairs)
