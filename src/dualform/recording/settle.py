"""Settling: what the steps of training left behind becomes rows, checked against the gradients."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dualform.errors import NonFiniteError
from dualform.ledger import Block, Codec, Declaration, SampleTable
from dualform.ledger.ids import encode_ids
from dualform.optimizers import BY_ROW, OBSERVED, UNTOUCHED
from dualform.owners import Batch
from dualform.recording.advice import Advice
from dualform.recording.batch_sizes import BatchSizes
from dualform.recording.entries import Entries
from dualform.recording.glance import Glance, Glances
from dualform.recording.plan import Plan
from dualform.recording.ports import Port
from dualform.recording.probe import (
    Evidence,
    Feed,
    Look,
    StreamRows,
    lay_out,
)
from dualform.recording.reconcile import Reconciler, unlike
from dualform.recording.steps import Step, finite_steps, looks_of, probes_of
from dualform.recording.tally import settle_factors
from dualform.recording.tape import Page

Pages: TypeAlias = dict[int, list[Page]]
"""The pages of each stream, by its number."""
Span: TypeAlias = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Parameters kept by row, before and after some steps."""
NOISY = "some of its gradients are zero but for rounding, which the optimizer magnifies"
UNEXPLAINED = "its gradient is not the sum of the rows that were seen"
OUTSIDE = "something other than the optimizer changed it between steps, or what shares its rows"
UNACCOUNTED = (
    "its rows lead to another weight: something else changed it, its gradient or what the "
    "optimizer remembers of it, or the same of what shares its rows"
)


