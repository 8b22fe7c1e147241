"""Around each optimizer step: what it is about to do to the parameters, and what it did."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.optimizers import BY_ROW, OBSERVED, UNTOUCHED, Rule
from dualform.private import version_of
from dualform.recording.bases import BookBases
from dualform.recording.book_states import BookStates, Event, Kept, Note
from dualform.recording.changes import NO_CHANGES, StepChanges
from dualform.recording.excerpts import NO_EXCERPT, Excerpt, Excerpts
from dualform.recording.gradients import GradientProbes
from dualform.recording.messages import RecordedStep, WeightSpan
from dualform.recording.plan import Plan, reason_of
from dualform.recording.processes import Line
from dualform.recording.shards import changes_of, local
from dualform.recording.streams import OpenStream
from dualform.recording.weight_copies import SpanCopies, StepCopies

Memory: TypeAlias = list[tuple[Tensor, int]]
"""The tensors of an optimizer's state, and how often torch had changed each."""
SELDOM = 1024
"""Divisors are kept at least once in so many steps."""
FORGOTTEN = "what the optimizer remembers of it was changed between steps"


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The books, by how a step will treat them if it does not leave them alone."""

    states: tuple[int, ...]
    """How a step treats each book whose parameter has a gradient."""
    idle: tuple[int, ...]
    """The same where the parameter has none."""
    by_row: tuple[tuple[str, int, nn.Parameter], ...]
    by_step: tuple[tuple[int, nn.Parameter], ...]
    observed: tuple[str, ...]
    """Books that are kept by step if their parameters have gradients."""
    undecided: tuple[tuple[str, nn.Parameter], ...]
    """Books that the optimizer has, and whose rows have not been seen."""


class StepObserver:
    """Makes a `RecordedStep` of what the optimizer does; belongs to the training thread."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        rule: Rule,
        optimizer: Optimizer,
        states: BookStates,
        bases: BookBases,
    ) -> None:
        self._model, self._plan, self._rule, self._optimizer = model, plan, rule, optimizer
        self.states = states
        self.excerpts = Excerpts(plan.parameters)
        self._bases = bases
        self._probes = GradientProbes(plan, rule, bases)
        self._copies, self._span = StepCopies(plan), SpanCopies(plan, self.excerpts)
        self._before = NO_EXCERPT
        """The parameters before the step under way."""
        self.uncaptured: dict[str, str] = {}
        """Books of which a compiled model leaves no records, and why."""
        self._changes_of = changes_of if plan.parts else version_of
        self._memory: dict[str, Memory] = {}
        """What the last step left the optimizer to remember of the books kept by row."""
        self._held: tuple[frozenset[str], frozenset[str], tuple[int, ...]] | None = None
        """The books by step, those that are shared, and all groups, when copies were made."""
        self._regroup()
        self._span.take(states.by_step, self.trained())
        self.hold()

    def trained(self) -> list[str]:
        """The parameters that the optimizer may change."""
        return [
            name
            for (name, parameter), group in zip(
                self._plan.parameters.items(), self._groups, strict=True
            )
            if group >= 0 and parameter.requires_grad
        ]

    def discover(self, streams: Sequence[OpenStream]) -> None:
        """Streams that rows have been seen of for the first time."""
        terms = {name: term for opened in streams for name, term in opened.terms.items()}
        new = {name: term for name, term in terms.items() if name not in self._probes.terms}
        self._probes.terms |= new
        self.states.happen(Event.ROWS_SEEN, new)
        self._arrange()

    def keep_by_step(self, event: Event, reasons: Mapping[str, str]) -> None:
        """Keeps these books by step from now on, and what happened since the last hand-over."""
        self.states.happen(event, reasons)
        start = self._span.start
        self._copies.begin_at({name: start[name] for name in reasons if name in start})
        self._arrange()

    def share(self, before: Mapping[str, Tensor], reasons: Mapping[str, str]) -> None:
        """Something else changes these books, which were so `before` it did."""
        self._copies.begin_at(before)
        self.keep_by_step(Event.CHANGED_OUTSIDE, reasons)

    def hand_over(self) -> tuple[WeightSpan, Excerpt]:
        """The parameters since the last hand-over, and an excerpt; probes look elsewhere."""
        span = self._span.take(self.states.by_step, self.trained())
        self._probes.look_elsewhere()
        return span, self._span.excerpt

    def begin_step(self) -> None:
        """Copies what must be known of the parameters as they are before a step."""
        if _members(self._optimizer) != self._members:
            self._regroup()
        self.hold()
        self._before = self.excerpts.take()

    def hold(self) -> None:
        """Copies the parameters that are kept by step, where nothing was copied before."""
        known = (self.states.by_step, self.states.shared, self._groups)
        if known == self._held:
            return
        self._held = known
        for name in self.states.by_step:
            in_optimizer = self._groups[self._plan.columns[name]] >= 0
            if in_optimizer or name in self.states.shared:
                self._copies.hold(name)

    def observe(
        self, number: int, notes: Sequence[Note] = (), probe_all: bool = False
    ) -> RecordedStep:
        """What the optimizer is about to do, before it does it."""
        hyper = tuple([self._rule.hyper(group) for group in self._optimizer.param_groups])
        lost = self._give_up(number)
        states, gradients = self._touch()
        probe = None
        if gradients:
            probe = self._probes.take(gradients, self._optimizer, number, in_turns=not probe_all)
        looks, given = self._probes.looks, (*notes, *lost)
        return RecordedStep(number, hyper, self._groups, states, looks, given, probe, self._before)

    def finish(
        self, step: RecordedStep, edited: Mapping[str, Mapping[str, Tensor]]
    ) -> RecordedStep:
        """The same step when it was made, with the changes of the books that are kept by step.

        `edited` is what a spot check of it found.
        """
        changes = NO_CHANGES
        if self.states.by_step:
            observed = self._arranged.observed
            if step.states is not self._arranged.states:
                observed = self._observed(step.states)
            changes = self._copies.changes(observed)
        self._memory = self._memories()
        divisors = self.divisors() if is_due(step.number) else {}
        after = self.excerpts.take()
        return step._replace(changes=changes, after=after, edited=edited, divisors=divisors)

    def divisors(self) -> dict[str, Tensor]:
        """What the step just made divided by, of books whose rows are summarized; in 16 bits."""
        found: dict[str, Tensor] = {}
        if self._rule.by_numbers or not self._bases.found:
            return found
        for name, at, p in self._arranged.by_row:
            if name in self._bases.found:
                group = self._optimizer.param_groups[self._groups[at]]
                hyper = dict(zip(self._rule.fields, self._rule.hyper(group), strict=True))
                divisor = self._rule.replayed.divisor(hyper, self._rule.memory(self._optimizer, p))
                if divisor is not None:
                    found[name] = local(divisor).bfloat16()
        return found

    @property
    def has_parts(self) -> bool:
        """Whether each of several processes has a part of some parameters."""
        return bool(self._plan.parts)

    def late_changes(self, line: Line) -> dict[str, Tensor]:
        """What has happened since the last step to the books that are kept by step."""
        return self._copies.late_changes(line if self._plan.parts else Line())

    def are_by_row(self, books: Mapping[str, Tensor], step: RecordedStep) -> bool:
        """Whether a step kept some of these books by row."""
        return any(step.states[self._plan.columns[name]] == BY_ROW for name in books)

    def with_changes(self, step: RecordedStep, changes: Mapping[str, Tensor]) -> RecordedStep:
        """The step with further observed changes."""
        states, total = list(step.states), dict(step.changes)
        for book, change in changes.items():
            states[self._plan.columns[book]] = OBSERVED
            total[book] = total.get(book, 0) + change
        return step._replace(states=tuple(states), changes=StepChanges.of(total))

    def standing(self, number: int, notes: Sequence[Note]) -> RecordedStep:
        """A step that leaves every book alone."""
        hyper = tuple([self._rule.hyper(group) for group in self._optimizer.param_groups])
        states, now = (UNTOUCHED,) * len(self._plan.books), self.excerpts.take()
        return RecordedStep(number, hyper, self._groups, states, {}, tuple(notes), None, now, now)

    def _give_up(self, number: int) -> list[Note]:
        """Books whose gradient has no rows that could explain it: by step from here on.

        So are those of a group that was added, or given options, that the rule does not describe,
        those of which the loop changed what the optimizer remembers, and those of which a compiled
        model leaves no records.
        """
        refused = self._rule.group_refusals(self._optimizer)
        lost: dict[str, tuple[Event, str]] = {}
        for name, p in self._arranged.undecided:
            if p.grad is not None:
                refusal = refused.get(id(p))
                lost[name] = (
                    (Event.GROUP_REFUSED, refusal)
                    if refusal
                    else (Event.NO_ROWS, reason_of(self._model, name))
                )
        state = self._optimizer.state
        for name, _, p in self._arranged.by_row:
            if p.grad is not None:
                if id(p) in refused:
                    lost[name] = (Event.GROUP_REFUSED, refused[id(p)])
                elif _is_altered(self._memory.get(name), state.get(p), self._changes_of):
                    lost[name] = (Event.STATE_CHANGED, FORGOTTEN)
                elif name in self.uncaptured:
                    lost[name] = (Event.UNCAPTURED, self.uncaptured[name])
                if name in lost:  # what rows did so far stays
                    self._copies.begin_at({name: local(p).detach().clone()})
        named = [name for name in self._plan.parameters if name in lost]
        for name in named:
            self.keep_by_step(lost[name][0], {name: lost[name][1]})
        return [Note(number, name, lost[name][1]) for name in named]

    def _memories(self) -> dict[str, Memory]:
        """What the optimizer remembers now of the books kept by row."""
        state, changes = self._optimizer.state, self._changes_of
        return {
            name: [(part, changes(part)) for part in own.values() if isinstance(part, Tensor)]
            for name, _, p in self._arranged.by_row
            if (own := state.get(p)) is not None
        }

    def _touch(self) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        """How the step will treat each book, and the gradients of those kept by row."""
        skipped = getattr(self._optimizer, "found_inf", None)  # a scaler's word to fused optimizers
        if skipped is not None and bool(skipped):
            return (UNTOUCHED,) * len(self._plan.books), {}
        arranged = self._arranged
        gradients, idle = {}, []
        for name, at, parameter in arranged.by_row:
            if parameter.grad is None:
                idle.append(at)
            else:
                gradients[name] = parameter.grad
        idle += [at for at, parameter in arranged.by_step if parameter.grad is None]
        if not idle:
            return arranged.states, gradients
        states = list(arranged.states)
        for at in idle:
            states[at] = arranged.idle[at]
        return tuple(states), gradients

    def _arrange(self) -> None:
        """Sorts the books by how they are kept now."""
        has_rule = bool(self._rule.fields)
        members = [
            (name, at >= 0) for name, at in zip(self._plan.columns, self._groups, strict=True)
        ]
        states, idle = (
            tuple([self.states.touch(name, own, given, has_rule) for name, own in members])
            for given in (True, False)
        )
        books = [
            (name, at, parameter, states[at])
            for at, (name, parameter) in enumerate(self._plan.parameters.items())
        ]
        self._arranged = Arrangement(
            states,
            idle,
            tuple([(name, at, p) for name, at, p, state in books if state == BY_ROW]),
            tuple([(at, p) for _, at, p, state in books if state == OBSERVED]),
            self._observed(states),
            tuple(
                [
                    (name, p)
                    for name, at, p, _ in books
                    if self._groups[at] >= 0 and self.states.kept(name) is Kept.UNSEEN
                ]
            ),
        )
        self._probes.choose([name for name, _, _ in self._arranged.by_row])

    def _observed(self, states: Sequence[int]) -> tuple[str, ...]:
        """The books that a step keeps as they were observed."""
        return tuple([name for name, at in self._plan.columns.items() if states[at] == OBSERVED])

    def _regroup(self) -> None:
        """Finds each parameter's group; -1 where the optimizer does not have it."""
        groups = self._optimizer.param_groups
        index = {id(p): at for at, group in enumerate(groups) for p in group["params"]}
        self._groups = tuple([index.get(id(p), -1) for p in self._plan.parameters.values()])
        self._members = _members(self._optimizer)
        planned = {
            book.name: book.reason
            for book, group in zip(self._plan.books, self._groups, strict=True)
            if book.reason and group >= 0
        }
        self.states.happen(Event.PLANNED, planned)
        self._arrange()


def is_due(step: int) -> bool:
    """Whether divisors are kept after a step: ever more seldom, since they change ever less.

    >>> [step for step in range(1, 4100) if is_due(step)]
    [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3072, 4096]
    """
    return step & (step - 1) == 0 or step % SELDOM == 0


def times_due(steps: int) -> int:
    """After how many of the first steps divisors are kept.

    >>> times_due(4096), sum(map(is_due, range(1, 4097)))
    (14, 14)
    """
    powers = steps.bit_length()
    return powers + steps // SELDOM - max(0, powers - SELDOM.bit_length() + 1)


def _is_altered(
    left: Memory | None, state: Mapping[str, Any] | None, changes: Callable[[Tensor], int]
) -> bool:
    """Whether the optimizer's memory of a parameter is not what the last step left, if it did."""
    if left is None:
        return False
    now = [] if state is None else [part for part in state.values() if isinstance(part, Tensor)]
    if len(now) != len(left):
        return True
    for new, (old, version) in zip(now, left, strict=True):
        if changes(new) != version if new is old else not torch.equal(new, old):
            return True
    return False


def _members(optimizer: Optimizer) -> list[list[int]]:
    """Which parameters each group has, by their identity."""
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]
