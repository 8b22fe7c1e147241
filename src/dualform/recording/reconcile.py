"""Reconciling: is each parameter what its rows and the optimizer's rule make of it?

Probes and excerpts look at some elements of gradients and parameters. They do not see a row of a
gradient that was masked elsewhere, a row of a weight that was set to zero, or a momentum that was
cleared. So at each hand-over every book is followed from where it was at the last one, through the
optimizer's steps, to where it must end, and held against the parameter itself.

Where a rule's coefficients are numbers, `W r` goes through the same steps as `W`: one random vector
`r` sees every element. Where elements go their own ways (Adam), some columns are followed, each
over its whole height, and one row, over its whole width. All other elements, and those of rules
that cannot be followed in part (Muon), are compared in some steps: `spot_checks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.ledger import Term
from dualform.memory.blocks import matrix_shape
from dualform.memory.forms import form_named
from dualform.optimizers import (
    BY_ROW,
    OBSERVED,
    Rule,
)
from dualform.recording.accounts import Evidence
from dualform.recording.excerpts import ROUNDINGS
from dualform.recording.factors import MISMATCH
from dualform.recording.followed import BookCourse, Followed, LookedAt, look_at_parts
from dualform.recording.keep import Summaries
from dualform.recording.messages import RecordedStep
from dualform.recording.plan import Plan
from dualform.recording.probe import Look, gradient_at, in_double, probe_rows
from dualform.recording.processes import Line
from dualform.recording.shards import is_sharded, local, part_of
from dualform.recording.step_numbers import NumbersOfSteps, numbers_of_steps

FOLLOWED = 1024
"""So many elements of a book are followed under a rule without numbers, or one column of it."""
HIGHEST = 1 << 14
"""At most so many elements of a column are, then."""
LEEWAY = 1e-2
"""By what part of its way such a book may miss its end: a rule may magnify rounding."""
WIDE_LEEWAY = 1e-1
"""The same where rows have 16 bits, or where the rule steps by signs.

