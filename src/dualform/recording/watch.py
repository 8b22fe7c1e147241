"""Watching a model: what a training step leaves behind, at the least possible cost to it."""

from __future__ import annotations

import threading
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dualform.layers import (
    Finder,
    Hook,
    Seen,
    Use,
    is_single,
    kinds,
    tensors_in,
    usual_axis,
    when_errors_come,
)
from dualform.ledger import Declaration
from dualform.ledger.samples import SampleId, check_ids, listed
from dualform.owners import Batch, Owners, Sighting, Trial
from dualform.private import current_backward
from dualform.recording.automatic import Automatic, RowCounts
from dualform.recording.bases import BookBases
from dualform.recording.book_states import BookStates
from dualform.recording.calls import CallSource, FunctionCalls
from dualform.recording.captured import CompiledCalls
from dualform.recording.captured_sites import Captured, find_taps
from dualform.recording.guard import BACKWARD, FORWARD, Guard
from dualform.recording.keep import ROWS, Policy
from dualform.recording.learning import WAITING, Learning, why_uncompiled
from dualform.recording.reached import Reached
from dualform.recording.sample_ids import SampleIds
from dualform.recording.shards import StandIns
from dualform.recording.streams import RowWriter

NOTHING = nullcontext()


class _Thread(threading.local):
    """What is a thread's own: another may be evaluating the model meanwhile."""

    trial: Trial | None = None
    """The experiment that the forward pass is."""


