"""What is sound of a damaged run, as a run of its own.

Books balance only if no step is missing, so a repaired run has the steps before the first that is
damaged. The damaged run stays as it is.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from dualform.errors import CorruptError, LedgerError
from dualform.ledger.copying import copy_run
from dualform.ledger.format import INITIAL_FILE, RUN_FILE
from dualform.ledger.log import Damage
from dualform.ledger.object_path import run_path
from dualform.ledger.reader import Ledger

REPAIRED = ".repaired"
"""Behind the name of a run: its repaired copy."""


class Repair(NamedTuple):
    """What was wrong with a run, and where its sound steps are.

    >>> from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run()
    >>> print(repair(run.path))
    run ... is sound: there is nothing to repair.
    """

    path: Path
    damage: list[Damage]
    """Each damaged file, and what is wrong with it; none where the run is sound."""
    steps: int
    """The steps before the first that is damaged."""
    recorded: int
    """The last step of which anything can be read."""
    to: Path | None
    """The repaired run; None where there was nothing to repair."""

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "path": str(self.path),
            "damage": [problem for _, problem in self.damage],
            "steps": self.steps,
            "recorded": self.recorded,
            "to": None if self.to is None else str(self.to),
        }

    def __str__(self) -> str:
        if self.to is None:
            return f"run {self.path} is sound: there is nothing to repair."
        lines = [f"run {self.path} is damaged:", *(f"  {problem}" for _, problem in self.damage)]
        whole = f"Steps 1 to {self.steps:,} of {self.recorded:,} are sound."
        return "\n".join([*lines, f"{whole} They are in {self.to}; the run is as it was."])


def repair(path: str | os.PathLike[str], to: str | os.PathLike[str] | None = None) -> Repair:
    """Copies the sound steps of a damaged run into a run of their own.

    Every committed byte is read. The copy ends before the first damaged step; files that stay as
    they are become links to the same bytes. Recording can go on in it, from a checkpoint.

    >>> from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run()
    >>> log = next(run.path.glob("writer-*/commits.jsonl"))
    >>> _ = log.write_bytes(log.read_bytes()[:-2] + b"?")
    >>> found = repair(run.path)
    >>> found.steps, found.to.name == run.path.name + ".repaired", len(found.damage)
    (6, True, 1)

    Args:
        to: where the copy is written; `PATH.repaired` if it is not said.
    """
    run = run_path(path)
    ledger = Ledger(run, damaged=True)
    damage = list(ledger.check())
    if not damage:
        return Repair(run, [], ledger.last_step, ledger.last_step, None)
    damaged = {file for file, _ in damage}
    _require_a_beginning(run, damaged)
    first = [shard.first - 1 for shard in ledger.shards if shard.path in damaged]
    steps = min([ledger.last_step, *first])
    copy = Path(to) if to is not None else run.with_name(run.name + REPAIRED)
    _copy(ledger, copy, steps, damaged)
    return Repair(run, damage, steps, ledger.last_step, copy)


def _require_a_beginning(run: Path, damaged: set[Path]) -> None:
    lost = [name for name in (RUN_FILE, INITIAL_FILE) if run / name in damaged]
    if lost:
        raise CorruptError(
            f"'{run / lost[0]}' is damaged, without which nothing of the run can be read; restore "
            "it from a copy of the run. Nothing was written."
        )


def _copy(ledger: Ledger, to: Path, steps: int, damaged: set[Path]) -> None:
    try:
        to.mkdir(parents=True)
    except FileExistsError:
        raise LedgerError(
            f"'{to}' exists already; move it away, or name another path for the repaired run "
            "(`dualform repair RUN --to PATH`)."
        ) from None
    except OSError as error:
        raise LedgerError(
            f"cannot make '{to}': {error.strerror}; name another path for the repaired run "
            "(`dualform repair RUN --to PATH`)."
        ) from error
    try:
        copy_run(ledger, to, until=steps, without=damaged)
        found = Ledger(to)
        problems = [problem for _, problem in found.check()]
        if found.last_step != steps:
            problems.append(f"it has {found.last_step:,} steps, not {steps:,}")
        if problems:
            raise LedgerError(
                f"the repaired copy of '{ledger.path}' is not sound: {problems[0]} It was deleted, "
                "and the run is as it was. Please report this."
            )
    except BaseException as error:
        shutil.rmtree(to)
        if isinstance(error, OSError) and not isinstance(error, LedgerError):
            raise LedgerError(
                f"cannot write the repaired copy of '{ledger.path}': {error}. The run is as it was."
            ) from error
        raise
