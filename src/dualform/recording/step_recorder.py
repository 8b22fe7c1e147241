"""From forward passes to hand-overs: what happens around each step, in the training thread."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor
from torch.optim import Optimizer

from dualform.errors import RecorderFailedError
from dualform.recording.automatic import RowCounts
from dualform.recording.book_states import Event, Note
from dualform.recording.delivery import Waiting
from dualform.recording.excerpts import NO_EXCERPT, differing
from dualform.recording.keep import ROWS
from dualform.recording.meeting import PATIENCE, Agreed, Occasion, Standing
from dualform.recording.messages import Handover, RecordedStep
from dualform.recording.plan import is_nested, may_nest
from dualform.recording.stages import Stages

STEPPED = "another optimizer, {}, stepped it; by row is what the recorded {} does"


class StepRecorder:
    """Makes steps of what the stages see, and hands them over; belongs to the training thread."""

    def __init__(
        self, stages: Stages, optimizer: Optimizer, step: int, notes: Sequence[Note]
    ) -> None:
        self.stages, self._optimizer, self._may_nest = stages, optimizer, may_nest(optimizer)
        self.step = self._first = step
        """How many optimizer steps are recorded."""
        self._current: RecordedStep | None = None
        """The step that is being made."""
        self._steps: list[RecordedStep] = []
        """Those that were not handed over yet."""
        self._bytes = 0
        """What they take."""
        self._streams = 0
        """How many streams are known."""
        self._notes = list(notes)
        """Notes for the next step."""
        self._marked = (-1, NO_EXCERPT)
        """The step that was marked last, and the weights it was marked with."""
        self._unkept = 0
        """The step whose weights were due last, where they were not the model's any more."""
        self._is_ready = False
        """Whether enough is known of a compiled model."""
        self._waiting = Waiting()
        """What the writer's thread has found, and was not applied yet."""

    def before_step(self, optimizer: Optimizer, observe: bool) -> bool:
        """The optimizer is about to step; whether this is a step of its own.

        Gradients are looked at where `observe` says so: a closure makes them later.
        """
        if self._may_nest and is_nested(optimizer):
            return False
        if self.stages.schedule.due and self._has_parts and not self.stages.meeting.is_over:
            self._agree()  # that all are there, who tell each other which parts have changed
        if due := self.stages.schedule.due:  # held back until what came after the step is known
            self.stages.watch.collect()
            self._book_late_changes()
            self.hand_over(*due)
        self.receive()
        self.stages.observer.begin_step()
        if observe:
            self.observe()
        return True

    def observe(self) -> None:
        """Looks at the gradients the optimizer is about to use."""
        self.stages.watch.collect()
        watch, observer, check = self.stages.watch, self.stages.observer, self.stages.check
        if not self.stages.meeting.is_over:
            self._agree()
        rows, agreed = watch.rows, self._agreed
        probe_all = watch.passes > 1 if agreed is None else agreed.had_several_passes
        streams = rows.streams.all
        if agreed is None and len(streams) > self._streams:
            observer.discover([stream.opened for stream in streams[self._streams :]])
            self._streams = len(streams)
        notes, self._notes = self._notes, []
        step = observer.observe(self.step + 1, notes, probe_all)
        if rows.unnamed and agreed is None:
            check.require_ids(step)
        if observer.states.unverified and (failed := check.failing(step)):
            observer.keep_by_step(Event.REFUTED, failed)
            observer.hold()
            refuted = [Note(step.number, book, reason) for book, reason in failed.items()]
            step = observer.observe(self.step + 1, [*step.notes, *refuted], probe_all)
        self.stages.spot_checks.before_step(step.looks)
        self._current = step

    def after_step(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped."""
        if self._current is None or (self._may_nest and is_nested(optimizer)):
            return
        stages = self.stages
        edited = stages.spot_checks.after_step()
        step, self._current = stages.observer.finish(self._current, edited), None
        self.step = step.number
        self._steps.append(step)
        self._bytes += step.nbytes
        stages.watch.end_step()
        late = stages.schedule.is_late if self._agreed is None else self._agreed.is_late
        stages.schedule.after_step(self._size, stages.snapshots.is_due(step.states), late)
        if stages.bases.begin_step() and not stages.schedule.due:
            stages.schedule.due = (False, "")  # what is probed otherwise is handed over apart
        if step.divisors and stages.delivery.from_device and not stages.schedule.due:
            stages.schedule.due = (False, "")  # they are half as large as the model
        self._capture()
        if stages.schedule.due and not stages.observer.states.shared:
            self.hand_over(*stages.schedule.due, at_once=True)
        if stages.watch.automatic.is_open:
            self._tell_of_summaries()
        if step.notes:
            stages.notices.lost(step.notes)
        if stages.spot_checks.problem:
            stages.notices.remark(stages.spot_checks.take_problem())

    def _capture(self) -> None:
        """Lets a compiled model run compiled, where enough is known of it in all processes."""
        watch, agreed = self.stages.watch, self._agreed
        may = watch.is_learning if agreed is None else agreed.may_compile
        if not (may or watch.is_learning):
            return
        found = watch.taps()
        self._is_ready = found is not None
        if may:
            own = found.lost if found is not None else None if watch.is_learning else {}
            said = self.stages.meeting.line.said(own)
            if None not in said:
                for lost in said:
                    self.stages.observer.uncaptured |= lost
                if found is not None:
                    watch.capture(found)
        for text in watch.remarks:
            self.stages.notices.remark(text)
        watch.remarks = []

    def _tell_of_summaries(self) -> None:
        """Says once what keep="auto" summarizes: after the first step that it could do so in."""
        rows, automatic = self.stages.watch.rows, self.stages.watch.automatic
        tally = rows.tally or RowCounts()
        early = self._agreed is not None and self.step == self._first + 1
        if automatic.summarized and (early or tally.stored_bytes >= tally.bytes.get(ROWS, 0)):
            rows.tally = RowCounts()  # the bases are not known yet
            return
        if automatic.summarized and self.stages.meeting.line.rank == 0:
            self.stages.notices.remark(automatic.told(tally))
        automatic.is_open, rows.tally = False, None

    def share(self, other: Optimizer, before: dict[str, Tensor]) -> None:
        """Another optimizer has changed parameters, which were so `before` it."""
        reason = STEPPED.format(type(other).__name__, type(self._optimizer).__name__)
        notes = [Note(self.step + 1, name, reason) for name in before]
        self.stages.observer.share(before, dict.fromkeys(before, reason))
        self._notes += notes
        self.stages.notices.lost(notes)

    def mark(self) -> None:
        """Makes everything so far durable, and keeps the weights; all processes do so together."""
        if not self.stages.meeting.is_over:
            try:
                self._exchange(Occasion.MARK, PATIENCE)
            except RecorderFailedError as error:
                raise RecorderFailedError(
                    f"recorder.checkpoint() waits until every process calls it: {error}"
                ) from error
        self._mark()

    def _mark(self) -> None:
        (step, then), now = self._marked, self.stages.observer.excerpts.take()
        changed = bool(differing([then], [now])) if step == self.step else True
        if self._has_parts:
            (changed,) = self.stages.meeting.line.any([changed], PATIENCE)
        if not changed:
            return  # saving has marked it already
        self.stages.watch.collect()
        self._book_late_changes()
        self.hand_over(flush=True, mark="checkpoint")
        self.stages.delivery.wait()
        self._marked = (self.step, now)

    def hand_over(
        self,
        flush: bool,
        mark: str = "",
        last: bool = False,
        keep: bool = True,
        at_once: bool = False,
    ) -> None:
        """Gives the steps so far to the writer's thread, with the weights where they are due.

        `at_once` says that nothing has happened since the last step.
        """
        watch, observer, snapshots = self.stages.watch, self.stages.observer, self.stages.snapshots
        meeting = self.stages.meeting
        due = self.stages.schedule.hand_over(self._size, flush, bool(mark), snapshots.nbytes)
        writes = meeting.line.rank == 0 or self._has_parts
        weights = snapshots.weights() if due and keep and writes else None
        steps, self._steps, self._bytes = tuple(self._steps), [], 0
        pages, refused = meeting.pages(watch.rows.take()), dict(watch.owners.refused)
        span, now = observer.hand_over()
        self.stages.spot_checks.handed_over(span.after, at_once)
        handover = Handover(
            steps, pages, refused, span, now, self.step, flush, weights, mark or "flush", last
        )
        self.stages.delivery.send(handover)

    def hand_over_rest(self, wait: float | None = None) -> None:
        """Hands over what there is at the end of the recording, when all processes are there."""
        if not self.stages.meeting.is_over:
            self._exchange(Occasion.END, wait)
        self._book_late_changes(ending=True)
        if self._steps and not self._steps[-1].divisors:
            divisors = self.stages.observer.divisors()
            self._steps[-1] = self._steps[-1]._replace(divisors=divisors)
        broken_off = self._current is not None  # then the weights are no step's
        self.hand_over(flush=True, mark="" if broken_off else "final", last=True)

    @property
    def outcome(self) -> tuple[int, int]:
        """How many steps were made; the last, if its weights were due and no longer its own."""
        return self.step - self._first, self._unkept

    def forget(self) -> None:
        """Frees the memory of what will not be written."""
        self._steps = []
        self.stages.watch.rows.forget()

    def receive(self, rest: bool = False) -> None:
        """Applies what the writer's thread has found; each process the same before the same step.

        At the end, the rest of it.
        """
        for findings in self.stages.delivery.receive():
            if findings.unkept is None:
                self._waiting.put(findings)
            else:
                self._unkept = findings.unkept
        agreed = None if rest else self._agreed
        for findings in self._waiting.take(None if agreed is None else agreed.findings):
            for event, note in findings.events:
                self.stages.observer.keep_by_step(event, {note.book: note.reason})
            self.stages.notices.lost(note for _, note in findings.events)
            for text in findings.remarks:
                self.stages.notices.remark(text)

    @property
    def _agreed(self) -> Agreed | None:
        """What the processes said last; None where one records."""
        return self.stages.meeting.last

    @property
    def _has_parts(self) -> bool:
        """Whether each process has a part of some parameters."""
        return self.stages.observer.has_parts

    @property
    def _size(self) -> int:
        """How much has come together; of several processes, in the one that had most."""
        if self._agreed is not None:
            return self._agreed.nbytes
        return self.stages.watch.rows.bytes + self._bytes

    def _agree(self) -> None:
        """Before a step of several processes: does what one of them asks of all."""
        self.stages.check.number_unnamed()
        while True:
            agreed = self._exchange(Occasion.STEP)
            if agreed.any(Occasion.END):
                raise RecorderFailedError(
                    f"process {agreed.first(Occasion.END)} has left the `with` statement after "
                    f"step {self.step}; it must reach around the same steps in every process."
                )
            if agreed.is_marked or agreed.any(Occasion.MARK):
                self._mark()
            if not agreed.any(Occasion.MARK):
                return

    def _exchange(self, occasion: Occasion, wait: float | None = None) -> Agreed:
        """Tells the other processes how this one stands, and hears the same of them."""
        stages, opened = self.stages, [each.opened for each in self.stages.watch.rows.streams.all]
        standing = Standing(
            occasion,
            self.step,
            stages.watch.rows.bytes + self._bytes,
            int(stages.schedule.is_late),
            self._waiting.count,
            stages.meeting.unknown(opened),
            int(stages.meeting.wants_mark),
            stages.check.naming,
            len(stages.bases.proposed),
            stages.watch.automatic.expected // max(1, stages.watch.passes),
            stages.watch.passes,
            stages.watch.is_learning * (1 + self._is_ready),
        )
        agreed = stages.meeting.exchange(standing, opened, wait)
        stages.observer.discover(agreed.new)
        if not stages.meeting.is_over:
            self._decide(agreed)
        return agreed

    def _decide(self, agreed: Agreed) -> None:
        """What several processes keep of rows, and in which bases."""
        stages = self.stages
        if agreed.expected:
            stages.watch.automatic.decide(agreed.expected)
            stages.watch.rows.streams.choose_again()
        if agreed.has_bases:
            stages.bases.agree()

    def tell_failed(self, wait: float | None = None) -> None:
        """Tells the other processes, once, that this one records no longer."""
        meeting = self.stages.meeting
        if not (meeting.is_over or meeting.has_spoken):
            with suppress(RecorderFailedError):
                meeting.exchange(Standing(Occasion.FAILED, self.step, *(0,) * 10), (), wait)

    @property
    def may_end(self) -> bool:
        """Whether what there is can be handed over: by all processes, or by none."""
        agreed = self._agreed
        return agreed is None or agreed.any(Occasion.END)

    def _book_late_changes(self, ending: bool = False) -> None:
        """What the loop did after the last step to books kept by step belongs to that step.

        Where that was handed over, or kept a book by row, it belongs to a step of its own.
        """
        is_midway = self._agreed is not None or self.stages.watch.rows.is_midway
        if is_midway and not (ending or self._steps):
            return  # then it belongs to the step under way
        observer = self.stages.observer
        changes = observer.late_changes(self.stages.meeting.line)
        if not changes:
            return
        if not self._steps or observer.are_by_row(changes, self._steps[-1]):
            self.step += 1
            self._steps.append(observer.standing(self.step, self._notes))
            self._notes = []
            self.stages.watch.end_step()
        self._steps[-1] = observer.with_changes(self._steps[-1], changes)
