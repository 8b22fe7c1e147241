"""Every error dualform raises on purpose.

    DualformError
    ├── LedgerError (OSError)        the run folder cannot be written or read
    │   ├── NotARunError             the path holds something else, or nothing
    │   ├── RunExistsError           the path already holds a run
    │   ├── RunLockedError           another process is recording into it
    │   ├── FormatVersionError       the run has a format that is not read
    │   └── CorruptError             a committed file does not match its log
    ├── RecordingError (RuntimeError)  the training loop cannot be booked
    │   ├── SampleIdsError (ValueError)   ids that do not fit the batch
    │   ├── NonFiniteError           NaN or infinity reached a gradient
    │   └── RecorderFailedError      recording itself failed; the loop did nothing wrong
    ├── ReadingError (ValueError)    a question the run cannot answer
    │   ├── UnknownLayerError (KeyError)  no such layer or book
    │   ├── UnknownStepError         no such step
    │   ├── UnknownSampleError (KeyError) no such sample
    │   ├── ModelMismatchError       the model is not the one that was recorded
    │   └── ClusterError (RuntimeError)  other machines cannot read the run
    ├── EvaluationError (ValueError)   scores and ground truth that do not go together
    │   └── RetrainingError (RuntimeError) a training in a worker process failed
    ├── AttentionError (ValueError)  shapes, masks or options an attention layer cannot take
    └── FamilyError (ValueError)     a distribution that does not exist

Each is also the builtin named in parentheses, so `except OSError` keeps working. And every warning:

    DualformWarning (UserWarning)
    ├── CoverageWarning              some parameters are recorded by step, not by sample
    └── RecordingWarning             something that the author of the loop may not intend

>>> from dualform.errors import DualformError, LedgerError
>>> issubclass(LedgerError, DualformError), issubclass(LedgerError, OSError)
(True, True)
"""

from __future__ import annotations


class DualformError(Exception):
    """The family of all errors raised by dualform.

    >>> import dualform
    >>> try:
    ...     dualform.open("no/run")
    ... except dualform.DualformError as error:
    ...     print(error)
    'no/run' is not a dualform run: there is nothing at that path.
    """

    def __str__(self) -> str:  # KeyError would print the message quoted
        return str(self.args[0]) if self.args else ""


class LedgerError(DualformError, OSError):
    """The run folder cannot be written or read."""


class NotARunError(LedgerError):
    """The path does not hold a dualform run."""


class RunExistsError(LedgerError):
    """The path already holds a run, and nothing said to go on or to replace it."""


class RunLockedError(LedgerError):
    """Another process is recording into this run."""


class FormatVersionError(LedgerError):
    """The run has another format than this version reads."""


class CorruptError(LedgerError):
    """A committed file does not match what the log says of it."""


class RecordingError(DualformError, RuntimeError):
    """The training loop does something that cannot be booked."""


class SampleIdsError(RecordingError, ValueError):
    """The sample ids do not fit the batch."""


class NonFiniteError(RecordingError):
    """NaN or infinity reached a gradient."""

    step: int = 0

    @classmethod
    def at(cls, book: str, step: int) -> NonFiniteError:
        """The error for a book whose gradient was not finite at a step."""
        error = cls(
            f"the gradient of '{book}' is not finite at step {step} (NaN in the loss?). The run "
            f"is committed up to step {step - 1}; go back to a checkpoint and use resume=True."
        )
        error.step = step
        return error


class DualformWarning(UserWarning):
    """The family of all warnings given by dualform.

    >>> import warnings
    >>> warnings.filterwarnings("ignore", category=CoverageWarning)  # if that is intended
    >>> issubclass(CoverageWarning, DualformWarning)
    True
    """


class CoverageWarning(DualformWarning):
    """Some parameters are recorded by step, not by sample: which, how much of all, and why."""


class RecordingWarning(DualformWarning):
    """The training loop, or its recording, does something that its author may not intend."""


class RecorderFailedError(RecordingError):
    """Recording itself failed; the loop did nothing wrong."""


class RecordingEndedWarning(DualformWarning):
    """A failure ended the recording, and the training goes on without it."""


class FamilyError(DualformError, ValueError):
    """There is no such distribution, or none with these parameters."""


class ReadingError(DualformError, ValueError):
    """The run cannot answer this question."""


class UnknownLayerError(ReadingError, KeyError):
    """The run has no such layer or book."""


class UnknownStepError(ReadingError):
    """The run has no such step."""


class UnknownSampleError(ReadingError, KeyError):
    """The run has no such sample."""


class ModelMismatchError(ReadingError):
    """The model is not the one this run recorded."""


class ClusterError(ReadingError, RuntimeError):
    """Other machines cannot be reached, cannot see the run, or failed to read it."""


class EvaluationError(DualformError, ValueError):
    """What was given cannot be evaluated: it does not go together, or not with the folder."""


class RetrainingError(EvaluationError, RuntimeError):
    """A training of a ground truth failed."""


class AttentionError(DualformError, ValueError):
    """Shapes, masks or options that an attention layer cannot take."""
