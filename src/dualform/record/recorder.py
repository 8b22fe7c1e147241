"""Watching a training loop: from hooks to a run folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dualform.errors import RecordingError
from dualform.ledger.samples import Columns, Label, Previews, SampleId, describe_samples
from dualform.record.advice import Advice
from dualform.record.books import Books
from dualform.record.dataset import describe_dataset
from dualform.record.delivery import Delivery, Parcel
from dualform.record.naming import Naming
from dualform.record.optimizers import BY_ROW, Rule, StateRule, rule_for
from dualform.record.others import OtherOptimizers
from dualform.record.plan import Plan, is_nested, make_plan, torch_optimizer, uncompiled
from dualform.record.reconcile import Reconciler
from dualform.record.settle import NOISY, Settler
from dualform.record.start import Opened, memories, resume_run, snapshot, start_run
from dualform.record.steps import Step
from dualform.record.verify import Verifier
from dualform.record.watch import Watch

FLUSH_SECONDS = 30.0
WITNESS = 8
"""Weights are kept with a shard when that adds at most an eighth to what was written."""


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
        dataset: Any = None,
        resume: bool = False,
        overwrite: bool = False,
        buffer_bytes: int = 128 << 20,
    ) -> None:
        self.path = path
        self.step = 0
        """How many optimizer steps are recorded."""
        self._model, self._optimizer = model, torch_optimizer(optimizer)
        self._dataset, self._resume, self._overwrite = dataset, resume, overwrite
        self._buffer_bytes = buffer_bytes
        self._handles: list[RemovableHandle] = []
        self._naming = Naming()

    def __repr__(self) -> str:
        state = "recording" if self._handles else "not recording"
        return f"Recorder({str(self.path)!r}, {state}, step {self.step})"

    def __enter__(self) -> Recorder:
        model, optimizer = self._model, self._optimizer
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
        self._plan, self._rule = plan, rule
        self._naming.named = opened.named
        if self._dataset is not None:
            describe_dataset(self.path, self._dataset)
        self._naming.read(self.path)
        self._books = Books(model, plan, rule, optimizer)
        self._advice = Advice(plan, type(optimizer).__name__, self._books.trained, harmless=NOISY)
        booked = plan.parameters if rule.fields else {}
        self._watch = Watch(model, booked, self.step + 1, opened.streams)
        met, ports = (opened.samples, opened.numbered), self._watch.ports.all
        strays, glances = self._watch.strays, self._books.glances
        reconciler = Reconciler(plan, rule, optimizer)
        self._settler = Settler(plan, ports, *met, strays, glances, reconciler, self._advice)
        self._verifier = Verifier(self._books, self._watch, self._settler, rule, self._naming)
        parameters = plan.parameters.values()
        self._delivery = Delivery(self._writer, self._settler, self._watch.ports.pool, parameters)
        self._parcel_bytes = self._delivery.parcel_bytes(self._buffer_bytes)
        self._seen_ports = 0
        self._steps: list[Step] = []
        self._joined: set[int] = set()
        """The books that have made a step by row."""
        self._current: Step | None = None
        self._due: tuple[bool, str] | None = None
        """How the steps so far are to be handed over: whether as a shard, and its mark."""
        self._step_bytes = self._shard_bytes = self._unwitnessed = 0
        self._flushed = time.monotonic()
        self._keep_by_step(set(opened.by_step))
        self._eagerly = uncompiled()
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
        self._eagerly.close()
        try:
            self._finish()
        except BaseException:
            if error is None:  # else the error that ended the loop is the one to see
                raise
        finally:
            self._writer.abandon()
        if error is None:
            seen, unkept = self.step - self._before_first, self._delivery.unkept
            self._advice.conclude(seen, unkept)

    def samples(self, ids: Tensor | Sequence[SampleId]) -> None:
        """Names the samples of the next forward pass, one id for each (integers or strings).

        Without it, samples are numbered in the order they are seen, each visit anew. Name those of
        every step, or of none: ids and numbers are never mixed.
        """
        self._require_recording()
        self._watch.samples(ids, self._naming)

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
        describe_samples(self.path, ids, labels, previews, columns)

    def checkpoint(self) -> None:
        """Marks this step: everything so far is made durable, and the weights are kept.

        Call it where you save the model and the optimizer; `record(..., resume=True)` goes on
        from the marked step whose weights the model has.
        """
        self._require_recording()
        self._book_late_changes()
        self._hand_over(flush=True, mark="checkpoint")
        self._delivery.wait()

    def _require_recording(self) -> None:
        if not self._handles:
            raise RecordingError(
                "the recorder is not recording; use it inside `with dualform.record(…) as …:`."
            )

    def _finish(self) -> None:
        try:
            self._book_late_changes(ending=True)
            broken_off = self._current is not None  # then the weights are no step's
            self._hand_over(flush=True, mark="" if broken_off else "final", last=True)
        finally:
            self._delivery.close()

    def _book_late_changes(self, ending: bool = False) -> None:
        """What the loop did after the last step to books kept by step belongs to that step.

        Where that was handed over, or kept a book by row, it belongs to a step of its own.
        """
        if not (ending or self._steps) and self._watch.is_midway:
            return  # then it belongs to the step under way
        changes = self._books.late_changes()
        if not changes:
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
        notes = self._books.share(before, other, self.step + 1)
        self._notes += notes
        self._keep_by_step(set(before), always=True)
        self._others.known |= before.keys()
        self._advice.lost(notes)
        self._advice.give()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if is_nested(optimizer):
            return None
        self._delivery.raise_error()
        if self._due:  # held back until what came after its last step is known
            self._book_late_changes()
            self._hand_over(*self._due)
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
            self._observe()
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
        self._current = step

    def _keep_by_step(self, books: set[str], always: bool = False) -> None:
        self._books.keep_by_step(books, always)
        self._watch.dropped |= books
        self._settler.failed -= books
        if always:
            self._settler.outside -= books

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._current is None or is_nested(optimizer):
            return
        step, self._current = self._current, None
        step.changes = self._books.changes(step.states)
        self._books.remember()
        step.before, step.after = self._before, self._books.glances.take()
        self.step = step.number
        self._watch.end_step()
        self._steps.append(step)
        self._step_bytes += step.nbytes
        size = self._watch.bytes + self._step_bytes
        overdue = time.monotonic() - self._flushed > FLUSH_SECONDS
        if self._must_keep(step.states):
            self._due = (True, "state")
        elif overdue or size >= self._parcel_bytes:
            self._due = (overdue or self._shard_bytes + size >= self._buffer_bytes, "")
        if self._due and not self._books.shared:
            self._hand_over(*self._due)
        self._advice.lost(step.notes)
        self._advice.give()

    def _must_keep(self, states: Sequence[int]) -> bool:
        """Whether the rule needs what the optimizer remembers after this step."""
        if not isinstance(self._rule, StateRule):
            return False
        joined = {at for at, state in enumerate(states) if state == BY_ROW} - self._joined
        self._joined |= joined
        return self._rule.keeps(self._optimizer, bool(joined))

    def _hand_over(self, flush: bool, mark: str = "", last: bool = False) -> None:
        """Gives the steps so far to the writer's thread, with the weights where they are due."""
        size = self._watch.bytes + self._step_bytes
        self._shard_bytes += size
        self._unwitnessed += size
        weights = None
        if mark or (flush and self._unwitnessed >= WITNESS * self._weight_bytes()):
            weights, self._unwitnessed = self._kept(), 0
        if flush:
            self._shard_bytes, self._flushed = 0, time.monotonic()
        steps, self._steps, self._step_bytes, self._due = self._steps, [], 0, None
        pages, span = self._watch.take(), self._books.span()
        self._books.look_elsewhere()
        now, mark = self._books.span_glance, mark or "flush"
        parcel = Parcel(steps, pages, span, self.step, flush, weights, mark, now, last)
        self._delivery.take(parcel)

    def _kept(self) -> dict[str, Tensor]:
        """The weights, and what the optimizer remembers where its rule needs that."""
        weights = snapshot(self._model)
        if isinstance(self._rule, StateRule):
            weights |= memories(self._optimizer, self._plan, self._rule)
        return weights

    def _weight_bytes(self) -> int:
        """What the weights take when they are kept, with what the optimizer remembers."""
        kept = 2 + len(self._rule.state) if isinstance(self._rule, StateRule) else 1
        return kept * sum(parameter.nbytes for parameter in self._model.parameters())


