"""Engines by name."""

from __future__ import annotations

from typing import Any

from dualform.errors import ReadingError
from dualform.read.engine.cluster import Ray
from dualform.read.engine.interface import Engine
from dualform.read.engine.read_ahead import ReadAhead
from dualform.read.engine.threads import Threads

ENGINES: dict[str, type[Engine]] = {"threads": Threads, "ahead": ReadAhead, "ray": Ray}
"""Who can read a run."""


def engine(name: str, **options: Any) -> Engine:
    """Who reads a run: "threads" of this process, one that reads "ahead", or a "ray" cluster.

    >>> import dualform
    >>> from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run()
    >>> dualform.open(run.path, engine=dualform.engine("threads", workers=2)).steps
    6

    Args:
        options: of "threads": `workers`, how many. Of "ahead": `readers`, `buffers` and
            `chunk_bytes`, see `dualform.read.engine.ReadAhead`. Of "ray": `address`, as HOST:PORT
            (by default that of RAY_ADDRESS, or a new cluster on this machine), and `cpus`, how many
            processors a task takes. Of "threads" and "ray": `part_bytes`, how large the files of a
            part are at least.
    """
    if name not in ENGINES:
        *others, last = (f"'{known}'" for known in ENGINES)
        known = f"{', '.join(others)} and {last}"
        raise ReadingError(f"there is no engine '{name}'; there are {known}.")
    return ENGINES[name](**options)


def engine_of(given: Engine | str | None) -> Engine:
    """The engine that was given, or is meant by a name; threads by default."""
    if isinstance(given, Engine):
        return given
    return engine(given or "threads")
