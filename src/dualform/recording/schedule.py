"""When steps are handed over to the writer's thread, as a shard or a part of one."""

from __future__ import annotations

import time

FLUSH_SECONDS = 30.0
WITNESS = 8
"""Weights are kept with a shard when that adds at most an eighth to what was written."""


class Schedule:
    """Counts what has come together since steps were last handed over.

    >>> schedule = Schedule(handover_bytes=100, shard_bytes=250)
    >>> schedule.after_step(60, must_keep=False, late=schedule.is_late), schedule.due
    (None, None)
    >>> schedule.after_step(120, must_keep=False, late=schedule.is_late), schedule.due
    (None, (False, ''))
    """

    def __init__(self, handover_bytes: int, shard_bytes: int) -> None:
        self._handover_bytes, self._shard_bytes = handover_bytes, shard_bytes
        self.due: tuple[bool, str] | None = None
        """How the steps so far are to be handed over: whether as a shard, and its mark."""
        self.total = 0
        """How many bytes were handed over so far."""
        self._shard = self._unwitnessed = 0
        self._flushed = time.monotonic()

    @property
    def is_late(self) -> bool:
        """Whether the last shard was long ago."""
        return time.monotonic() - self._flushed > FLUSH_SECONDS

    def after_step(self, size: int, must_keep: bool, late: bool) -> None:
        """A step was made, and so many bytes have come together."""
        if must_keep:
            self.due = (True, "state")
        elif late or size >= self._handover_bytes:
            self.due = (late or self._shard + size >= self._shard_bytes, "")

    def hand_over(self, size: int, flush: bool, marked: bool, weight_bytes: int) -> bool:
        """So many bytes are handed over; whether the weights are to be kept with them."""
        self.due = None
        self.total += size
        self._shard += size
        self._unwitnessed += size
        if flush:
            self._shard, self._flushed = 0, time.monotonic()
        if not (marked or (flush and self._unwitnessed >= WITNESS * weight_bytes)):
            return False
        self._unwitnessed = 0
        return True