class Watch:
    """Sees a model's calls while it runs; the backward pass writes their rows.

    Forward and backward passes are the first stage of recording. It belongs to the training loop,
    and its product are the pages of `rows`.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        states: BookStates,
        step: int,
        known: Iterable[Declaration] = (),
        guard: Guard | None = None,
        keep: Mapping[str, Policy] | None = None,
        bases: BookBases | None = None,
        compiled: nn.Module | None = None,
        of: int = 1,
    ) -> None:
        self._guard, self._states = guard or Guard(strict=True), states
        self.owners = Owners(parameters, usual_axis(model))
        """To which samples the rows of each layer belong."""
        self._batches = Batches(step)
        split = self._batches.part
        self.automatic = Automatic(dict.fromkeys(parameters, ROWS) if keep is None else keep, of=of)
        """What is kept of layers where that is left to the recorder."""
        summarized = BookBases() if bases is None else bases
        self._tables = summarized.tables
        self.rows = RowWriter(
            parameters, known, states, self.owners, split, step, self.automatic, summarized
        )
        self._find = Finder(parameters)
        self._find.guard = partial(self._guard.run, FORWARD)
        stand_ins = StandIns(model, parameters)
        if stand_ins:
            self._find.stand_ins = stand_ins
            self.rows.reached = Reached(ChainMap(stand_ins.whole, dict(parameters)))
        self.rows.tally = RowCounts() if self.automatic.is_open else None
        self._on_graphs: list[tuple[int, RemovableHandle]] = []
        """Hooks on several outputs, by step: such a hook and its graph keep each other alive."""
        self._uses = 0
        """How many uses of parameters were seen that are trained."""
        self._thread = _Thread()
        self._compiled = compiled
        """What the loop calls, where the model is compiled."""
        self._learning = None if compiled is None else Learning(self._find, kinds(), self.see)
        self.rows.learns = self._learning is not None
        self._single = False
        """Whether a batch was found to be a single sample without a dimension for it."""
        given = (model, self._find, self, self._guard, self._learning)
        self._source: CallSource = FunctionCalls(*given)
        self._narrowed = compiled is not None or bool(stand_ins)
        self._told = False
        """Whether the user knows that the model is not compiled yet."""
        self.remarks: list[str] = []
        """What the user is to be told."""

    def samples(self, ids: Tensor | Sequence[SampleId], known: SampleIds) -> None:
        """Names the samples of the next forward pass."""
        ids = ids.clone() if isinstance(ids, Tensor) else listed(ids)
        check_ids(ids)
        known.name(ids)
        self._batches.name(ids)

    def end_step(self) -> None:
        """The optimizer has stepped; what comes belongs to the next step."""
        self.rows.end_step()
        self._batches.end_step()
        if self._on_graphs:
            recent = self.rows.step - 1
            for step, hook in self._on_graphs:
                if step < recent:
                    hook.remove()
            self._on_graphs = [(step, hook) for step, hook in self._on_graphs if step >= recent]
        if not self._narrowed:
            self._narrowed = True
            self._source = self._source.narrowed(self._uses, self._states.by_step)

    @property
    def passes(self) -> int:
        """How many forward passes were begun for the step under way."""
        return self._batches.passes

    @property
    def is_learning(self) -> bool:
        """Whether a compiled model still runs as it was written."""
        return self._learning is not None

    def collect(self) -> None:
        """Writes what backward passes of a compiled model have left."""
        if isinstance(self._source, CompiledCalls):
            self._source.collect(self.rows)

    def taps(self) -> Captured | None:
        """After a step, where a compiled model ran as it was written: what lets it run compiled.

        None if not enough is known for it, or if it must go on as it was written.
        """
        learning, source, model = self._learning, self._source, self._compiled
        if learning is None:
            return None
        assert model is not None
        assert isinstance(source, FunctionCalls)
        reason = why_uncompiled(model, learning, source.loop_calls_parts, self._single)
        if reason:
            self.remarks.append(reason)
            self._stop_learning()
            return None
        streams, dropped = self.rows.streams.all, self._states.by_step
        found = find_taps(learning, streams, self.owners, dropped)
        if found is None:
            if not self._told:
                self.remarks.append(WAITING)
            self._told = True
        return found

    def capture(self, found: Captured) -> None:
        """Lets a compiled model run compiled."""
        assert self._compiled is not None
        self._source.close()
        self._stop_learning()
        self._source = CompiledCalls(self._compiled, found.sites, self, self._guard)

    def _stop_learning(self) -> None:
        self._learning, self.rows.learns = None, False

    @property
    def is_inside(self) -> bool:
        """Whether this thread is inside a call of the model, whose hooks stay until it ends."""
        return self._source.is_inside

    def close(self) -> None:
        """Takes every hook off."""
        self._source.close()

    def begin_pass(self, module: nn.Module, args: Any, kwargs: Any, inside: bool) -> None:
        """A forward pass begins: of the model, or of a part `inside` it that the loop calls."""
        if self._guard.failure is not None:
            return self._guard.after_failure()
        try:
            if torch.is_grad_enabled():
                given = tensors_in((args, kwargs))
                if self._learning is not None and not inside and current_backward() < 0:
                    self._learning.begin_pass()
                begin = self._batches.begin_inside if inside else self._batches.begin
                batch = begin(given)
                if batch is not None and self._thread.trial is None:
                    self._begin_trial(module, batch, given)
        except Exception as error:
            self._guard.caught(FORWARD, error)

    def begin_captured(self, args: Any, kwargs: Any) -> Batch | None:
        """A forward pass of a compiled model begins: its batch."""
        return self._batches.begin(tensors_in((args, kwargs)))

    def _begin_trial(self, module: nn.Module, batch: Batch, given: Sequence[Tensor]) -> None:
        """Makes the pass an experiment where one is due, to the end of this call."""
        trial = self.owners.begin(batch, given, self._states.by_step)
        if trial is None:
            return

        def end(*_: Any) -> None:
            handle.remove()
            self._thread.trial = None
            trial.twins.__exit__(None, None, None)
            if self._guard.failure is None:
                self._guard.run(FORWARD, lambda: self.owners.learn(trial.close()))

        trial.twins.guard = self._find.guard
        handle = module.register_forward_hook(Hook(end), always_call=True)
        self._thread.trial = trial
        trial.twins.__enter__()

    def see(self, use: Seen) -> None:
        """A call has used a parameter: when its errors come, its rows are written."""
        if self._guard.failure is not None:
            return self._guard.after_failure()
        try:
            outputs, trial = use.outputs, self._thread.trial
            trained = any(out.grad_fn is not None for out in outputs)
            batch = self._batches.of_call() if trained else None
            if batch is not None:
                first = batch.begun and not batch.calls
                if first and batch.ids is None and is_single(use):
                    batch.size = 1  # what was taken for a batch is a single sample
                    self._single = True
                batch.calls += 1
            single = batch is not None and batch.size == 1  # as its first layer may have shown
            seen = None if trial is None or single else trial.observe(use)
            if batch is not None:
                self._uses += 1
                if self.automatic.is_open:
                    self.automatic.expect(use)
                if isinstance(use, Use):
                    self._tables.update(use.site.tables)
                if seen is None and self._is_by_step(use):
                    return None
                hook = when_errors_come(use, partial(self._backward, use, batch, self._uses, seen))
                if len(outputs) > 1 and hook is not None:
                    self._on_graphs.append((self.rows.step, hook))
        except Exception as error:
            self._guard.caught(FORWARD, error)

    def _is_by_step(self, use: Seen) -> bool:
        """Whether nobody needs the rows of a call, as far as that is known before they come."""
        return isinstance(use, Use) and self._states.by_step.issuperset(use.site.terms)

    def _backward(
        self,
        use: Seen,
        batch: Batch,
        order: int,
        seen: Sequence[Sighting] | None,
        errors: Sequence[Tensor | None],
    ) -> None:
        """The errors of a use have come."""
        if self._guard.failure is not None:
            return self._guard.after_failure()
        try:
            self._batches.arrive(batch)
            with torch.no_grad() if torch.is_grad_enabled() else NOTHING:  # create_graph=True
                for at, rows in enumerate(use.rows(errors)):
                    self.rows.write(rows, batch, order, seen[at] if seen else None)
        except Exception as error:
            self._guard.caught(BACKWARD, error)


class Batches:
    """The batch that each call belongs to: one for every forward pass of the whole model."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._count = 0
        self._batch: Batch | None = None
        self._named = False
        self._pending: list[Batch] = []
        """Those begun since the last backward pass."""
        self._arrived: Batch | None = None
        """The one whose errors came last, in a backward pass after the last forward pass."""
        self.passes = 0
        """How many forward passes were begun for the step under way."""

    def name(self, ids: Tensor | Sequence[SampleId]) -> None:
        """The samples of the forward passes to come in this step."""
        self._named, self._arrived = True, None
        self._pending.append(self._new(ids))

    def end_step(self) -> None:
        """The optimizer has stepped."""
        self._step += 1
        self._pending, self._arrived, self.passes = [], None, 0
        if not self._named:
            self._batch = None

    def begin(self, given: Iterable[Tensor]) -> Batch | None:
        """A forward pass of the whole model begins, given these tensors: its batch, if new."""
        again = current_backward() >= 0  # by checkpointing
        if again and self._named:
            return None
        batch = self._next()
        self.passes += not again
        self._arrived = batch if again else None
        batch.begin(tensor.shape for tensor in given)
        return None if again else batch

    def begin_inside(self, given: Sequence[Tensor]) -> Batch | None:
        """The same for a part of the model that the loop calls by itself."""
        if current_backward() >= 0 or not given:
            return None
        batch = self._current()
        if batch.size < 0:
            self.passes += 1
            batch.begin_inside(given[0].shape)
        return batch

    def part(self, whole: Batch, owners: Tensor) -> Batch:
        """A batch of single rows, each of which belongs to one sample of a whole one."""
        samples = whole.sample_of()
        first = torch.zeros_like(samples)
        first[samples.flip(0)] = torch.arange(len(samples), device="cpu").flip(0)
        self._count += 1
        batch = Batch(self._count, None, whole.step, len(owners))
        batch.whole, batch.places = whole, first[owners]
        return batch

    def of_call(self) -> Batch | None:
        """The batch that a call now belongs to; None where that cannot be known.

        In a backward pass checkpointing makes calls again: those of the batch whose errors came
        last, or of the only one there is.
        """
        if current_backward() < 0:
            return self._current()
        if self._arrived is None and len(self._pending) == 1:
            self._arrived = self._pending[0]
        return self._arrived

    def arrive(self, batch: Batch) -> None:
        """Errors of a batch have come, in the backward pass that is running."""
        self._arrived = batch
        self._pending.clear()

    def _next(self) -> Batch:
        batch = self._current()
        if self._named:
            return batch if batch.size < 0 else self._new(batch.ids)
        if batch.begun:
            batch = self._new(None)
        self._pending.append(batch)
        return batch

    def _current(self) -> Batch:
        """Ids are for their own step only."""
        batch = self._batch
        if batch is None or (self._named and batch.step != self._step):
            return self._new(None)
        return batch

    def _new(self, ids: Tensor | Sequence[SampleId] | None) -> Batch:
        self._count += 1
        self._batch = Batch(self._count, ids, self._step)
        return self._batch
