"""Files under way: written side by side, committed in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeAlias

from dualform.ledger.background import compute_alone

Record: TypeAlias = dict[str, Any]


class CommitQueue:
    """Writes files on threads of its own; each is committed once those before it are.

    >>> log = []
    >>> queue = CommitQueue(2)
    >>> for name in "abc":
    ...     queue.begin(lambda name=name: {"file": name}, log.append)
    >>> queue.wait(); log
    [{'file': 'a'}, {'file': 'b'}, {'file': 'c'}]
    """

    def __init__(self, side_by_side: int) -> None:
        self._side_by_side = side_by_side
        self._threads = ThreadPoolExecutor(
            max(1, side_by_side), "dualform-files", initializer=compute_alone
        )
        self._under_way: deque[tuple[Future[Record], Callable[[Record], None]]] = deque()
        self._lock = Lock()
        self._error: BaseException | None = None

    def begin(self, write: Callable[[], Record], commit: Callable[[Record], None]) -> None:
        """Begins to write; `commit` gets what `write` returned. Waits while too many do."""
        written = self._threads.submit(write)
        self._under_way.append((written, commit))
        written.add_done_callback(lambda _: self._commit_written())
        self._wait(self._side_by_side)

    def wait(self) -> None:
        """Returns when everything begun is committed."""
        self._wait(0)

    def close(self) -> None:
        """Lets what is under way end, and then the threads."""
        self._threads.shutdown()

    def _wait(self, left: int) -> None:
        while (first := self._first(left)) is not None:
            first.exception()
            self._commit_written()
        if self._error is not None:
            raise self._error

    def _first(self, left: int) -> Future[Record] | None:
        """The file to wait for until only so many are left, or until one has failed."""
        with self._lock:
            waiting = len(self._under_way) > left and self._error is None
            return self._under_way[0][0] if waiting else None

    def _commit_written(self) -> None:
        """Commits what is written and has nothing before it; after an error, nothing any more."""
        with self._lock:
            while self._error is None and self._under_way and self._under_way[0][0].done():
                written, commit = self._under_way[0]
                try:
                    commit(written.result())
                except BaseException as error:
                    self._error = error
                self._under_way.popleft()
