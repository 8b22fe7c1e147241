"""A study in parts: each is kept when it is done, so that an interrupted study goes on."""

from __future__ import annotations

import json
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from filelock import FileLock, Timeout

from dualform.errors import EvaluationError, RecordingEndedWarning
from dualform.evaluate.work_folder import check_settings, work_progress, write_whole
from dualform.evaluate.workers import begin_worker

Found: TypeAlias = dict[str, Any]
"""What a part found, as values that JSON has."""


def run_parts(
    folder: Path,
    settings: Mapping[str, Any],
    parts: Mapping[str, Callable[[], Found]],
    workers: int = 0,
) -> dict[str, Found]:
    """What all parts found, by name; those that are not kept in the folder yet are run.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> run_parts(folder, {"steps": 10}, {"seed 0": lambda: {"accuracy": 0.9}})
    {'seed 0': {'accuracy': 0.9}}
    >>> run_parts(folder, {"steps": 10}, {"seed 0": lambda: 1 / 0})  # it is kept
    {'seed 0': {'accuracy': 0.9}}

    Args:
        workers: how many parts run at a time, each in a process of its own; 0: one after the
            other, in this process.
    """
    kept = folder / "parts"
    kept.mkdir(parents=True, exist_ok=True)
    files = {name: kept / f"{name.replace(' ', '-')}.json" for name in parts}
    try:
        with FileLock(kept / "lock", timeout=0), work_progress() as progress:
            check_settings(kept, settings, "parts of this study")
            missing = {name: file for name, file in files.items() if not file.exists()}
            done = len(parts) - len(missing)
            bar = progress.add_task("", total=len(parts), completed=done)
            makers = {
                name: partial(_keep, name, parts[name], file) for name, file in missing.items()
            }
            for name in _elsewhere(makers, workers) if workers else _here(makers):
                progress.update(bar, description=name, advance=1)
    except Timeout:
        raise EvaluationError(
            f"another process is at work on the study in '{folder}'; wait for it, or end it."
        ) from None
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items()}


def _keep(name: str, make: Callable[[], Found], file: Path) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "error", RecordingEndedWarning
            )  # a run of some steps is no result
            found = make()
    except RecordingEndedWarning as ended:
        raise EvaluationError(
            f"{name!r}, a part of the study, was not recorded: {ended}"
        ) from ended
    except Exception as error:
        error.add_note(f"This was {name!r}, a part of the study.")
        raise
    write_whole(file, json.dumps(found).encode())


def _here(makers: Mapping[str, Callable[[], None]]) -> Iterator[str]:
    for name, make in makers.items():
        make()
        yield name


def _elsewhere(makers: Mapping[str, Callable[[], None]], workers: int) -> Iterator[str]:
    """The names of parts as they are done. After a failure those under way are finished first."""
    threads = max(1, (os.cpu_count() or 1) // workers)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, begin_worker, (threads,)) as pool:
        running = {pool.submit(make): name for name, make in makers.items()}
        for future in as_completed(running):
            try:
                future.result()
            except BrokenExecutor as error:
                raise EvaluationError(
                    f"{running[future]}: its process, or one beside it, ended before its time (out "
                    "of memory?); what is done is kept: run the study again, with fewer workers."
                ) from error
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            yield running[future]
