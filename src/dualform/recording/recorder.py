"""Watching a training loop: from hooks to a run folder."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dualform.errors import DualformError, RecordingEndedWarning, RecordingError
from dualform.ledger.codecs import codec_named
from dualform.ledger.samples import Columns, Label, Previews, SampleId, describe_samples
from dualform.optimizers import Rule, rule_for
from dualform.recording.advice import Advice
from dualform.recording.books import Books
from dualform.recording.delivery import Delivery, Parcel
from dualform.recording.glance import Glance
from dualform.recording.guard import Guard, starting
from dualform.recording.kept import Keeper
from dualform.recording.naming import Naming
from dualform.recording.others import OtherOptimizers
from dualform.recording.pace import Pace
from dualform.recording.plan import Plan, is_nested, make_plan, torch_optimizer, uncompiled
from dualform.recording.reconcile import Reconciler
from dualform.recording.saving import Saving
from dualform.recording.settle import NOISY, Settler
from dualform.recording.spot_checks import SpotChecks
from dualform.recording.start import Opened, resume_run, start_run
from dualform.recording.steps import Step
from dualform.recording.verify import Verifier
from dualform.recording.watch import Watch

R = TypeVar("R")
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
BEFORE, AFTER = "before the optimizer's step", "after the optimizer's step"


class Recorder:
    """Records a training loop as a ledger; made by `dualform.record`, used in a `with` statement.

    Its hooks change nothing: training is bit-identical with and without it.

    >>> import tempfile, torch, dualform
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with dualform.record(model, optimizer, tempfile.mkdtemp() + "/run") as recorder:
    ...     recorder.samples(["ada", "bob"])
    ...     recorder.describe(["ada", "bob"], labels=[0, 1], previews=["Ada's text", "Bob's"])
    ...     model(torch.randn(2, 3)).square().mean().backward()
    ...     optimizer.step()
    ...     recorder.checkpoint()
    >>> recorder.step
    1
    >>> recorder
    Recorder('.../run', not recording, step 1)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        path: Path,
        *,
        describe: Callable[[Path], None] | None = None,
        resume: bool = False,
        overwrite: bool = False,
        buffer_bytes: int = 128 << 20,
        strict: bool = False,
        codec: str = "exact",
    ) -> None:
        self.path, self._codec = path, codec_named(codec)
        self.step = 0
        """How many optimizer steps are recorded."""
        self._model, self._optimizer = model, torch_optimizer(optimizer)
        self._describe, self._resume, self._overwrite = describe, resume, overwrite
        self._buffer_bytes, self._handles = buffer_bytes, list[RemovableHandle]()
        self._guard, self._naming, self._broken_off = Guard(strict), Naming(), False

    def __repr__(self) -> str:
        state = "recording" if self._handles and self.failure is None else "not recording"
        return f"Recorder({str(self.path)!r}, {state}, step {self.step})"

    @property
    def failure(self) -> DualformError | None:
        """What ended the recording before the loop did; None where nothing has."""
        return self._guard.failure

    def __enter__(self) -> Recorder:
        model, optimizer = self._model, self._optimizer
        with starting(self.path):
            rule = rule_for(optimizer)
            plan = make_plan(model, optimizer, rule)
            if self._resume:
                opened = resume_run(self.path, model, optimizer, plan, rule)
            else:
                opened = start_run(self.path, model, optimizer, plan, rule, self._overwrite)
            self._writer, self.step = opened.writer, opened.writer.committed
            try:
                self._begin(opened, plan, rule)
            except BaseException:
                self._writer.abandon()
                raise
        return self

    def _begin(self, opened: Opened, plan: Plan, rule: Rule) -> None:
        model, optimizer = self._model, self._optimizer
        self._keeper, self._naming.named = Keeper(model, optimizer, plan, rule), opened.named
        if self._describe is not None:
            self._describe(self.path)
        self._naming.read(self.path)
        self._books = Books(model, plan, rule, optimizer)
        self._advice = Advice(plan, type(optimizer).__name__, self._books.trained, harmless=NOISY)
        booked = plan.parameters if rule.fields else {}
        self._watch = Watch(model, booked, self.step + 1, opened.streams, self._guard)
        ports, samples = self._watch.ports.all, opened.samples
        seen = (self._watch.owners.refused, self._books.glances, Reconciler(plan, rule, optimizer))
        self._settler = Settler(plan, ports, samples, self._codec, *seen, self._advice)
        self._verifier = Verifier(self._books, self._watch, self._settler, rule, self._naming)
        parameters = plan.parameters.values()
        self._delivery = Delivery(self._writer, self._settler, self._watch.ports.pool, parameters)
        parcel_bytes = self._delivery.parcel_bytes(self._buffer_bytes)
        self._pace, self._step_bytes = Pace(parcel_bytes, self._buffer_bytes), 0
        self._steps, self._seen_ports = list[Step](), 0
        self._spot_checks = SpotChecks(plan.parameters, optimizer, rule)
        self._current: Step | None = None
        self._keep_by_step(set(opened.by_step))
        self._marked: tuple[int, Glance] = (-1, ())
        """The step that was marked last, and the weights it was marked with."""
        self._eagerly = uncompiled()
        self._saving = Saving(model, optimizer, self.checkpoint)
        self._before_first, self._notes = self.step, list[dict[str, Any]]()
        self._others = OtherOptimizers(optimizer, plan.parameters, self._other_stepped)
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watch.close()
        self._others.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._saving.close()
        self._eagerly.close()
        try:
            if self.failure is None:
                self._guard.book("at the end", self._finish)
            if self.failure is not None:
                self._break_off()
        except BaseException:
            if error is None:  # else the error that ended the loop is the one to see
                raise
        finally:
            self._writer.abandon()
        if error is None and self.failure is None:
            self._advice.conclude(self.step - self._before_first, self._delivery.unkept)

    def samples(self, ids: Tensor | Sequence[SampleId]) -> None:
        """Names the samples of the next forward pass, one id for each (integers or strings).

        Without it, samples are numbered in the order they are seen, each visit anew. Name those of
        every step, or of none: ids and numbers are never mixed. An id may come several times.
        """
        self._require_recording()
        self._guard.run("when samples were named", self._watch.samples, ids, self._naming)

    def describe(
        self,
        ids: Sequence[SampleId],
        labels: Sequence[Label] | Tensor | None = None,
        previews: Previews | None = None,
        columns: Columns | None = None,
    ) -> None:
        """Adds labels, small previews (images, texts or numbers) and other columns, for people.

        Only samples that are named (`recorder.samples`) can be described.

        Args:
            columns: what else is known of each sample, such as `{"source": ["web", "book"]}`.
        """
        self._naming.describe(ids)
        given = (self.path, ids, labels, previews, columns)
        self._guard.run("when samples were described", describe_samples, *given)

    def checkpoint(self) -> None:
        """Marks this step: everything so far is made durable, and the weights are kept.

        `record(..., resume=True)` goes on from the marked step whose weights the model has. A loop
        that saves both model and optimizer need not call it: the step is marked as soon as both
        were asked for their `state_dict()`. Where only the model is saved, call it before saving.
        """
        self._require_recording()
        self._guarded("at a checkpoint", self._mark_step)

    def _mark_step(self) -> None:
        now, (step, then) = self._books.glances.take(), self._marked
        if step == self.step and not self._books.glances.differing([then], [now]):
            return  # saving has marked it already
        self._book_late_changes()
        self._hand_over(flush=True, mark="checkpoint")
        self._delivery.wait()
        self._marked = (self.step, now)

    def _require_recording(self) -> None:
        if not self._handles:
            raise RecordingError(
                "the recorder is not recording; use it inside `with dualform.record(…) as …:`."
            )

    def _finish(self) -> None:
        try:
            self._hand_over_rest()
        finally:
            self._delivery.close()

    def _hand_over_rest(self) -> None:
        self._book_late_changes(ending=True)
        broken_off = self._current is not None  # then the weights are no step's
        self._hand_over(flush=True, mark="" if broken_off else "final", last=True)

    def _guarded(
        self, stage: str, action: Callable[..., R], *args: Any, whole: bool = True
    ) -> R | None:
        """Runs a part of recording; should it fail, the recording is broken off."""
        result = self._guard.book(stage, action, *args)
        if self.failure is not None:
            self._break_off(whole)
        return result

    def _advise(self) -> None:
        """Warns, outside of the guard: a warning may be an error to the user."""
        if self.failure is None:
            self._advice.give()

    def _break_off(self, whole: bool = True) -> None:
        """After a failure: commits the whole steps so far, gives the run free, and warns once.

        `whole` is False where the weights are those of a step that could not be booked. Then steps
        that were not handed over yet are lost as well, since what they did to a parameter as a
        whole can no longer be told.
        """
        if self._broken_off:
            return
        self._broken_off = True
        if not self._watch.is_inside:
            self._watch.close()
        rest = (self._hand_over_rest, partial(self._hand_over, True, keep=False))
        for action in (*(rest if whole else ()), self._delivery.close, self._writer.abandon):
            with suppress(Exception):  # the failure itself is what is reported
                action()
        self._steps = []
        self._watch.ports.forget()
        if not self._guard.strict:
            kept = f"The run '{self.path}' is readable up to step {self._writer.committed}."
            ended = f"recording has ended; training is not affected. {self.failure} {kept}"
            warnings.warn(ended, RecordingEndedWarning, stacklevel=3)

    def _book_late_changes(self, ending: bool = False) -> None:
        """What the loop did after the last step to books kept by step belongs to that step.

        Where that was handed over, or kept a book by row, it belongs to a step of its own.
        """
        if not (ending or self._steps) and self._watch.is_midway:
            return  # then it belongs to the step under way
        if not (changes := self._books.late_changes()):
            return
        if not self._steps or self._books.are_by_row(changes, self._steps[-1].states):
            self.step += 1
            self._steps.append(self._books.standing(self.step))
            self._steps[-1].notes, self._notes = self._notes, []
            self._watch.end_step()
        last = self._steps[-1]
        for book, change in changes.items():
            last.changes[book] = last.changes.get(book, 0) + change
            last.states = self._books.as_observed(last.states, book)

    def _other_stepped(self, other: Optimizer, before: dict[str, Tensor]) -> None:
        """Another optimizer has changed parameters, which were so `before` it."""
        self._guarded("at the step of another optimizer", self._share, other, before)
        self._advise()

    def _share(self, other: Optimizer, before: dict[str, Tensor]) -> None:
        notes = self._books.share(before, other, self.step + 1)
        self._notes += notes
        self._keep_by_step(set(before), always=True)
        self._others.known |= before.keys()
        self._advice.lost(notes)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Arguments | None:
        return self._guarded(BEFORE, self._prepare, optimizer, args, kwargs)

    def _prepare(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Arguments | None:
        if is_nested(optimizer):
            return None
        self._delivery.raise_error()
        if self._pace.due:  # held back until what came after its last step is known
            self._book_late_changes()
            self._hand_over(*self._pace.due)
        if self._settler.failed:
            self._keep_by_step(set(self._settler.failed))
        if self._settler.outside:
            self._keep_by_step(set(self._settler.outside), always=True)
        self._books.hold()
        self._before = self._books.glances.take()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0]: the optimizer
        if closure is None:
            self._observe()
            return None
        others = {name: value for name, value in kwargs.items() if name != "closure"}
        return (args[0], self._observing(closure)), others

    def _observing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The user's closure; the gradients it leaves are those the optimizer will use."""

        def observed() -> Any:
            loss = closure()
            self._guarded(BEFORE, self._observe)
            return loss

        return observed

    def _observe(self) -> None:
        """Looks at the gradients the optimizer is about to use."""
        ports = self._watch.ports.all
        for port in ports[self._seen_ports :]:
            self._books.discover(port.terms)
        self._seen_ports = len(ports)
        step = self._books.observe(self.step + 1)
        step.notes, self._notes = self._notes + step.notes, []
        self._watch.dropped |= {note["book"] for note in step.notes}
        if self._watch.unnamed:
            self._verifier.hold_to_names(step)
        if self._books.unverified and (failed := self._verifier.failing(step)):
            notes = step.notes + [
                {"step": step.number, "book": book, "reason": reason}
                for book, reason in sorted(failed.items())
            ]
            self._keep_by_step(set(failed))
            self._books.hold()
            step = self._books.observe(self.step + 1)
            step.notes = notes
        self._spot_checks.before_step(step.looks)
        self._current = step

    def _keep_by_step(self, books: set[str], always: bool = False) -> None:
        self._books.keep_by_step(books, always)
        self._watch.dropped |= books
        self._settler.failed -= books
        if always:
            self._settler.outside -= books

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._guarded(AFTER, self._book_step, optimizer, whole=False)
        self._advise()

    def _book_step(self, optimizer: Optimizer) -> None:
        if self._current is None or is_nested(optimizer):
            return
        step, self._current = self._current, None
        step.changes = self._books.changes(step.states)
        self._books.remember()
        step.before, step.after = self._before, self._books.glances.take()
        step.edited = self._spot_checks.after_step()
        self.step = step.number
        self._watch.end_step()
        self._saving.end_step()
        self._steps.append(step)
        self._step_bytes += step.nbytes
        size, must_keep = self._watch.bytes + self._step_bytes, self._keeper.is_due(step.states)
        self._pace.after_step(size, must_keep)
        if self._pace.due and not self._books.shared:
            self._hand_over(*self._pace.due)
        self._advice.lost(step.notes)

    def _hand_over(
        self, flush: bool, mark: str = "", last: bool = False, keep: bool = True
    ) -> None:
        """Gives the steps so far to the writer's thread, with the weights where they are due."""
        size = self._watch.bytes + self._step_bytes
        kept = self._pace.hand_over(size, flush, bool(mark), self._keeper.nbytes) and keep
        weights = self._keeper.weights() if kept else None
        steps, self._steps, self._step_bytes = self._steps, [], 0
        pages, span = self._watch.take(), self._books.span()
        self._books.look_elsewhere()
        self._spot_checks.handed_over(span[1])
        given = (self.step, flush, weights, mark or "flush", self._books.span_glance, last)
        self._delivery.take(Parcel(steps, pages, span, *given))