class Settler:
    """Turns steps into blocks; knows the plan, the streams and the samples met so far."""

    def __init__(
        self,
        plan: Plan,
        ports: Sequence[Port],
        samples: SampleTable,
        codec: type[Codec],
        refused: Mapping[str, str],
        glances: Glances,
        reconciler: Reconciler,
        advice: Advice,
    ) -> None:
        self._reconciler, self._advice = reconciler, advice
        self._batch_sizes = BatchSizes()
        self._plan, self._ports, self._refused = plan, ports, refused
        self._glances, self._last = glances, glances.take()
        self._samples, self._codec = samples, codec
        self._numbers: dict[int, Tensor] = {}
        """Of batches without ids, the numbers that their samples were given."""
        self._declared: dict[str, Codec] = {}
        """The streams that were declared, each with the codec that keeps its rows."""
        self._books = {book.name: book for book in plan.books}
        self._column = {book.name: index for index, book in enumerate(plan.books)}
        self.failed: set[str] = set()
        """Books newly found to have rows that do not explain their gradient."""
        self.outside: set[str] = set()
        """Books newly found to be changed by something other than the optimizer."""
        self._broken: set[str] = set()
        """All that ever were: what they still book by row is booked as a whole."""
        self._observed: set[str] = set()
        """Books that the last step kept by step, and with it all that came after."""

    def settle(
        self, steps: Sequence[Step], pages: Pages, span: Span, now: Glance, last: bool
    ) -> tuple[Block | None, NonFiniteError | None]:
        """The block of these steps, up to the first whose gradient is not finite.

        `now` is a glance as the span ends. What came after the very `last` step is no step's.
        """
        probes = probes_of(steps)
        steps, error = finite_steps(steps, probes)
        if not steps:
            return None, error
        entries = Entries(self._codec, steps[0].number, self._books)
        notes = [note for step in steps for note in step.notes]
        factors = torch.zeros(len(steps), len(self._plan.books), dtype=torch.float64)
        notes += self._note_outside(steps, span, None if last else now)
        notes += self._note_edited(steps, span)
        accounts = self.evidence(steps, pages, probes)
        if error is None:
            notes += self._note_untouched(steps, span)
        if accounts:
            evidence, found, agreed = settle_factors(accounts)
            notes += self._note_failures(steps, evidence, agreed)
            if error is None:
                notes += self._note_unaccounted(steps, evidence, found, span, now)
            if remark := self._batch_sizes.remark(steps, evidence, found):
                self._advice.remark(remark)
            for at, account in enumerate(evidence):
                books = list(account.looks)
                if self._broken.isdisjoint(books) or error is not None:
                    factors[:, [self._column[book] for book in books]] = found[:, at, None]
                else:
                    self._broken |= set(books)
                    evidence[at] = replace(account, feeds=[])
                entries.add(evidence[at])
        kept = {**entries.arrays, **entries.residual_arrays()}
        arrays = {name: [to_host(part) for part in parts] for name, parts in kept.items()}
        self._advice.lost(notes)
        self._observed = {n for n, at in self._column.items() if steps[-1].states[at] == OBSERVED}
        if error is None:
            self._book_span(self._broken & span[0].keys(), steps, span)
        arrays.update(self._sample_arrays(pages, arrays))
        arrays.update(_step_arrays(steps, factors))
        return Block(
            steps[0].number, steps[-1].number, arrays, notes, self._new_streams(entries.codecs)
        ), error

    def _new_streams(self, codecs: Mapping[str, Codec]) -> list[Declaration]:
        """Streams that have rows for the first time, or by another codec; in the model's order."""
        new = {name for name, codec in codecs.items() if self._declared.get(name) != codec}
        self._declared.update(codecs)
        ports = sorted((p for p in self._ports if p.stream.name in new), key=lambda p: p.order)
        return [replace(port.declaration, codec=codecs[port.stream.name]) for port in ports]

    def evidence(
        self, steps: Sequence[Step], pages: Pages, probes: Mapping[str, Tensor]
    ) -> list[Evidence]:
        """What the rows of each account say about these steps, and the first so many probes."""
        states = torch.tensor([step.states for step in steps])
        first, last = steps[0].number, steps[-1].number
        looks = looks_of(steps)
        rows = {
            index: [r for page in found if (r := lay_out(self._ports[index], page, first, last))]
            for index, found in pages.items()
        }
        return [
            self._evidence(books, ports, rows, looks, probes, states)
            for books, ports in self._accounts()
            if not looks.keys().isdisjoint(books)
        ]

    def _accounts(self) -> list[tuple[set[str], list[int]]]:
        """Books that share streams, with these streams."""
        groups: list[tuple[set[str], list[int]]] = []
        for index, port in enumerate(self._ports):
            books, members = set(port.terms), [index]
            for group in [group for group in groups if group[0] & books]:
                groups.remove(group)
                books, members = group[0] | books, group[1] + members
            groups.append((books, members))
        return groups

    def _evidence(
        self,
        books: set[str],
        ports: Sequence[int],
        rows: dict[int, list[StreamRows]],
        looks: dict[str, Look],
        probes: Mapping[str, Tensor],
        states: Tensor,
    ) -> Evidence:
        columns: dict[str, tuple[Look, slice]] = {}
        start = 0
        for name in sorted(books & looks.keys()):
            stop = start + looks[name].numbers
            columns[name] = (looks[name], slice(start, stop))
            start = stop
        feeds = []
        for index in ports:
            port = self._ports[index]
            terms = {book: term for book, term in port.terms.items() if book in columns}
            feeds.append(Feed(port.stream, terms, rows.get(index, [])))
        active = [
            (states[:, self._column[name]] == BY_ROW)[:, None].expand(-1, look.numbers)
            for name, (look, _) in columns.items()
        ]
        u = torch.cat([probes[name] for name in columns], 1)[: len(states)]
        return Evidence(feeds, columns, u, torch.cat(active, 1))

    def _note_failures(
        self, steps: Sequence[Step], evidence: Sequence[Evidence], agreed: Tensor
    ) -> list[dict[str, Any]]:
        notes: list[dict[str, Any]] = []
        for index in torch.nonzero(~agreed.all(0)).flatten().tolist():
            at = int(torch.nonzero(~agreed[:, index])[0])
            new = set(evidence[index].looks) - self._broken
            self.failed |= new
            self._broken |= new
            notes += [
                {
                    "step": steps[at].number,
                    "book": book,
                    "reason": self._refused.get(book, UNEXPLAINED),
                }
                for book in sorted(new)
            ]
        return notes

    def _note_outside(
        self, steps: Sequence[Step], span: Span, now: Glance | None
    ) -> list[dict[str, Any]]:
        """Notes books that changed between steps, or since the last."""
        ends = [self._last, *(step.after for step in steps)]
        by_row = {book for step in steps for book in step.looks}
        found = self._glances.differing(ends[:-1], [step.before for step in steps], by_row)
        self._last = ends[-1]
        if now is not None:
            since = self._glances.differing(ends[-1:], [now], by_row)
            found = dict.fromkeys(since, len(steps) - 1) | found
            self._last = now
        changed = {
            name: steps[at].number
            for name, at in found.items()
            if name in span[0] and steps[at].states[self._column[name]] != OBSERVED
        }
        return self._note_changed(changed, span, OUTSIDE)

    def _note_edited(self, steps: Sequence[Step], span: Span) -> list[dict[str, Any]]:
        """Notes books that spot checks found to be changed by something else."""
        notes: list[dict[str, Any]] = []
        for step in steps:
            by_row = {n for n in span[0] if step.states[self._column[n]] != OBSERVED}
            for reason, books in step.edited.items():
                found = {n: step.number for n, is_ in books.items() if n in by_row and bool(is_)}
                notes += self._note_changed(found, span, reason)
        return notes

    def _note_untouched(self, steps: Sequence[Step], span: Span) -> list[dict[str, Any]]:
        """Notes books without rows that changed by more than the changes that were observed."""
        by_row = (torch.tensor([step.states for step in steps]) == BY_ROW).any(0)
        names = [name for name in span[0] if not by_row[self._column[name]]]
        names = [name for name in names if name not in self._broken]
        observed = {name: _observed(steps, name, span[0][name]) for name in names}
        found = dict.fromkeys(unlike(observed, span[1]), steps[0].number)
        return self._note_changed(found, span, OUTSIDE)

    def _note_unaccounted(
        self,
        steps: Sequence[Step],
        evidence: Sequence[Evidence],
        factors: Tensor,
        span: Span,
        now: Glance,
    ) -> list[dict[str, Any]]:
        """Notes books that their rows and the optimizer's rule do not lead to where they are."""
        put_in = self._glances.differing([self._last], [now], span[0])  # after the very last step
        sound = [at for at, account in enumerate(evidence) if not self._broken & set(account.looks)]
        before = {name: start for name, start in span[0].items() if name not in put_in}
        chosen = [evidence[at] for at in sound]
        found = self._reconciler.unexplained(steps, chosen, factors[:, sound], before, span[1])
        return self._note_changed(dict.fromkeys(found, steps[0].number), span, UNACCOUNTED)

    def _note_changed(
        self, changed: dict[str, int], span: Span, reason: str
    ) -> list[dict[str, Any]]:
        """Notes these books, each with its step, and those that share rows with them."""
        for books, _ in self._accounts():
            if numbers := [changed[name] for name in books if name in changed]:
                changed = changed | dict.fromkeys(books & span[0].keys(), min(numbers))
        new = changed.keys() - self._broken
        self.outside |= new
        self._broken |= new
        return [{"step": changed[book], "book": book, "reason": reason} for book in sorted(new)]

    def _book_span(self, books: Iterable[str], steps: Sequence[Step], span: Span) -> None:
        """Books what these steps did to failed books as one observed change, at the last."""
        before, after = span
        for name in books:
            column = self._column[name]
            unseen = [step for step in steps if step.states[column] != OBSERVED]
            rest = (after[name] - _observed(steps, name, before[name])).to(after[name].dtype)
            for step in unseen:
                step.states = [*step.states[:column], UNTOUCHED, *step.states[column + 1 :]]
            last = unseen[-1] if unseen else steps[-1]
            last.changes[name] = last.changes.get(name, 0) + rest
            last.states = [*last.states[:column], OBSERVED, *last.states[column + 1 :]]

    def moved_on(self, now: Glance, span: Span) -> bool:
        """Whether books that no observed change accounts for are not as the last step left them."""
        found = self._glances.differing([self._last], [now], span[0])
        return not (found.keys() & span[0].keys() <= self._broken | self._observed)

    def _sample_arrays(
        self, pages: Pages, arrays: dict[str, list[Tensor]]
    ) -> dict[str, list[Tensor]]:
        """The samples of the batches that left rows, and the strings met for the first time."""
        tables = [part for name, ps in arrays.items() if name.endswith("/segments") for part in ps]
        used = sorted({number for table in tables for number in table[:, 1].tolist()})
        marks = [page.marks for group in pages.values() for page in group]
        batches = {batch.number: batch for filled in marks for _, batch in filled}
        kept = [batches[number] for number in used]
        self._numbers = {n: ids for n, ids in self._numbers.items() if n >= min(used, default=0)}
        if not kept:
            return {}
        table = torch.tensor([(batch.number, batch.size) for batch in kept])
        ids = torch.cat([self._ids(batch) for batch in kept])
        found = {"batches": [table], "samples": [ids]}
        new = self._samples.take_new()
        return {**found, "ids": [encode_ids(new)]} if new else found

    def _ids(self, batch: Batch) -> Tensor:
        if batch.whole is not None:
            return self._ids(batch.whole)[batch.places]
        if batch.ids is not None:
            return self._samples.numbers(batch.ids)
        if batch.number not in self._numbers:  # rows of one batch may be parts of several
            self._numbers[batch.number] = self._samples.count(batch.size)
        return self._samples.numbers(self._numbers[batch.number])


