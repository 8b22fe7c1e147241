"""Processes that train together: connected by gloo, each does the same task."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from tests.processes import SERVER

Task: TypeAlias = Callable[[int, int, Path], None]
"""What a process does, given its rank, how many there are, and a folder."""


def begun(task: Task, of: int, folder: Path) -> list[BaseProcess]:
    """So many processes that do the task."""
    folder.mkdir(parents=True, exist_ok=True)
    meeting = folder / f"meeting-{len(list(folder.glob('meeting-*')))}"
    processes = [
        SERVER.Process(target=_connected, args=(task, rank, of, folder, meeting))
        for rank in range(of)
    ]
    for process in processes:
        process.start()
    return processes


def trained_by(of: int, task: Task, folder: Path) -> None:
    """Has so many processes do the task to its end."""
    processes = begun(task, of, folder)
    for process in processes:
        process.join()
    problems = [path.read_text() for path in sorted(folder.glob("problem-*"))]
    assert not problems, problems[0]
    assert [process.exitcode for process in processes] == [0] * of


def _connected(task: Task, rank: int, of: int, folder: Path, meeting: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{meeting}", timedelta(seconds=60), world_size=of, rank=rank
    )
    try:
        task(rank, of, folder)
    except BaseException:
        (folder / f"problem-{rank}").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()
