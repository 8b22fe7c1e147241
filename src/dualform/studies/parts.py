"""A study in parts: each is kept when it is done, so that an interrupted study goes on."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeAlias

import torch
from filelock import FileLock, Timeout

from dualform.errors import EvaluationError
from dualform.evaluate.work_folder import check_settings, work_progress, write_whole
from dualform.evaluate.workers import leave_with_parent

Found: TypeAlias = dict[str, Any]
"""What a part found, as values that JSON has."""


def run_parts(
    folder: Path,
    settings: Mapping[str, Any],
    parts: Mapping[str, Callable[[], Found]],
    workers: int = 0,
) -> dict[str, Found]:
    """What all parts found, by name; those that are not kept in the folder yet are run, in order.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> run_parts(folder, {"steps": 10}, {"seed 0": lambda: {"accuracy": 0.9}})
    {'seed 0': {'accuracy': 0.9}}
    >>> run_parts(folder, {"steps": 10}, {"seed 0": lambda: 1 / 0})  # it is kept
    {'seed 0': {'accuracy': 0.9}}

    Args:
        workers: how many run at a time, each in a process of its own; 0 runs them in this one.
    """
    kept = folder / "parts"
    kept.mkdir(parents=True, exist_ok=True)
    files = {name: kept / f"{name.replace(' ', '-')}.json" for name in parts}
    try:
        with FileLock(kept / "lock", timeout=0):
            check_settings(kept, settings, "parts of this study")
            left = {name: make for name, make in parts.items() if not files[name].exists()}
            with work_progress() as progress:
                bar = progress.add_task("", total=len(parts), completed=len(parts) - len(left))
                for name, found in _here(left) if workers == 0 else _elsewhere(left, workers):
                    write_whole(files[name], json.dumps(found).encode())
                    progress.update(bar, description=name, advance=1)
            return {
                name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items()
            }
    except Timeout:
        raise EvaluationError(
            f"another process is at work on the study in '{folder}'; wait for it, or end it."
        ) from None


def _here(parts: Mapping[str, Callable[[], Found]]) -> Iterator[tuple[str, Found]]:
    for name, make in parts.items():
        yield name, make()


def _elsewhere(
    parts: Mapping[str, Callable[[], Found]], workers: int
) -> Iterator[tuple[str, Found]]:
    """As they are done. A part that fails raises here, after those that are under way."""
    threads = max(1, (os.cpu_count() or 1) // workers)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _begin, (threads,)) as pool:
        running = {pool.submit(make): name for name, make in parts.items()}
        try:
            for one in as_completed(running):
                yield running[one], one.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _begin(threads: int) -> None:
    threading.Thread(target=leave_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
