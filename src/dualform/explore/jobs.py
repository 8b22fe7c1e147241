"""Views worked out in threads: shared, with news of how far they are, and cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event, RLock
from typing import Any

from dualform.errors import DualformError
from dualform.read.progress import watched

logger = logging.getLogger(__name__)

WORKERS = 2
PAUSE = 0.1
"""Seconds between two pieces of news."""


def unforeseen(error: Exception) -> str:
    """A sentence about an error that nobody put into words.

    >>> unforeseen(RuntimeError("shapes 3 and 4 do not fit"))
    'this could not be answered: RuntimeError: shapes 3 and 4 do not fit (the log says where).'
    """
    return f"this could not be answered: {type(error).__name__}: {error} (the log says where)."


class CancelledByReader(DualformError):
    """Nobody waits for the answer any more."""


class ViewJob:
    """One view that is being worked out."""

    def __init__(self) -> None:
        self.future: Future[Any] = Future()
        self.news: dict[str, Any] = {"progress": 0.0, "doing": "waiting"}
        self.waiting = 0
        self._unwanted = Event()

    @property
    def unwanted(self) -> bool:
        """Whether everybody who waited has left."""
        return self._unwanted.is_set()

    def leave(self) -> None:
        """One reader less; without any, the work ends at its next chunk."""
        self.waiting -= 1
        if not self.waiting:
            self._unwanted.set()

    def work(self, make: Callable[[], Any]) -> Any:
        """Makes the answer, with an eye on whether somebody waits.

        Models and functions of users take part in it, and may raise anything: that is said too.
        """
        with watched(self._watch):
            self._watch("reading", 0.0)
            try:
                return make()
            except (DualformError, OSError):
                raise
            except Exception as error:
                logger.exception("a view of the explorer failed")
                raise DualformError(unforeseen(error)) from error

    def _watch(self, doing: str, share: float) -> None:
        if self.unwanted:
            raise CancelledByReader("cancelled: nobody waits for the answer any more.")
        self.news = {"progress": share, "doing": doing}


class Jobs:
    """Runs views; one that is asked for while it is worked out is not worked out twice."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="dualform-view")
        self._running: dict[Hashable, ViewJob] = {}
        self._lock = RLock()  # a job that is done at once says so while it is begun

    def join(self, key: Hashable, make: Callable[[], Any]) -> ViewJob:
        """The job of this key, begun if there is none; `leave` it in the end."""
        with self._lock:
            job = self._running.get(key)
            if job is None or job.unwanted:
                job = self._running[key] = ViewJob()
                job.future = self._pool.submit(job.work, make)
                job.future.add_done_callback(lambda _: self._remove(key, job))
            job.waiting += 1
            return job

    def _remove(self, key: Hashable, job: ViewJob) -> None:
        with self._lock:
            if self._running.get(key) is job:
                del self._running[key]


async def follow(job: ViewJob) -> AsyncIterator[dict[str, Any]]:
    """News while there is some, then the result or the error."""
    future, told = asyncio.wrap_future(job.future), None
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, by us
    while not (await asyncio.wait({future}, timeout=PAUSE))[0]:
        if job.news != told:
            told = job.news
            yield told
    try:
        yield {"result": future.result()}
    except (DualformError, OSError) as error:
        yield {"error": str(error)}
