"""A thread that turns what training hands over into committed shards."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

import torch

Item = TypeVar("Item")

NICENESS = 5
"""By how much the thread steps back. Where training computes on all cores and waits for the last,
each moment that the thread takes of a core is lost on the others too. It still gets a third of what
a thread of training gets, so that these do not wait long where it holds the interpreter.
"""


def compute_alone() -> None:
    """Keeps torch from starting helper threads for this one: training needs the cores.

    The setting is the calling thread's, but also the default of threads to come; a thread that
    lives just for that puts the default back.
    """
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    restorer = threading.Thread(target=torch.set_num_threads, args=(usual,))
    restorer.start()
    restorer.join()


def step_back() -> None:
    """Lets the threads of training go first; on Linux, where a thread has a priority of its own."""
    if sys.platform == "linux":
        me = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, me, os.getpriority(os.PRIO_PROCESS, me) + NICENESS)


class Background(Generic[Item]):
    """Runs `work(item)` for each item put, in order, on one thread.

    At most `waiting` items wait; a further `put` blocks, so a slow disk slows training down instead
    of filling memory. An error in `work` stops the thread and is raised at every later call.

    >>> done = []
    >>> background = Background(done.append)
    >>> background.put(1); background.put(2); background.close()
    >>> done
    [1, 2]
    """

    def __init__(self, work: Callable[[Item], None], waiting: int = 2) -> None:
        self._work = work
        self._queue: queue.Queue[Item | None] = queue.Queue(maxsize=waiting)
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="dualform-writer", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Hands an item over; blocks while too many wait."""
        self.raise_error()
        if self._closed:
            raise ValueError("the background thread has ended, and works nothing off any more")
        self._queue.put(item)

    def wait(self) -> None:
        """Returns when everything put has been worked off."""
        self._queue.join()
        self.raise_error()

    def close(self) -> None:
        """Works everything off and ends the thread."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()
        self.raise_error()

    def raise_error(self) -> None:
        """Raises the error the thread met, if it met one."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        compute_alone()
        step_back()
        while (item := self._queue.get()) is not None:
            try:
                if self._error is None:
                    self._work(item)
            except BaseException as error:
                self._error = error
            finally:
                del item  # the arrays of a finished block must not outlive it
                self._queue.task_done()
        self._queue.task_done()
