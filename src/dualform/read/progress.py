"""How far a scan is: a bar in a terminal, or news to whoever watches instead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

from rich.console import Console
from rich.progress import Progress, TaskID

PATIENCE = 1.0
"""Seconds before a progress bar is worth showing."""

Watcher: TypeAlias = Callable[[str, float], None]
_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Tells `watcher(doing, share)` of every scan inside, instead of showing bars.

    What the watcher raises ends the scan: that is how to cancel one.

    >>> from dualform.testing import tiny_run
    >>> run, model, x = tiny_run()
    >>> with watched(lambda doing, share: print(doing, share)):
    ...     scores = run.spotlight(model, x[:1])["2"].samples()
    reading 2 1.0
    """
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


@contextmanager
def together(doing: str, total: int) -> Iterator[LateProgress]:
    """Tells of several scans as of one: each is a part of `total`; `advance` once it is done.

    >>> news = []
    >>> with watched(lambda doing, share: news.append((doing, share))):
    ...     with together("adding up", 2) as progress:
    ...         with LateProgress("layer 0", 10) as scan:
    ...             scan.advance(5)
    ...         progress.advance(1)
    >>> news
    [('adding up', 0.25), ('adding up', 0.5)]
    """
    with LateProgress("", total, doing) as progress, watched(lambda _, share: progress.tell(share)):
        yield progress


_report: ContextVar[Callable[[float], None] | None] = ContextVar("report", default=None)


@contextmanager
def reporting(report: Callable[[float], None]) -> Iterator[None]:
    """Hands what folds `advance` to `report`, which may raise to end them."""
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)


def advance(count: float) -> None:
    """So many more steps are folded, of the shards that an engine folds now."""
    report = _report.get()
    if report is not None:
        report(count)


class LateProgress:
    """Tells the watcher; without one, shows a bar once somebody waits for more than a second."""

    def __init__(self, name: str, total: float, doing: str = "") -> None:
        self._doing, self._total, self._done = doing or f"reading {name}", total, 0.0
        self._shown = 0.0
        """How far it was when it was told last."""
        self._watcher = _watcher.get()
        self._began = time.monotonic()
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> LateProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: float) -> None:
        """So many more are done."""
        self._done += count
        self.tell()

    def tell(self, begun: float = 0.0) -> None:
        """Tells how far it is, with the share that is done of what comes next.

        It never goes back: what comes next may be several reads, each of which begins at none.
        """
        self._shown = done = max(self._shown, self._done + begun)
        if self._watcher is not None:
            self._watcher(self._doing, min(1.0, done / max(1, self._total)))
        elif self._bar is not None:
            self._bar.update(self._task, completed=done)
        elif time.monotonic() - self._began > PATIENCE:
            console = Console(stderr=True)
            watched = console.is_terminal or console.is_jupyter
            self._bar = Progress(console=console, transient=True, disable=not watched)
            self._task = self._bar.add_task(self._doing, total=self._total)
            self._bar.start()
