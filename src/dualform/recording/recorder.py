"""Watching a training loop: from hooks to a run folder.

Three kinds of threads take part. Each object belongs to one of them, which alone changes it:

- The *training thread* runs the loop. It owns the recorder and its stages (`step_recorder.py`).
  While the loop waits in `backward()`, autograd's threads work in its place, and write rows.
- The *writer's thread* (`delivery.py`) owns the bookkeeper. It checks steps and makes blocks.
- Threads that *write shards* (`dualform.ledger`) only give pages back, through a deque.

What goes from one to another is a message (`messages.py`), in a queue. Nobody changes it again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.errors import DualformError, RecordingEndedWarning, RecordingError
from dualform.ledger.samples import Columns, Label, Previews, SampleId, describe_samples
from dualform.optimizers import Rule, rule_for
from dualform.recording.guard import AFTER, BEFORE, Guard, starting
from dualform.recording.keep import AUTO, Keep
from dualform.recording.other_optimizers import OtherOptimizers
from dualform.recording.plan import (
    Plan,
    compiled_part,
    make_plan,
    refuse_to_capture,
    refuse_wrapped,
    torch_optimizer,
    uncompiled,
    unwrapped,
    without_join,
)
from dualform.recording.processes import Line, Processes
from dualform.recording.sample_ids import SampleIds
from dualform.recording.save_detector import SaveDetector
from dualform.recording.shards import all_sharded
from dualform.recording.stages import make_stages
from dualform.recording.start import Opened, give_parts, resume_run, start_run
from dualform.recording.step_recorder import StepRecorder
from dualform.recording.together import (
    all_or_none,
    begin_together,
    refuse_in_several,
    refuse_unlike,
    step_to_go_on_from,
)

R = TypeVar("R")
AT_THE_END, AFTER_AN_ERROR = 300.0, 10.0
"""So many seconds a process that leaves the `with` statement waits for the others to do so."""
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Options:
    """What a recorder was asked for."""

    model: nn.Module
    optimizer: Optimizer
    describe: Callable[[Path], None] | None
    resume: bool
    overwrite: bool
    buffer_bytes: int
    keep: Keep
    layers: str | Sequence[str] | None
    processes: int | None

    @property
    def trained(self) -> nn.Module:
        """The model itself, without what compiles it or averages its gradients."""
        return unwrapped(self.model)

    @property
    def compiled(self) -> nn.Module | None:
        """What of it is compiled, if anything is."""
        return compiled_part(self.model)


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
        keep: Keep = AUTO,
        layers: str | Sequence[str] | None = None,
        processes: int | None = None,
    ) -> None:
        self.path = path
        given = (describe, resume, overwrite, buffer_bytes, keep, layers, processes)
        self._options = Options(model, torch_optimizer(optimizer), *given)
        self._guard, self._sample_ids = Guard(strict), SampleIds()
        self._steps: StepRecorder | None = None
        self._hooks: ExitStack | None = None
        """What takes the hooks off; None where nothing is recorded."""
        self._broken_off = False
        self._processes = Processes()
        """Those that record together."""

    def __repr__(self) -> str:
        state = "recording" if self._hooks and self.failure is None else "not recording"
        return f"Recorder({str(self.path)!r}, {state}, step {self.step})"

    @property
    def step(self) -> int:
        """How many optimizer steps are recorded."""
        return 0 if self._steps is None else self._steps.step

    @property
    def failure(self) -> DualformError | None:
        """What ended the recording before the loop did; None where nothing has."""
        return self._guard.failure

    def __enter__(self) -> Recorder:
        asked = self._options
        optimizer, model = asked.optimizer, asked.trained
        with starting(self.path):
            all_sharded(model)
            refuse_wrapped(asked.model)
            self._processes = Processes.training(asked.model, asked.processes)
            try:
                opened, plan, rule = self._open(self._processes.steps)
            except BaseException:
                self._processes.close()
                raise
            try:
                self._sample_ids.named = opened.named
                self._sample_ids.read(self.path)
                given = (self._guard, self._sample_ids, asked.buffer_bytes, self._processes)
                stages = make_stages(opened, model, optimizer, plan, rule, *given, asked.compiled)
                self._steps = StepRecorder(stages, optimizer, opened.writer.committed, opened.notes)
                self._hooks = self._hook(self._steps, plan.parameters)
            except BaseException:
                opened.writer.abandon()
                self._processes.close()
                raise
        return self

    def _open(self, line: Line) -> tuple[Opened, Plan, Rule]:
        """Makes the run, or goes on with one; in all processes or in none."""
        asked, of = self._options, line.of
        model, optimizer = asked.trained, asked.optimizer

        def planned() -> tuple[Plan, Rule]:
            rule = rule_for(optimizer)
            plan = make_plan(model, optimizer, rule, asked.keep, asked.layers)
            refuse_in_several(plan, model, of)
            if asked.compiled is not None:
                refuse_to_capture(asked.compiled, plan.keep, bool(plan.parts))
            return plan, rule

        def begin() -> Opened:
            given = (self.path, model, optimizer, plan, rule)
            if asked.resume:
                opened = resume_run(*given, line, step)
            else:
                opened = start_run(*given, asked.overwrite, line)
            try:
                if asked.describe is not None:
                    asked.describe(self.path)
            except BaseException:
                opened.writer.abandon()
                raise
            return opened

        plan, rule = all_or_none(line, planned)
        facts = {"optimizer": rule.name, "resume": asked.resume, "buffer_bytes": asked.buffer_bytes}
        refuse_unlike(line, self.path, plan, facts)
        step = 0
        if asked.resume:
            step = step_to_go_on_from(line, self.path, model, plan, rule, asked.processes)
        help_begin = partial(give_parts, model, optimizer, plan, rule, line)
        return begin_together(line, self.path, begin, help_begin, plan), plan, rule

    def _hook(self, steps: StepRecorder, parameters: dict[str, nn.Parameter]) -> ExitStack:
        """Hooks on everything that a step passes, until what it returns is closed."""
        model, optimizer = self._options.trained, self._options.optimizer
        mark = self.checkpoint if self._processes.of == 1 else partial(self._mark_soon, steps)
        with ExitStack() as hooks:
            hooks.callback(steps.stages.watch.close)
            hooks.enter_context(uncompiled())
            hooks.enter_context(without_join(self._options.model))
            hooks.callback(SaveDetector(model, optimizer, mark).close)
            shared = partial(self._other_stepped, steps)
            hooks.callback(OtherOptimizers(optimizer, parameters, shared).close)
            before, after = partial(self._before_step, steps), partial(self._after_step, steps)
            hooks.callback(optimizer.register_step_pre_hook(before).remove)
            hooks.callback(optimizer.register_step_post_hook(after).remove)
            return hooks.pop_all()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        steps, hooks = self._require_recording(), self._hooks
        assert hooks is not None
        hooks.close()
        self._hooks = None
        wait = AT_THE_END if error is None else AFTER_AN_ERROR
        try:
            if self.failure is None:
                self._guard.book("at the end", self._finish, steps, wait)
            if self.failure is not None:
                steps.stages.meeting.has_spoken = False
                steps.tell_failed(AFTER_AN_ERROR)
                self._break_off(steps)
        except BaseException:
            if error is None:  # else the error that ended the loop is the one to see
                raise
        finally:
            steps.stages.delivery.abandon()
            self._processes.close()
        if error is None and self.failure is None:
            steps.receive(rest=True)
            if self._processes.is_first:
                steps.stages.notices.conclude(*steps.outcome)

    @staticmethod
    def _finish(steps: StepRecorder, wait: float) -> None:
        try:
            steps.hand_over_rest(wait)
        finally:
            steps.stages.delivery.close()

    def samples(self, ids: Tensor | Sequence[SampleId]) -> None:
        """Names the samples of the next forward pass, one id for each (integers or strings).

        Without it, samples are numbered in the order they are seen, each visit anew. Name those of
        every step, or of none: ids and numbers are never mixed. An id may come several times.
        """
        watch = self._require_recording().stages.watch
        self._guard.run("when samples were named", watch.samples, ids, self._sample_ids)

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
        self._sample_ids.describe(ids)
        writer = (self._processes.rank, self._processes.of)
        given = (self.path, ids, labels, previews, columns, writer)
        self._guard.run("when samples were described", describe_samples, *given)

    def checkpoint(self) -> None:
        """Marks this step: everything so far is made durable, and the weights are kept.

        `record(..., resume=True)` goes on from the marked step whose weights the model has. A loop
        that saves both model and optimizer need not call it: the step is marked as soon as both
        were asked for their `state_dict()`. Where only the model is saved, call it before saving.

        Of several processes, each must call it. Where one of them saves, the others are told before
        the next step, and the run is marked then.
        """
        steps = self._require_recording()
        self._guarded("at a checkpoint", steps, steps.mark)

    @staticmethod
    def _mark_soon(steps: StepRecorder) -> None:
        steps.stages.meeting.wants_mark = True

    def _require_recording(self) -> StepRecorder:
        if self._hooks is None or self._steps is None:
            raise RecordingError(
                "the recorder is not recording; use it inside `with dualform.record(…) as …:`."
            )
        return self._steps

    def _guarded(
        self,
        stage: str,
        steps: StepRecorder,
        action: Callable[..., R],
        *args: Any,
        whole: bool = True,
    ) -> R | None:
        """Runs a part of recording; should it fail, the recording is broken off."""
        result = self._guard.book(stage, action, *args)
        if self.failure is not None:
            self._break_off(steps, whole)
        return result

    def _break_off(self, steps: StepRecorder, whole: bool = True) -> None:
        """After a failure: commits the whole steps so far, gives the run free, and warns once.

        `whole` is False where the weights are those of a step that could not be booked. Then steps
        that were not handed over yet are lost as well, since what they did to a parameter as a
        whole can no longer be told.
        """
        if self._broken_off:
            return
        self._broken_off = True
        watch, delivery = steps.stages.watch, steps.stages.delivery
        if not watch.is_inside:
            watch.close()
        rest = (steps.hand_over_rest, partial(steps.hand_over, True, keep=False))
        for action in (
            *(rest if whole and steps.may_end else ()),
            delivery.close,
            delivery.abandon,
        ):
            with suppress(Exception):  # the failure itself is what is reported
                action()
        steps.forget()
        if not self._guard.strict:
            kept = f"The run '{self.path}' is readable up to step {delivery.committed}."
            ended = f"recording has ended; training is not affected. {self.failure} {kept}"
            warnings.warn(ended, RecordingEndedWarning, stacklevel=3)

    def _before_step(
        self, steps: StepRecorder, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> Arguments | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0]: the optimizer
        steps.stages.meeting.has_spoken = False
        is_own = self._guarded(BEFORE, steps, steps.before_step, optimizer, closure is None)
        if closure is None:
            self._tell_failed(steps)
            return None
        if not (is_own or self._processes.of > 1):
            return None

        def observed() -> Any:  # the gradients that a closure leaves are those that are used
            loss = closure()
            if is_own:
                self._guarded(BEFORE, steps, steps.observe)
            self._tell_failed(steps)
            return loss

        others = {name: value for name, value in kwargs.items() if name != "closure"}
        return (args[0], observed), others

    def _after_step(
        self, steps: StepRecorder, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> None:
        self._guarded(AFTER, steps, steps.after_step, optimizer, whole=False)
        self._advise(steps)

    def _tell_failed(self, steps: StepRecorder) -> None:
        """Tells other processes of a failure, where they wait to hear of this one."""
        if self.failure is not None:
            steps.tell_failed()

    def _other_stepped(
        self, steps: StepRecorder, other: Optimizer, before: dict[str, Tensor]
    ) -> None:
        """Another optimizer has changed parameters, which were so `before` it."""
        stage = "at the step of another optimizer"
        self._guarded(stage, steps, steps.share, other, before)
        self._advise(steps)

    def _advise(self, steps: StepRecorder) -> None:
        """Warns, outside of the guard: a warning may be an error to the user."""
        if self.failure is None and steps.stages.notices.waiting and self._processes.is_first:
            steps.stages.notices.give()
