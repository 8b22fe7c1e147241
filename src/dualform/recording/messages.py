"""What one stage of recording tells the next. Nobody changes a message after it was sent.

The training thread makes a `RecordedStep` of every optimizer step, and hands several of them over
at once, as a `Handover`, to the writer's thread. That one answers with `Findings`, which the
training thread applies before its next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from dualform.recording.book_states import Event, Note
from dualform.recording.changes import NO_CHANGES, StepChanges
from dualform.recording.excerpts import NO_EXCERPT, Excerpt
from dualform.recording.pages import Page
from dualform.recording.probe import Look
from dualform.recording.shards import Kept
from dualform.recording.streams import OpenStream

Pages: TypeAlias = Sequence[tuple[OpenStream, Sequence[Page]]]
"""The streams, in the order they were opened, each with its pages."""


NOTHING: Mapping[str, Any] = MappingProxyType({})


class WeightSpan(NamedTuple):
    """Parameters that are not kept by step, as they were at the last hand-over and are now."""

    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]


class RecordedStep(NamedTuple):
    """Everything one optimizer step left behind."""

    number: int
    hyper: tuple[tuple[float, ...], ...]
    """The hyper-parameters of each group."""
    groups: tuple[int, ...]
    """The group of each book; -1 where the optimizer does not have it."""
    states: tuple[int, ...]
    """How the step treated each book: UNTOUCHED, BY_ROW or OBSERVED."""
    looks: Mapping[str, Look]
    """How each book kept by row was probed; a book's stays the same throughout a hand-over."""
    notes: tuple[Note, ...] = ()
    probe: tuple[tuple[str, ...], Tensor] | None = None
    """The books that the step touches by row, and what was kept of their gradients, end to end."""
    before: Excerpt = NO_EXCERPT
    after: Excerpt = NO_EXCERPT
    changes: StepChanges = NO_CHANGES
    """What the step did to the books that are kept by step."""
    divisors: Mapping[str, Tensor] = NOTHING
    """What the step divided books by that are summarized, at some steps."""
    edited: Mapping[str, Mapping[str, Tensor]] = NOTHING
    """What a spot check found: for each reason and book, whether the book must go by step."""

    @property
    def nbytes(self) -> int:
        """Bytes of observed changes and divisors, and of what was kept of gradients."""
        kept = 0 if self.probe is None else self.probe[1].nbytes
        divisors = sum([copy.nbytes for copy in self.divisors.values()])
        return kept + self.changes.nbytes + divisors


@dataclass(frozen=True, slots=True)
class Handover:
    """From the training thread to the writer's: the steps since the last hand-over."""

    steps: tuple[RecordedStep, ...]
    pages: Pages
    refused: Mapping[str, str]
    """Books whose rows cannot be given to samples, and why."""
    span: WeightSpan
    now: Excerpt
    """The parameters, after whatever came after the last step."""
    step: int
    """How many steps were made so far."""
    flush: bool
    """Whether all that was handed over so far is to be written now."""
    weights: Mapping[str, Kept] | None
    mark: str
    """Why the weights are kept, if they are."""
    last: bool = False
    """Whether recording ends with it."""
    ready: torch.cuda.Event | None = None
    """On a GPU, reached when all of it is computed."""


@dataclass(frozen=True, slots=True)
class Findings:
    """From the writer's thread to the training thread: what became of a hand-over."""

    events: tuple[tuple[Event, Note], ...] = ()
    """Books that are to be kept by step. Their notes are in the run already."""
    remarks: tuple[str, ...] = ()
    """What the user is to be told besides."""
    unkept: int | None = None
    """Where weights were due: their step if they were not the model's any more, else 0."""
