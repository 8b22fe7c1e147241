"""A cache of results: each is worked out once, and the oldest make room for new ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any

MOST_BYTES = 256 << 20
USUAL_BYTES = 1024
"""What a result counts that does not say how large it is."""


class ResultCache:
    """Results by what was asked, up to so many bytes.

    >>> cache = ResultCache()
    >>> cache.get("two", lambda: 2), cache.get("two", lambda: 3)
    (2, 2)
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most, self._results = most, OrderedDict[Hashable, tuple[Any, int]]()
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The result, made if there is none."""
        with self._lock:
            if key in self._results:
                self._results.move_to_end(key)
                return self._results[key][0]
        result = make()
        self.put(key, result)
        return result

    def put(self, key: Hashable, result: Any) -> None:
        """Keeps a result; drops the oldest where they are too large together.

        A result that is there under several keys counts once.
        """
        with self._lock:
            self._results[key] = (result, int(getattr(result, "nbytes", USUAL_BYTES)))
            sizes = {id(one): size for one, size in self._results.values()}
            while sum(sizes.values()) > self._most and len(self._results) > 1:
                _, (dropped, _) = self._results.popitem(last=False)
                if not any(dropped is one for one, _ in self._results.values()):
                    del sizes[id(dropped)]
