"""The stages of a recording in the training thread, and how they are put together."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from dualform.optimizers import Rule
from dualform.recording.bases import BookBases
from dualform.recording.book_states import BookStates, Event
from dualform.recording.bookkeeping import NOISY, Bookkeeper
from dualform.recording.delivery import Delivery
from dualform.recording.first_check import FirstCheck
from dualform.recording.guard import Guard
from dualform.recording.keep import ASKED, NOT_RECORDED
from dualform.recording.meeting import Meeting
from dualform.recording.notices import Notices
from dualform.recording.observer import StepObserver
from dualform.recording.plan import Plan
from dualform.recording.processes import Processes
from dualform.recording.reconcile import Reconciler
from dualform.recording.sample_ids import SampleIds
from dualform.recording.sample_numbers import SampleNumbers
from dualform.recording.schedule import Schedule
from dualform.recording.shared_bases import SharedBases
from dualform.recording.snapshots import Snapshots
from dualform.recording.spot_checks import SpotChecks
from dualform.recording.start import Opened
from dualform.recording.watch import Watch


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of recording in the training thread, in the order a step passes them."""

    bases: BookBases
    """The bases of books that are summarized."""
    watch: Watch
    """Forward and backward passes: writes rows to pages."""
    check: FirstCheck
    """Holds the rows of new books against their gradients."""
    observer: StepObserver
    """Makes a `RecordedStep` of what the optimizer does."""
    spot_checks: SpotChecks
    """Makes some steps twice, and compares whole weights."""
    snapshots: Snapshots
    """Copies weights where they are to be kept."""
    schedule: Schedule
    """Says when steps are handed over."""
    delivery: Delivery
    """Sends hand-overs to the writer's thread, and receives its findings."""
    notices: Notices
    """Tells the user."""
    meeting: Meeting
    """What the processes that record together agree on."""


def make_stages(
    opened: Opened,
    model: nn.Module,
    optimizer: Optimizer,
    plan: Plan,
    rule: Rule,
    guard: Guard,
    sample_ids: SampleIds,
    buffer_bytes: int,
    processes: Processes,
    compiled: nn.Module | None = None,
) -> Stages:
    """All stages of a recording that begins; `compiled` is what the loop calls, if it is."""
    states, bases = BookStates(plan.parameters), BookBases()
    if processes.of > 1:
        bases = SharedBases(processes.steps, plan.parameters)
    observer = StepObserver(model, plan, rule, optimizer, states, bases)
    observer.keep_by_step(Event.RESUMED, opened.by_step)
    harmless = (NOISY, ASKED, NOT_RECORDED)
    notices = Notices(plan, type(optimizer).__name__, observer.trained, harmless)
    booked = plan.parameters if rule.fields else {}
    first = opened.writer.committed + 1
    given = (first, opened.streams, guard, plan.keep, bases, compiled, processes.of)
    watch = Watch(model, booked, states, *given)
    line, meeting = processes.writers, Meeting(processes.steps, bases)
    numbers, reconciler = SampleNumbers(opened.samples), Reconciler(plan, rule, optimizer, line)
    bookkeeper = Bookkeeper(plan, numbers, reconciler, observer.excerpts.take(), line)
    pool = watch.rows.streams.pool
    delivery = Delivery(opened.writer, bookkeeper, pool, plan.parameters.values(), line)
    return Stages(
        bases,
        watch,
        FirstCheck(plan, rule, states, watch, sample_ids, meeting),
        observer,
        SpotChecks(plan.parameters, optimizer, rule),
        Snapshots(model, optimizer, plan, rule),
        Schedule(delivery.handover_bytes(buffer_bytes), buffer_bytes),
        delivery,
        notices,
        meeting,
    )