def record(
    model: nn.Module,
    optimizer: Optimizer,
    path: str | os.PathLike[str],
    *,
    dataset: Any = None,
    resume: bool = False,
    overwrite: bool = False,
    buffer_bytes: int = 128 << 20,
) -> Recorder:
    """Records the training loop inside the `with` statement as a ledger at `path`.

    >>> import tempfile, torch, dualform
    >>> path = tempfile.mkdtemp() + "/run"
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> with dualform.record(model, optimizer, path) as recorder:
    ...     for ids in ([0, 1], [2, 3]):
    ...         recorder.samples(ids)
    ...         loss = model(torch.randn(2, 3)).square().mean()
    ...         loss.backward(); optimizer.step(); optimizer.zero_grad()
    >>> dualform.open(path).steps
    2

    Args:
        dataset: a map-style dataset whose item `i` is sample id `i`; its labels and small previews
            of its inputs are kept with the run.
        resume: go on with the run at `path`, from the marked step whose weights the model has.
        overwrite: replace the run at `path`.
        buffer_bytes: how much is held in memory before it is written as one file; when the disk
            is slower than training, training waits rather than memory filling up.
    """
    return Recorder(
        model,
        optimizer,
        Path(path),
        dataset=dataset,
        resume=resume,
        overwrite=overwrite,
        buffer_bytes=buffer_bytes,
    )
