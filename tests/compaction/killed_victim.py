"""Compacts, confirms or undoes, and is killed before its n-th act on the disk."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dualform
from dualform import compaction
from dualform.compaction import folders
from dualform.ledger import files

ACTS = ("fsync", "link", "rename", "replace", "unlink", "mkdir", "rmdir", "write")


def main(path: Path, action: str, kill_at: int, at_once: bool) -> None:
    """Ends by itself where there are fewer acts than that."""
    acts = 0

    def counted(act: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **options: Any) -> Any:
            nonlocal acts
            if acts == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            acts += 1
            return act(*arguments, **options)

        return counting

    for name in ACTS:
        setattr(os, name, counted(getattr(os, name)))
    folders.exchange = counted(folders.exchange)  # type: ignore[assignment]
    if not at_once:
        files._exchange_at_once = lambda one, other: False  # type: ignore[assignment]
    if action == "compact":
        dualform.compact(path, "int8")
    else:
        {"undo": compaction.undo, "confirm": compaction.confirm}[action](path)
