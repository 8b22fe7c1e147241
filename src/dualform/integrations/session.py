"""A recording that starts and ends in callbacks, where no `with` statement can hold it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from dualform.errors import RecordingError
from dualform.private import at_exit
from dualform.recording import Recorder, record


class RecordingSession:
    """A recording that is closed by `close`, and else when its owner or the process ends.

    >>> import tempfile, torch
    >>> class Owner: pass
    >>> owner, model = Owner(), torch.nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> session = RecordingSession(owner, model, optimizer, Path(tempfile.mkdtemp()) / "run")
    >>> model(torch.ones(1, 3)).sum().backward(); optimizer.step()
    >>> session.recorder.step, session.close()
    (1, None)
    """

    def __init__(
        self, owner: object, model: nn.Module, optimizer: Any, path: Path, **options: Any
    ) -> None:
        self.recorder = record(model, optimizer, path, **options).__enter__()
        self._undo: list[Callable[[], None]] = []
        broken_off = RecordingError("training broke off.")
        self._abandon = weakref.finalize(owner, _end, self.recorder, self._undo, broken_off)
        _SESSIONS.add(self)

    def at_the_end(self, undo: Callable[[], None]) -> None:
        """Has something called when the recording is closed, whichever way."""
        self._undo.append(undo)

    def close(self, error: BaseException | None = None) -> None:
        """Ends the recording; an error in writing it is raised, unless another ended training."""
        if self._abandon.detach():
            _end(self.recorder, self._undo, error)

    def abandon(self) -> None:
        """Commits what was recorded; for the end of the process, where nobody can be told."""
        self._abandon()


def started(recorder: Recorder | None, start: str) -> Recorder:
    """A callback's recorder; before training there is none, and an error says what to do instead.

    >>> started(None, "trainer.fit(…)")
    Traceback (most recent call last):
    dualform.errors.RecordingError: nothing has been recorded yet; trainer.fit(…) starts it. ...
    """
    if recorder is None:
        raise RecordingError(
            f"nothing has been recorded yet; {start} starts it. To describe samples, give "
            "the callback (`dataset=…`), or call dualform.describe(path, dataset) afterwards."
        )
    return recorder


def resuming(path: Path, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """The options for training that starts after `steps`: it goes on with its run, if there is one.

    >>> resuming(Path("no/run"), 0, {})
    {'resume': False}
    """
    goes_on = steps > 0 and path.exists() and not options.get("overwrite", False)
    return {"resume": goes_on, **options}


def _end(recorder: Recorder, undo: list[Callable[[], None]], error: BaseException | None) -> None:
    for each in undo:
        each()
    recorder.__exit__(type(error) if error else None, error, None)


_SESSIONS: weakref.WeakSet[RecordingSession] = weakref.WeakSet()


def _abandon_all() -> None:
    for session in list(_SESSIONS):
        session.abandon()


# The writer needs thread pools, which Python shuts down before `atexit`: come before them.
at_exit(_abandon_all)
# A data loader's worker is a copy of this process that must not end what goes on in this one.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_SESSIONS.clear)
