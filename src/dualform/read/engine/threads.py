"""Folding in this process: one shard after the other, or several side by side in threads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import reduce
from queue import SimpleQueue
from threading import Event

import torch

from dualform.read.engine.interface import Block, BlockFold, Engine, Fold, Partial
from dualform.read.engine.shards import ShardRange, split
from dualform.read.progress import LateProgress, reporting

PARTIAL_BYTES = 256 << 20
"""How large the partial results of all threads may be together."""


class Serial(Engine):
    """Folds one shard after the other."""

    def reduce(
        self, fold: Fold[Partial], shards: Sequence[ShardRange], onto: Partial | None = None
    ) -> Partial:
        """The result of all shards."""
        partial = fold.start() if onto is None else onto
        with _progress(fold, shards) as progress, reporting(progress.advance):
            for shard in shards:
                partial = fold.fold(partial, shard)
        return partial

    def reduce_blocks(
        self, fold: BlockFold[Block], shards: Sequence[ShardRange]
    ) -> Iterator[Block]:
        """All shards are one part, since a block is made of rows from all of them."""
        return fold.blocks(shards)


class Threads(Serial):
    """Folds runs of neighboring shards side by side, and merges them in the order of time.

    Torch already spreads the work of one shard over its own threads. So there are as many workers
    as there are processors for each of those: one, unless torch was told to use fewer.

    >>> from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run()
    >>> Threads(workers=4).workers
    4
    """

    def __init__(self, workers: int | None = None) -> None:
        self.workers = workers or max(1, _processors() // torch.get_num_threads())

    def reduce(
        self, fold: Fold[Partial], shards: Sequence[ShardRange], onto: Partial | None = None
    ) -> Partial:
        """The result of all shards."""
        fitting = PARTIAL_BYTES // max(1, fold.partial_bytes)
        on_cpu = torch.device(fold.device).type == "cpu"
        parts = split(shards, min(self.workers, max(1, fitting)) if on_cpu else 1)
        if len(parts) < 2:
            return super().reduce(fold, shards, onto)
        partials = _side_by_side(fold, parts, _progress(fold, shards))
        return reduce(fold.merge, partials if onto is None else [onto, *partials])


class _Stopped(Exception):
    """Another part of the same fold failed, or was cancelled."""


def _side_by_side(
    fold: Fold[Partial], parts: Sequence[Sequence[ShardRange]], progress: LateProgress
) -> list[Partial]:
    """The partial result of each part; progress is told by this thread, which may cancel."""
    news: SimpleQueue[float | None] = SimpleQueue()
    stop = Event()

    def report(count: float) -> None:
        if stop.is_set():
            raise _Stopped
        news.put(count)

    def work(part: Sequence[ShardRange]) -> Partial:
        try:
            partial = fold.start()
            with reporting(report):
                for shard in part:
                    partial = fold.fold(partial, shard)
            return partial
        except BaseException:
            stop.set()
            raise
        finally:
            news.put(None)

    with progress, ThreadPoolExecutor(len(parts), thread_name_prefix="dualform-fold") as pool:
        futures = [pool.submit(copy_context().run, work, part) for part in parts]
        try:
            for _ in parts:
                while (count := news.get()) is not None:
                    progress.advance(count)
        except BaseException:
            stop.set()
            raise
    raise_first(futures)
    return [future.result() for future in futures]


def raise_first(futures: Sequence[Future[Partial]]) -> None:
    """Raises what went wrong first in the order of time, not what was stopped because of it."""
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None and not isinstance(error, _Stopped):
            raise error


def _progress(fold: Fold[Partial], shards: Sequence[ShardRange]) -> LateProgress:
    """How far a fold is, in steps of each stream."""
    steps = sum(s.steps for s in shards for stream in fold.streams if s.holds(stream))
    name = fold.streams[0] if len(fold.streams) == 1 else f"{len(fold.streams)} layers"
    return LateProgress(name, steps)


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
