"""Folding in this process: several parts of a run side by side, in threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from itertools import islice
from queue import SimpleQueue
from threading import Event

import torch

from dualform.read.engine.interface import Fold, Partial
from dualform.read.engine.parts import PART_BYTES, in_parts, in_tree
from dualform.read.engine.read_ahead import ReadAhead
from dualform.read.engine.serial import Serial, fold_all, fold_progress
from dualform.read.engine.shards import ShardRange
from dualform.read.progress import LateProgress, reporting

PARTIAL_BYTES = 16 << 20
"""How large a partial result may be, so that those of several parts fit into memory together."""


class Threads(Serial):
    """Folds parts of neighboring shards side by side, and merges them in a fixed order.

    Torch already spreads the work of one shard over its own threads. So there are as many workers
    as there are processors for each of those: one, unless torch was told to use fewer.

    >>> from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run()
    >>> Threads(workers=4).workers
    4

    Args:
        part_bytes: how large the files of a part are at least.
    """

    def __init__(self, workers: int | None = None, *, part_bytes: int = PART_BYTES) -> None:
        self.workers = workers or max(1, _processors() // torch.get_num_threads())
        self._part_bytes = part_bytes

    def reduce(
        self, fold: Fold[Partial], shards: Sequence[ShardRange], onto: Partial | None = None
    ) -> Partial:
        """The result of all shards."""
        if torch.device(fold.device).type != "cpu":
            return ReadAhead().reduce(fold, shards, onto)
        can_cut = fold.partial_bytes <= PARTIAL_BYTES
        parts = in_parts(fold, shards, self._part_bytes) if can_cut else []
        alone = self.workers == 1 and not fold.rounds  # what was found speeds up what comes after
        if alone or len(parts) < 2:
            return super().reduce(fold, shards, onto)
        with fold_progress(fold, shards) as progress:
            make = _one_by_one if self.workers == 1 else self._side_by_side
            total = in_tree(fold.merge, make(fold, parts, progress))
        return total if onto is None else fold.merge(onto, total)

    def _side_by_side(
        self, fold: Fold[Partial], parts: Sequence[Sequence[ShardRange]], progress: LateProgress
    ) -> Iterator[Partial]:
        """The partial result of each part; progress is told by this thread, which may cancel."""
        news: SimpleQueue[float] = SimpleQueue()
        stop = Event()

        def report(count: float) -> None:
            if stop.is_set():
                raise _Stopped
            news.put(count)

        def work(part: Sequence[ShardRange]) -> Partial:
            try:
                with reporting(report):
                    return fold_all(fold, part, fold.start())
            except BaseException:
                stop.set()
                raise

        def begin(count: int) -> None:
            for part in islice(rest, count):
                waiting.append(pool.submit(copy_context().run, work, part))
                waiting[-1].add_done_callback(lambda _: news.put(0.0))

        rest, waiting = iter(parts), deque[Future[Partial]]()
        with ThreadPoolExecutor(self.workers, thread_name_prefix="dualform-fold") as pool:
            try:
                begin(2 * self.workers)
                while waiting and not stop.is_set():
                    while not (waiting[0].done() and news.empty()):
                        if count := news.get():
                            progress.advance(count)
                    if not stop.is_set():
                        yield waiting.popleft().result()
                        begin(1)
            except BaseException:
                stop.set()
                raise
        _raise_first(waiting)


class _Stopped(Exception):
    """Another part of the same fold failed, or was cancelled."""


def _raise_first(futures: deque[Future[Partial]]) -> None:
    """Raises what went wrong first in the order of time, not what was stopped because of it."""
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None and not isinstance(error, _Stopped):
            raise error


def _one_by_one(
    fold: Fold[Partial], parts: Sequence[Sequence[ShardRange]], progress: LateProgress
) -> Iterator[Partial]:
    """The partial result of each part."""
    for part in parts:
        with reporting(progress.advance):
            partial = fold_all(fold, part, fold.start())
        yield partial


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