def _observed(steps: Sequence[Step], name: str, before: Tensor) -> Tensor:
    """What a book was before these steps, with the changes that were observed; itself if none."""
    changes = [step.changes[name] for step in steps if name in step.changes]
    return functools.reduce(torch.add, changes, before.double()) if changes else before


def _step_arrays(steps: Sequence[Step], factors: Tensor) -> dict[str, list[Tensor]]:
    groups = max(len(step.hyper) for step in steps)  # a group may have been added on the way
    hyper = [step.hyper + step.hyper[:1] * (groups - len(step.hyper)) for step in steps]
    arrays = {
        "hyper": [torch.tensor(hyper, dtype=torch.float64)],
        "groups": [torch.tensor([step.groups for step in steps], dtype=torch.int16)],
        "states": [torch.tensor([step.states for step in steps], dtype=torch.uint8)],
        "factors": [factors],
    }
    for book in dict.fromkeys(name for step in steps for name in step.changes):
        found = [(step.number, step.changes[book]) for step in steps if book in step.changes]
        arrays[f"{book}/changes"] = [to_host(change[None]) for _, change in found]
        arrays[f"{book}/change_steps"] = [torch.tensor([number for number, _ in found])]
    return arrays


def to_host(array: Tensor) -> Tensor:
    """The array in main memory; through pinned memory where it comes from an accelerator."""
    if not array.is_cuda:
        return array.cpu()
    host = torch.empty(array.shape, dtype=array.dtype, pin_memory=True)
    return host.copy_(array)
