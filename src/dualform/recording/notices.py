"""What the user is told while recording: warnings, each of them once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

from dualform.errors import CoverageWarning, RecordingWarning
from dualform.recording.book_states import Note
from dualform.recording.plan import Plan

NAMED = 4
"""So many parameters are named for each reason."""


class Notices:
    """Collects what is worth a warning, and gives it; belongs to the training thread.

    `optimizer` is the name of the recorded one, `trained` says which parameters it may change, and
    `harmless` are the reasons for which a book may be kept by step without a word.
    """

    def __init__(
        self,
        plan: Plan,
        optimizer: str,
        trained: Callable[[], Iterable[str]],
        harmless: Sequence[str],
    ) -> None:
        self._optimizer, self._trained = optimizer, trained
        self._sizes = {name: p.numel() for name, p in plan.parameters.items()}
        self._harmless = harmless
        self._by_step: dict[str, tuple[int, str]] = {}
        """Since which step each book is kept by step, and why."""
        self._told: set[str] = set()
        self._remarks: list[str] = []
        self.waiting = False
        """Whether something was taken down since the last warning."""
        self.lost([Note(1, book.name, book.reason) for book in plan.books if book.reason])

    def lost(self, notes: Iterable[Note]) -> None:
        """Takes down books that are kept by step from now on."""
        for note in notes:
            self._by_step.setdefault(note.book, (note.step, note.reason))
            self.waiting = True

    def remark(self, text: str) -> None:
        """Takes down anything else."""
        self._remarks.append(text)
        self.waiting = True

    def give(self, at_the_end: bool = False) -> None:
        """Warns: of coverage when it first falls, and at the end where it has fallen further."""
        self.waiting = False
        remarks, self._remarks = self._remarks, []
        for text in remarks:
            warnings.warn(text, RecordingWarning, stacklevel=4)
        if not self._by_step or (self._told and not at_the_end):
            return
        lost = {
            name: found
            for name, found in self._by_step.items()
            if name not in self._told and found[1] not in self._harmless
        }
        if lost:
            self._told |= lost.keys()
            warnings.warn(self._of_coverage(lost), CoverageWarning, stacklevel=4)

    def conclude(self, steps: int, unkept: int) -> None:
        """Says at the end what came of the recording, where that is not what was wanted.

        `steps` is how many were seen; `unkept` the last, where the weights are no longer its own.
        """
        if not steps:
            self.remark(
                f"the recorder saw no step: the {self._optimizer} it was given was not stepped "
                "inside the `with` statement. Give dualform.record the optimizer that the loop "
                "steps."
            )
        elif unkept:
            self.remark(
                f"the weights changed after step {unkept}, the last of the recorded "
                f"{self._optimizer}: they are no step's, and were not kept. Change or load weights "
                "after the `with` statement."
            )
        self.give(at_the_end=True)

    def _of_coverage(self, lost: Mapping[str, tuple[int, str]]) -> str:
        by_step = self._by_step.keys()
        whole = sum(self._sizes[name] for name in {*self._trained(), *by_step})
        share = sum(self._sizes[name] for name in by_step) / max(whole, 1)
        reasons: dict[tuple[int, str], list[str]] = {}
        for name, found in lost.items():
            reasons.setdefault(found, []).append(name)
        told = [
            f"{_listed(names)} from step {step} on: {reason}"
            for (step, reason), names in reasons.items()
        ]
        return (
            f"{max(share, 0.001):.1%} of the trained parameters are recorded by step, not by "
            f"sample; what changed them is kept exactly, but explains no sample. {'. '.join(told)}."
        )


def _listed(names: list[str]) -> str:
    """The first few names.

    >>> _listed(["a", "b", "c", "d", "e"])
    "'a', 'b', 'c', 'd' and 1 more"
    """
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(f"'{name}'" for name in names[:NAMED]) + more
