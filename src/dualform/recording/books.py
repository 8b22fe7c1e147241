"""The parameters under the optimizer: what each step is about to do to them, and what it did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.ledger import Term
from dualform.memory.blocks import as_matrix, matrix_shape
from dualform.optimizers import BY_ROW, OBSERVED, UNTOUCHED, Rule
from dualform.private import sparse_parts, version_of
from dualform.recording.glance import Glances
from dualform.recording.plan import Plan, reason_of, refusals
from dualform.recording.probe import Look
from dualform.recording.reconcile import is_followed
from dualform.recording.settle import Span
from dualform.recording.steps import Step
from dualform.recording.tape import calls_are_dear

PROBED_ROWS = 128
"""Higher matrices are probed at so many neighboring rows, others after each parcel."""
PROBED_COLUMN = 1 << 14
"""Parameters of one column are probed as a whole up to this size."""
PROBE_NUMBERS = 32
"""A probe of fewer numbers could agree by accident: narrow matrices get several vectors."""


Memory: TypeAlias = list[tuple[Tensor, int]]
"""The tensors of an optimizer's state, and how often torch had changed each."""
STEPPED = "another optimizer, {}, stepped it; by row is what the recorded {} does"
FORGOTTEN = "what the optimizer remembers of it was changed between steps"


