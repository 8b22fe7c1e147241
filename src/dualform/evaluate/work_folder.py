"""A folder where long work is kept piece by piece: an interruption loses one piece at most."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dualform.errors import EvaluationError

SETTINGS = "settings.json"


def check_settings(folder: Path, settings: Mapping[str, Any], what: str) -> None:
    """Makes sure that what is in a folder was made with these settings; notes them if it is new.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> check_settings(folder, {"steps": 10}, "trainings")
    >>> try:
    ...     check_settings(folder, {"steps": 20}, "trainings")
    ... except EvaluationError as error:
    ...     print(str(error).partition("with ")[2])
    other settings: steps=20 (there 10); use another folder, or the settings it was begun with.
    """
    path, now = folder / SETTINGS, json.loads(json.dumps(dict(settings)))
    if not path.exists():
        write_whole(path, json.dumps(now, indent=1).encode())
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    differing = [name for name in now if now[name] != before.get(name)]
    if differing:
        changes = ", ".join(f"{n}={now[n]!r} (there {before.get(n)!r})" for n in differing)
        raise EvaluationError(
            f"'{folder}' has {what} with other settings: {changes}; use another folder, or "
            "the settings it was begun with."
        )


def write_whole(path: Path, data: bytes) -> None:
    """Writes a small file so that it is either wholly there after a crash, or not at all."""
    draft = path.with_name(path.name + ".draft")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def work_progress() -> Progress:
    """A bar of finished pieces, shown where somebody watches."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=float("inf"),  # trainings may be minutes apart
        disable=not (console.is_terminal or console.is_jupyter),
    )
