"""A study in parts: each is kept when it is done, so that an interrupted study goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from filelock import FileLock, Timeout

from dualform.errors import EvaluationError
from dualform.evaluate.work_folder import check_settings, work_progress, write_whole

Found: TypeAlias = dict[str, Any]
"""What a part found, as values that JSON has."""


def run_parts(
    folder: Path, settings: Mapping[str, Any], parts: Mapping[str, Callable[[], Found]]
) -> dict[str, Found]:
    """What all parts found, by name; those that are not kept in the folder yet are run, in order.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> run_parts(folder, {"steps": 10}, {"seed 0": lambda: {"accuracy": 0.9}})
    {'seed 0': {'accuracy': 0.9}}
    >>> run_parts(folder, {"steps": 10}, {"seed 0": lambda: 1 / 0})  # it is kept
    {'seed 0': {'accuracy': 0.9}}
    """
    kept, found = folder / "parts", dict[str, Found]()
    kept.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(kept / "lock", timeout=0):
            check_settings(kept, settings, "parts of this study")
            with work_progress() as progress:
                bar = progress.add_task("", total=len(parts))
                for name, make in parts.items():
                    progress.update(bar, description=name)
                    file = kept / f"{name.replace(' ', '-')}.json"
                    if not file.exists():
                        write_whole(file, json.dumps(make()).encode())
                    found[name] = json.loads(file.read_text(encoding="utf-8"))
                    progress.advance(bar)
            return found
    except Timeout:
        raise EvaluationError(
            f"another process is at work on the study in '{folder}'; wait for it, or end it."
        ) from None