class Books:
    """Looks at gradients before a step, and at the parameters kept by step after it."""

    def __init__(self, model: nn.Module, plan: Plan, rule: Rule, optimizer: Optimizer) -> None:
        self._model, self._plan, self._rule, self._optimizer = model, plan, rule, optimizer
        self._parameters = list(plan.parameters.values())
        self._names = list(plan.parameters)
        self.glances = Glances(plan.parameters)
        self._columns = {name: at for at, name in enumerate(self._names)}
        self._terms: dict[str, Term] = {}
        """The books that rows are known of, each with one of its terms."""
        self._reasons = {book.name: book.reason for book in plan.books if book.reason}
        """Why books are kept by step from the start."""
        self._by_step: set[str] = set()
        self._always: set[str] = set()
        """Of these, the books that change without the optimizer: every step is looked at."""
        self.unverified: set[str] = set()
        """Books whose rows have not been held against a gradient yet."""
        self._after: dict[str, Tensor] = {}
        self._span_start: dict[str, Tensor] = {}
        self._span_versions: dict[str, int] = {}
        """How often torch had changed each parameter at the last call of `span`."""
        self.span_glance = self.glances.take()
        """As the parameters were at the last call of `span`."""
        self._memory: dict[str, Memory] = {}
        """What the last step left the optimizer to remember of the books kept by row."""
        self._vectors: dict[str, Tensor | None] = {}
        self._last_names: tuple[str, ...] = ()
        self._turn = 0
        self._looks: dict[str, Look] = {}
        self._regroup()
        self.span()
        self.hold()

    @property
    def vouched(self) -> list[str]:
        """The books that are kept by row now."""
        return [name for name in self._terms if name not in self._by_step]

    def discover(self, terms: Mapping[str, Term]) -> None:
        """Books that rows have been seen of for the first time."""
        for name, term in terms.items():
            if name not in self._terms:
                self._terms[name] = term
                if name not in self._by_step:
                    self.unverified.add(name)
        self._arrange()

    def look_elsewhere(self) -> None:
        """Moves the probes of high matrices to other rows."""
        self._turn += 1
        self._looks = {name: self._look(name) for name in self._looks}

    def keep_by_step(self, names: set[str], always: bool = False) -> None:
        """Keeps these books by step from now on, and what the parcel under way did to them.

        `always`: whether they have a gradient or not.
        """
        self._by_step |= names
        self._always |= names if always else set()
        self.unverified -= names
        for name in names & self._span_start.keys():
            self._after.setdefault(name, self._span_start[name])
        self._arrange()

    def span(self) -> Span:
        """The parameters that are not kept by step, as they were at the last call and are now."""
        before, glance = self._span_start, self.glances.take()
        moved = self.glances.differing([self.span_glance], [glance])
        self.span_glance = glance
        versions = {name: version_of(p) for name, p in self._plan.parameters.items()}
        still = {
            name
            for name in before
            if name not in moved
            and not self._is_trained(name)
            and versions[name] == self._span_versions[name]
        }
        self._span_versions = versions
        names = {name for name in self._names if name not in self._by_step}
        now = {name: before[name] for name in still}
        now |= {n: self._plan.parameters[n].detach().clone() for n in names.union(before) - still}
        self._span_start = {name: now[name] for name in names}
        return before, now

    def hold(self) -> None:
        """Keeps the parameters that are booked by step as they are before the step."""
        if _members(self._optimizer) != self._members:
            self._regroup()
        for name in self._by_step:
            if name not in self._after and self._is_booked(name):
                self._after[name] = self._plan.parameters[name].detach().clone()

    def share(
        self, before: Mapping[str, Tensor], other: Optimizer, number: int
    ) -> list[dict[str, object]]:
        """Notes books that another optimizer steps; these are their values before it did."""
        self._after |= {name: old for name, old in before.items() if name not in self._after}
        reason = STEPPED.format(type(other).__name__, type(self._optimizer).__name__)
        return [{"step": number, "book": name, "reason": reason} for name in before]

    def late_changes(self) -> dict[str, Tensor]:
        """What has happened since the last step to the books that are kept by step."""
        now = {name: self._plan.parameters[name].detach().clone() for name in self._after}
        found = {name: now[name] - before for name, before in self._after.items()}
        self._after = now
        return {name: change for name, change in found.items() if bool(change.any())}

    @property
    def shared(self) -> bool:
        """Whether something other than the optimizer changes some of them."""
        return bool(self._always)

    def are_by_row(self, names: Iterable[str], states: Sequence[int]) -> bool:
        """Whether a step of these states kept some of these books by row."""
        return any(states[self._columns[name]] == BY_ROW for name in names)

    def as_observed(self, states: Sequence[int], name: str) -> list[int]:
        """The states of a step, with one book as observed."""
        at = self._columns[name]
        return [*states[:at], OBSERVED, *states[at + 1 :]]

    def standing(self, number: int) -> Step:
        """A step that leaves every book alone."""
        hyper = [self._rule.hyper(group) for group in self._optimizer.param_groups]
        step = Step(number, hyper, self._groups, [UNTOUCHED] * len(self._names), looks={})
        step.before = step.after = self.glances.take()
        return step

    def trained(self) -> list[str]:
        """The parameters that the optimizer may change."""
        return [name for name in self._names if self._is_trained(name)]

    def _is_trained(self, name: str) -> bool:
        """Whether the optimizer may change it."""
        return self._groups[self._columns[name]] >= 0 and self._plan.parameters[name].requires_grad

    def _is_booked(self, name: str) -> bool:
        return name in self._always or self._groups[self._columns[name]] >= 0

    def observe(self, number: int) -> Step:
        """What the optimizer is about to do, before it does it."""
        hyper = [self._rule.hyper(group) for group in self._optimizer.param_groups]
        notes = self._give_up(number)
        states, gradients = self._touch()
        step = Step(number, hyper, self._groups, states, looks=self._looks, notes=notes)
        if gradients:
            self._probe(step, gradients)
        return step

    def changes(self, states: Sequence[int]) -> dict[str, Tensor]:
        """What the step did to the parameters that are kept by step.

        Counted from the step before, so that what happened in between is not lost.
        """
        changed = {}
        for name, before in self._after.items():
            if states[self._columns[name]] == OBSERVED:
                now = self._plan.parameters[name].detach().clone()
                changed[name], self._after[name] = now - before, now
        return changed

    def _give_up(self, number: int) -> list[dict[str, object]]:
        """Books whose gradient has no rows that could explain it: by step from here on.

        So are those of a group that was added, or given options, that the rule does not describe.
        """
        refused = refusals(self._optimizer, self._rule)
        undecided = {
            name: refused.get(id(p)) or reason_of(self._model, name)
            for name, p in self._undecided
            if p.grad is not None
        }
        altered = {name: FORGOTTEN for name, _, p in self._probed if self._is_altered(name, p)}
        reasons = altered | {name: refused[id(p)] for name, p in self._refused(refused)}
        by_row = [(n, p) for n, _, p in self._probed if n in reasons and p.grad is not None]
        lost = undecided | {name: reasons[name] for name, _ in by_row}
        if not lost:
            return []
        for name, p in by_row:  # what rows did so far stays
            self._after[name] = p.detach().clone()
        self.keep_by_step(set(lost))
        named = [name for name in self._names if name in lost]
        return [{"step": number, "book": name, "reason": lost[name]} for name in named]

    def remember(self) -> None:
        """Takes down what a step has left the optimizer to remember."""
        state = self._optimizer.state
        self._memory = {name: _memory(state[p]) for name, _, p in self._probed if p in state}

    def _is_altered(self, name: str, parameter: Tensor) -> bool:
        """Whether the optimizer's memory of a parameter is not what the last step left."""
        left = self._memory.get(name)
        if left is None:
            return False
        now = _memory(self._optimizer.state.get(parameter, {}))
        if len(now) != len(left):
            return True
        for (old, version), (new, count) in zip(left, now, strict=True):
            if count != version if new is old else not torch.equal(new, old):
                return True
        return False

    def _refused(self, reasons: Mapping[int, str]) -> list[tuple[str, Tensor]]:
        """Of those kept by row, the parameters that may not be."""
        return [(name, p) for name, _, p in self._probed if id(p) in reasons] if reasons else []

    def _touch(self) -> tuple[list[int], dict[str, Tensor]]:
        """How the step will touch each book, and the gradients of those kept by row."""
        skipped = getattr(self._optimizer, "found_inf", None)  # a scaler's word to fused optimizers
        if skipped is not None and bool(skipped):
            return [UNTOUCHED] * len(self._names), {}
        states, gradients = self._states, {}
        for name, at, parameter in self._probed:
            gradient = parameter.grad
            if gradient is None:
                states = [*states[:at], UNTOUCHED, *states[at + 1 :]]
            else:
                gradients[name] = gradient
        if self._rule.fields:
            for at, parameter in self._observed:
                if parameter.grad is None:
                    states = [*states[:at], UNTOUCHED, *states[at + 1 :]]
        return states, gradients

    def _probe(self, step: Step, gradients: dict[str, Tensor]) -> None:
        """`u = G r` for matrices, columns as they are; all in one piece."""
        probe = torch.cat([self._seen(name, gradient) for name, gradient in gradients.items()])
        scale = getattr(self._optimizer, "grad_scale", None)  # fused optimizers unscale themselves
        if scale is not None:
            probe = probe / scale.to(probe.device)
        step.probe = (self._interned(tuple(gradients)), probe)

    def _seen(self, name: str, gradient: Tensor) -> Tensor:
        """What a step keeps of a gradient."""
        look = self._looks[name]
        if gradient.is_sparse:
            whole_rows = self._terms[name].view == "rows" and gradient.sparse_dim() == 1
            gradient = _some_rows(gradient, look.rows) if whole_rows else gradient.to_dense()
        if look.vectors is None:
            flat = gradient.reshape(-1)
            return flat if look.height == len(flat) else flat[look.rows]
        term = self._terms[name]
        if term.view != "rows" or gradient.ndim > 2:
            gradient = as_matrix(gradient, term.view, term.groups)
        if look.height != len(gradient):
            gradient = gradient[look.rows]
        return (gradient if look.later else gradient @ look.vectors).flatten()

    def _interned(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The same object for the same names, so that steps can be told to be alike at a glance."""
        if names != self._last_names:
            self._last_names = names
        return self._last_names

    def _look(self, name: str) -> Look:
        """Some rows of the book's matrix, and the vectors they are multiplied with."""
        term, parameter = self._terms[name], self._plan.parameters[name]
        height, width = matrix_shape(tuple(parameter.shape), term.view, term.groups)
        rows = PROBED_COLUMN if term.view == "flat" else PROBED_ROWS
        if not is_followed(self._rule):
            rows = height  # nothing else looks at the whole
        first = min(self._turn * rows % height, max(0, height - rows))
        if name not in self._vectors:
            self._vectors[name] = None if term.view == "flat" else self._random(name, height, width)
        later = term.form == "outer" and calls_are_dear(parameter)
        return Look(slice(first, min(first + rows, height)), self._vectors[name], later)

    def _random(self, name: str, height: int, width: int) -> Tensor:
        generator = torch.Generator().manual_seed(self._columns[name])  # the user's stays untouched
        count = min(width + 1, -(-PROBE_NUMBERS // height))
        vectors = torch.randn(width, count, generator=generator, dtype=torch.float64, device="cpu")
        parameter = self._plan.parameters[name]
        return vectors.to(parameter.device, parameter.dtype)

    def _arrange(self) -> None:
        """Sorts the books by how they are kept now."""
        by_row = set(self.vouched)
        self._states = [
            OBSERVED
            if name in self._by_step and self._is_booked(name)
            else BY_ROW
            if name in by_row and group >= 0
            else UNTOUCHED
            for name, group in zip(self._names, self._groups, strict=True)
        ]
        kept = list(enumerate(zip(self._names, self._parameters, self._states, strict=True)))
        self._probed = [(name, at, p) for at, (name, p, state) in kept if state == BY_ROW]
        self._undecided = [
            (name, p)
            for at, (name, p, state) in kept
            if state == UNTOUCHED and self._groups[at] >= 0
        ]
        self._observed = [
            (at, p) for at, (n, p, state) in kept if state == OBSERVED and n not in self._always
        ]
        self._looks = {
            name: self._looks.get(name) or self._look(name) for name, _, _ in self._probed
        }

    def _regroup(self) -> None:
        """Finds each parameter's group; -1 where the optimizer does not have it."""
        groups = self._optimizer.param_groups
        index = {id(p): at for at, group in enumerate(groups) for p in group["params"]}
        self._groups = [index.get(id(parameter), -1) for parameter in self._parameters]
        self._members = _members(self._optimizer)
        self._by_step |= {n for n in self._reasons if self._groups[self._columns[n]] >= 0}
        self._arrange()


def _some_rows(gradient: Tensor, rows: slice) -> Tensor:
    """Some rows of a table's sparse gradient; only those are made dense."""
    (places, *_), values = sparse_parts(gradient)
    inside = (places >= rows.start) & (places < rows.stop)
    dense = values.new_zeros(rows.stop - rows.start, *values.shape[1:])
    return dense.index_add_(0, places[inside] - rows.start, values[inside])


def _memory(state: Mapping[str, object]) -> Memory:
    return [(kept, version_of(kept)) for kept in state.values() if isinstance(kept, Tensor)]


def _members(optimizer: Optimizer) -> list[list[int]]:
    """Which parameters each group has, by their identity."""
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]