Where both is so, nothing is compared: a sign is that of a sum which a kernel rounded.
"""


def _is_large(plan: Plan, name: str) -> bool:
    """Whether a book will be summarized, but for a few kinds: then it is not followed at all."""
    policy, book = plan.keep[name], plan.book(name)
    return isinstance(policy, Summaries) and len(book.shape) > 1 and book.size > policy.size


class Reconciler:
    """Follows every book that is kept by row, and names those that end somewhere else."""

    def __init__(self, plan: Plan, rule: Rule, optimizer: Optimizer, line: Line) -> None:
        self._plan, self._rule, self._line = plan, rule, line
        self._memory = {
            name: {part: _copied(kept) for part, kept in memory.items()}
            for name, parameter in plan.parameters.items()
            if rule.in_parts and not _is_large(plan, name)
            if (memory := rule.memory(optimizer, parameter))
        }
        """What the optimizer remembers as recording begins, of books not followed yet."""
        self._column = {book.name: at for at, book in enumerate(plan.books)}
        self._followed: dict[str, Followed] = {}
        self._looked_at: dict[int, LookedAt] = {}
        """What was seen of parts, by the identity of their copies; until the next hand-over."""

    def unexplained(
        self,
        steps: Sequence[RecordedStep],
        evidence: Sequence[Evidence],
        factors: Tensor,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
    ) -> list[str]:
        """The books that these steps do not lead from where they were to where they are.

        `factors` (steps, accounts) are those of the evidence's rows.
        """
        courses = dict(self._courses(steps, evidence, factors, before))
        parts = {name: self._plan.parts[name] for name in courses if name in self._plan.parts}
        given = ((before, after), self._looked_at, self._line)
        self._looked_at = look_at_parts(parts, self._followed, *given)
        if self._rule.by_numbers:
            known: dict[Any, NumbersOfSteps] = {}
            missed = {}
            for name, course in courses.items():
                key = (tuple(course.states), tuple(course.hyper), self._followed[name].buffered)
                if key not in known:
                    known[key] = numbers_of_steps(self._rule.scalar, *key)
                missed[name] = self._by_numbers(name, course, known[key], before, after)
        else:
            missed = self._by_elements(courses, before, after)
        return [name for name in before if missed.get(name)]

    def _courses(
        self,
        steps: Sequence[RecordedStep],
        evidence: Sequence[Evidence],
        factors: Tensor,
        before: Mapping[str, Tensor],
    ) -> Iterator[tuple[str, BookCourse]]:
        """What these steps were to each book that some of them kept by row."""
        if not self._rule.in_parts:
            return
        signs = self._rule.follows_signs
        places = [
            (at, name)
            for at, account in enumerate(evidence)
            if not (signs and account.has_16_bits)
            for name in account.looks
            if not (account.is_summarized(name) or _is_large(self._plan, name))
            if name in before and BY_ROW in {step.states[self._column[name]] for step in steps}
        ]
        self._begin_following(evidence, places)
        parts = [self._parts(evidence[at], name) for at, name in places]
        said = iter(in_double([t for group in parts for _, *pair in group for t in pair]))
        sums: list[Tensor] = []
        for (_, name), group in zip(places, parts, strict=True):
            w = torch.zeros(len(steps), len(self._followed[name].b), dtype=torch.float64)
            size = w.new_zeros(len(steps))
            for where, _, _ in group:
                w.index_add_(0, where, next(said))
                size.index_add_(0, where, next(said))
            sums += [w, size]
            if part := self._plan.parts.get(name):
                sums.append(torch.zeros_like(w))
                for t, step in enumerate(steps):
                    if step.states[self._column[name]] == OBSERVED:
                        sums[-1][t] = self._followed[name].of(step.changes[name], part)
        summed = iter(self._line.total(sums))
        for at, name in places:
            column, account = self._column[name], evidence[at]
            hyper = [step.hyper[max(step.groups[column], 0)] for step in steps]
            states = [step.states[column] for step in steps]
            w, size = next(summed), next(summed)
            reach = size * factors[:, at].abs() * account.rounding
            w = w * factors[:, at, None]
            changes = next(summed) if name in self._plan.parts else None
            for t, state in enumerate(states):
                if state == OBSERVED and changes is None:
                    w[t], reach[t] = self._followed[name].of(steps[t].changes[name]), 0.0
                elif state == OBSERVED and changes is not None:
                    w[t], reach[t] = changes[t], 0.0
            yield name, BookCourse(column, states, hyper, w, reach, account.has_16_bits)

    def _of_weights(self, name: str, copy: Tensor) -> Tensor:
        known = self._looked_at.get(id(copy))
        return self._followed[name].of_weights(copy) if known is None else known.followed

    def _begin_following(
        self, evidence: Sequence[Evidence], places: Sequence[tuple[int, str]]
    ) -> None:
        """Decides where books are looked at that were not followed before.

        Of a table it looks at a row that was read: the first process that has read one says which.
        """
        new = [(evidence[at], name) for at, name in places if name not in self._followed]
        terms, first = [], []
        for account, name in new:
            terms.append(next(feed.terms[name] for feed in account.feeds if name in feed.terms))
            is_table = not form_named(terms[-1].form).has_sides
            keys = [rows.keys for feed, rows in account.pieces if is_table and name in feed.terms]
            first.append(next((int(places[0, 0]) for places in keys if len(places)), -1))
        read = self._line.numbers(first) if new else []
        for index, (_, name) in enumerate(new):
            seen = [own[index] for own in read if own[index] >= 0]
            self._followed[name] = self._follow(name, terms[index], seen)

    def _parts(self, account: Evidence, name: str) -> list[tuple[Tensor, Tensor, Tensor]]:
        """What the account's rows say of a book where it is followed: steps, probes and sizes."""
        feeds = [(feed, rows) for feed, rows in account.pieces if name in feed.terms]
        book, found = self._followed[name], []
        for feed, rows in feeds:
            term = feed.terms[name]
            probe, size = probe_rows(feed.stream, term, rows, book.look)
            if book.row is not None:
                width = len(book.b) - book.look.numbers
                beside = gradient_at(feed.stream, term, rows, book.row, width)
                probe = torch.cat([probe, beside], 1)
            found.append((rows.segments[:, 0], probe, size))
        return found

    def _follow(self, name: str, term: Term, seen: Sequence[int]) -> Followed:
        """Decides where a book is looked at, and begins with what the optimizer remembers.

        Of a table, `seen` are rows that were read.
        """
        shape = tuple(self._plan.parameters[name].shape)
        height, width = matrix_shape(shape, term.view, term.groups)
        rows, vectors, columns, row = slice(0, height), None, None, None
        generator = torch.Generator().manual_seed(self._column[name])  # the user's stays untouched
        if not self._rule.by_numbers:
            rows = slice(0, min(height, HIGHEST))
        if term.view != "flat" and not self._rule.by_numbers:
            count = min(width, max(1, FOLLOWED // height))
            columns = torch.randperm(width, generator=generator)[:count]
            vectors = torch.zeros(width, count, dtype=torch.float64)
            vectors[columns, torch.arange(count)] = 1.0
            row = int(torch.randint(height, (), generator=generator))
            if seen:
                row = seen[0] + term.at[0]
        elif term.view != "flat":
            vectors = torch.randn(width, 1, generator=generator, dtype=torch.float64)
        memory, buffer = self._memory.pop(name, {}), self._rule.buffer
        look = Look(rows, vectors)
        b = torch.zeros(look.numbers + (0 if row is None else width), dtype=torch.float64)
        found = Followed(look, columns, row, term, buffer in memory, b)
        for part, kept in memory.items():
            if is_sharded(kept):
                (found.state[part],) = self._line.total([found.of(local(kept), part_of(kept))])
            else:
                found.state[part] = found.of(kept) if kept.shape == shape else kept.double().cpu()
        found.b = found.state.pop(buffer, found.b)
        return found

    def _by_numbers(
        self,
        name: str,
        course: BookCourse,
        numbers: NumbersOfSteps,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
    ) -> bool:
        """Whether a book misses its end under a rule of numbers."""
        book = self._followed[name]
        W, b = self._of_weights(name, before[name]), book.b
        end = numbers.on_W[0] * W + numbers.on_W[1] * b + numbers.into_W @ course.w
        book.b = numbers.on_b[0] * W + numbers.on_b[1] * b + numbers.into_b @ course.w
        book.buffered = book.buffered or numbers.makes_buffer
        allowed = MISMATCH * float(numbers.into_W.abs() @ course.reach)
        return self._is_missed(name, end, after[name], allowed, len(course.states))

    def _by_elements(
        self,
        courses: Mapping[str, BookCourse],
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
    ) -> dict[str, bool]:
        """Which books miss their ends under a rule that treats each element by itself.

        Books of which the optimizer knows the same numbers go through its steps together.
        """
        together: dict[Any, list[str]] = {}
        for name, course in courses.items():
            state = self._followed[name].state.items()
            numbers = tuple((part, float(kept)) for part, kept in state if not kept.ndim)
            known = tuple(part for part, kept in state if kept.ndim)
            key = (tuple(course.states), tuple(course.hyper), numbers, known)
            together.setdefault(key, []).append(name)
        missed = {}
        for names in together.values():
            ends, ways = self._walk(names, [courses[name] for name in names], before)
            for name, end, way in zip(names, ends, ways, strict=True):
                wide = courses[name].coarse or self._rule.follows_signs
                allowed = (WIDE_LEEWAY if wide else LEEWAY) * float(way.norm())
                steps = len(courses[name].states)
                missed[name] = self._is_missed(name, end, after[name], allowed, steps)
        return missed

    def _walk(
        self, names: Sequence[str], courses: Sequence[BookCourse], before: Mapping[str, Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Where the steps lead some books, and how far each element went on its way."""
        rule = self._rule.replayed
        books = [self._followed[name] for name in names]
        sizes = [len(book.b) for book in books]
        W = torch.cat([self._of_weights(name, before[name]) for name in names])
        b = torch.cat([book.b for book in books])
        state = {
            part: torch.cat([book.state[part] for book in books]) if kept.ndim else kept
            for part, kept in books[0].state.items()
        }
        gradients, way = torch.cat([course.w for course in courses], 1), torch.zeros_like(W)
        for t, given in enumerate(courses[0].hyper):
            if courses[0].states[t] == OBSERVED:
                W = W + gradients[t]
            elif courses[0].states[t] == BY_ROW:
                hyper = dict(zip(rule.fields, given, strict=True))
                step, state = rule.transition(hyper, state, W, b, gradients[t])
                end, b = step.forward(W, b, gradients[t])
                way += (end - W).abs()
                W = end
        remembered = {
            part: torch.split(kept, sizes) if kept.ndim else kept for part, kept in state.items()
        }
        for at, (book, own) in enumerate(zip(books, torch.split(b, sizes), strict=True)):
            book.b = own
            book.state = {
                part: kept if isinstance(kept, Tensor) else kept[at]
                for part, kept in remembered.items()
            }
        return torch.split(W, sizes), torch.split(way, sizes)

    def _is_missed(self, name: str, end: Tensor, after: Tensor, allowed: float, steps: int) -> bool:
        """Whether a book is farther from its end than allowed, and than rounding may carry it."""
        book = self._followed[name]
        is_, known = self._of_weights(name, after), self._looked_at.get(id(after))
        gap = float((is_ - end).norm())
        if gap <= allowed:
            return False
        whole = book.columns is None
        if whole and known is not None:
            size = known.size
        else:
            size = float(torch.linalg.vector_norm(after if whole else is_, dtype=torch.float64))
        places = max(steps, 1) * torch.finfo(after.dtype).eps * size
        if whole and book.look.vectors is not None:  # their products with weights are rounded, too
            allowed += torch.finfo(torch.float64).eps * float(book.look.vectors.norm()) * size
        return not gap <= allowed + ROUNDINGS * places


def _copied(memory: Tensor) -> Tensor:
    return memory.detach().clone() if is_sharded(memory) else memory.detach().clone().to_dense()


def unlike(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """The books that are not what they are expected to be, but for rounding.

    >>> unlike({"w": torch.zeros(2)}, {"w": torch.tensor([0.0, 1.0])})
    ['w']
    """
    return [n for n, a in expected.items() if a is not found[n] and bool(differs(a, found[n]))]


def differs(a: Tensor, b: Tensor, reach: Tensor | float = 0.0) -> Tensor:
    """(): whether two tensors differ by more than rounding and `reach`, of each element or of all.

    nan is equal to nan.

    >>> differs(torch.ones(2), torch.tensor([1.0, 1.0 + 1e-7]))
    tensor(False)
    """
    on_cpu, alike = a.device.type == "cpu", a.dtype == b.dtype
    if not a.numel() or (on_cpu and alike and torch.equal(a, b)):  # elsewhere, to know is to wait
        return torch.tensor(False)
    gap = torch.where(a.isnan() & b.isnan() | (a == b), 0.0, (a - b).abs())
    rounding = torch.finfo(b.dtype).eps * torch.maximum(a.abs().amax(), b.abs().amax())
    return ~(gap <= ROUNDINGS * rounding + reach).all()
