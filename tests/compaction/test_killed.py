"""A compaction that is killed leaves the old run or the new one, never a mixture."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from tests.compaction.killed_victim import main
from tests.compaction.runs import contents, recorded
from tests.processes import SERVER

import dualform
from dualform import compaction
from dualform.compaction.folders import Folders
from dualform.errors import LedgerError, NotARunError


def killed(path: Path, action: str, at_once: bool, first: int = 0) -> Iterator[int]:
    """A copy of the run whenever a process was killed at work on it, up to one that ended."""
    kept = path.with_name("kept")
    for folder in (path, Folders.of(path).before):
        if folder.exists():
            shutil.copytree(folder, kept / folder.name)
    for kill_at in count(first):
        victim = SERVER.Process(target=main, args=(path, action, kill_at, at_once))
        victim.start()
        victim.join()
        if victim.exitcode == 0:
            return
        assert victim.exitcode == -signal.SIGKILL
        yield kill_at
        for folder in path.parent.iterdir():
            if folder != kept:
                shutil.rmtree(folder)
        shutil.copytree(kept, path.parent, dirs_exist_ok=True)


def test_killed_while_it_compacts(tmp_path: Path) -> None:
    """At every act on the disk. How the runs change places matters from the act that does it."""
    change = killed_while_it_compacts(tmp_path / "at once", at_once=True)
    assert change > 10
    killed_while_it_compacts(tmp_path / "by renames", at_once=False, first=change - 4)


def killed_while_it_compacts(folder: Path, at_once: bool, first: int = 0) -> int:
    """Compacts until it is not killed; returns the first act before which the run was the new."""
    path = folder / "run"
    recorded(path)
    old, seen = contents(path), dict[bool, int]()
    for kill_at in killed(path, "compact", at_once, first):
        try:
            run = dualform.open(path)
        except NotARunError as error:  # between two renames, where the system has nothing better
            assert not at_once
            assert "a compaction of it was killed" in str(error)  # noqa: PT017
            compaction.undo(path)
            assert contents(path) == old
            continue
        assert run.check() == []
        assert run.audit().remainder <= 3e-6
        is_old = contents(path) == old
        assert is_old != Folders.of(path).is_compacted
        seen.setdefault(is_old, kill_at)
        if is_old and kill_at % 6:
            with pytest.raises(LedgerError, match="nothing to undo"):
                compaction.undo(path)
        else:
            if is_old:
                assert dualform.compact(path, "int8").changed
            compaction.undo(path)
        assert contents(path) == old
        assert [entry.name for entry in folder.iterdir() if entry.name != "kept"] == ["run"]
    assert seen.keys() == {True, False}
    return seen[False]


@pytest.mark.parametrize("action", ["undo", "confirm"])
def test_killed_while_it_ends(action: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    recorded(path)
    old = contents(path)
    dualform.compact(path, "int8")
    new = contents(path)
    for _ in killed(path, action, at_once=True):
        assert dualform.open(path).check() == []
        unmarked = {name: own for name, own in new.items() if name != "compacted.json"}
        now = {name: own for name, own in contents(path).items() if name != "compacted.json"}
        assert now in (old, unmarked)
        for _ in range(2):  # what was begun can be brought to its end, in either way
            try:
                (compaction.undo if action == "undo" else compaction.confirm)(path)
            except LedgerError as error:
                assert "there is nothing to" in str(error)  # noqa: PT017
        assert contents(path) == (old if action == "undo" else unmarked)
        assert [entry.name for entry in tmp_path.iterdir() if entry.name != "kept"] == ["run"]
