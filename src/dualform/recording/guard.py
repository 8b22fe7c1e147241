"""What becomes of an error in recording: the recording ends, and the training goes on.

Training takes days and a recording can be made again, so a defect of ours or a full disk must not
end a training loop. Three kinds of errors are told apart:

- The *start* of a recording raises: nothing is lost yet.
- A *mistake* in how the recorder is used, such as ids that do not fit the batch, raises where it is
  made: a `RecordingError`, which the loop's author can mend.
- A *failure* is everything else: the disk, the writer's thread, a gradient that is not finite, a
  defect. It ends the recording with one warning; with `strict` it raises a `DualformError`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from dualform.errors import (
    DualformError,
    LedgerError,
    NonFiniteError,
    RecorderFailedError,
    RecordingError,
)

P = ParamSpec("P")
R = TypeVar("R")
FORWARD, BACKWARD = "in the forward pass", "in the backward pass"
BEFORE, AFTER = "before the optimizer's step", "after the optimizer's step"


class Guard:
    """Runs what a recorder does inside a training loop, up to its first failure.

    >>> guard = Guard()
    >>> guard.run("in the forward pass", len, "ids"), guard.run("in the forward pass", len, 3)
    (3, None)
    >>> print(guard.failure)
    recording failed in the forward pass: TypeError: object of type 'int' has no len().
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.failure: DualformError | None = None
        """What ended the recording; after it nothing is run any more."""

    def run(
        self, stage: str, action: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R | None:
        """What the action returns; None where it failed, now or at an earlier stage."""
        if self.failure is not None:
            self.after_failure()
            return None
        try:
            return action(*args, **kwargs)
        except Exception as error:
            self.caught(stage, error)
            return None

    def caught(self, stage: str, error: Exception) -> None:
        """What becomes of an error: a mistake is raised, a failure ends the recording.

        Hooks that run often catch their errors themselves and call this.
        """
        if is_mistake(error):
            raise error
        self.failure = as_failure(stage, error)
        if self.strict:
            raise self.failure from error
        _drop_frames(error)

    def after_failure(self) -> None:
        """What a hook does when the recording has ended: nothing, or raise again if `strict`."""
        if self.failure is not None and self.strict:
            raise self.failure

    def book(
        self, stage: str, action: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R | None:
        """The same for bookkeeping, which is made in main memory whatever the default device is."""
        with _in_main_memory():
            return self.run(stage, action, *args, **kwargs)


def is_mistake(error: Exception) -> bool:
    """Whether the loop's author is to be told at once: the recorder is not used as it must be.

    >>> is_mistake(RecordingError("no ids")), is_mistake(LedgerError("the disk is full"))
    (True, False)
    """
    failed = NonFiniteError | RecorderFailedError
    return isinstance(error, RecordingError) and not isinstance(error, failed)


def as_failure(stage: str, error: Exception) -> DualformError:
    """The error as one of ours."""
    if isinstance(error, DualformError):
        return error
    return RecorderFailedError(f"recording failed {stage}: {type(error).__name__}: {error}.")


def _drop_frames(error: BaseException | None) -> None:
    """Lets go of the calls that led to an error: their variables would keep tensors alive."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what goes wrong with the disk into errors of ours.

    >>> with writing(Path("runs/mine")):
    ...     raise PermissionError(13, "Permission denied")
    Traceback (most recent call last):
    dualform.errors.LedgerError: cannot write to 'runs/mine': [Errno 13] Permission denied; ...
    """
    try:
        yield
    except DualformError:
        raise
    except OSError as error:
        cure = "make room" if error.errno == errno.ENOSPC else "choose a folder that can be written"
        raise LedgerError(f"cannot write to '{path}': {error}; {cure}.") from error


@contextmanager
def starting(path: Path) -> Iterator[None]:
    """Turns what goes wrong before training starts into errors of ours.

    >>> with starting(Path("runs/mine")):
    ...     raise KeyError("a defect")
    Traceback (most recent call last):
    dualform.errors.RecorderFailedError: recording into 'runs/mine' cannot start: KeyError: ...
    """
    try:
        with writing(path), _in_main_memory():
            yield
    except DualformError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise RecorderFailedError(f"recording into '{path}' cannot start: {problem}.") from error


def _in_main_memory() -> AbstractContextManager[Any]:
    elsewhere = torch.empty(0).device.type != "cpu"  # faster than torch.get_default_device()
    return torch.device("cpu") if elsewhere else nullcontext()
