"""Bookkeeping: steps and pages become rows for the ledger, checked against the gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

import torch
from torch import Tensor

from dualform.errors import NonFiniteError
from dualform.ledger import Codec, Declaration, ShardBlock
from dualform.ledger.codecs import Exact
from dualform.optimizers import BY_ROW, OBSERVED, UNTOUCHED
from dualform.recording.accounts import (
    Evidence,
    accounts_of,
    books_in_bases,
    finite_steps,
    gather_evidence,
    looks_of,
    probes_of,
)
from dualform.recording.batch_sizes import BatchSizes
from dualform.recording.book_states import Event, Note
from dualform.recording.changes import StepChanges, by_book, with_changes
from dualform.recording.entries import Entries
from dualform.recording.excerpts import Excerpt, differing
from dualform.recording.factors import find_factors
from dualform.recording.messages import Findings, Handover, Pages, RecordedStep, WeightSpan
from dualform.recording.plan import Plan
from dualform.recording.processes import Line
from dualform.recording.reconcile import Reconciler, unlike
from dualform.recording.sample_numbers import Arrays, SampleNumbers
from dualform.recording.shards import Gathering, Kept, Piece
from dualform.recording.streams import OpenStream
from dualform.recording.transfer import HostMemory, to_host

NOISY = "some of its gradients are zero but for rounding, which the optimizer magnifies"
UNEXPLAINED = "its gradient is not the sum of the rows that were seen"
OUTSIDE = "something other than the optimizer changed it between steps, or what shares its rows"
UNACCOUNTED = (
    "its rows lead to another weight: something else changed it, its gradient or what the "
    "optimizer remembers of it, or the same of what shares its rows"
)


class Bookkeeper:
    """Turns what is handed over into blocks; belongs to the writer's thread.

    It finds books that can no longer be kept by row. The training thread learns of it from the
    findings, and keeps them by step from its next step on. What such books still do by row until
    then is booked as one change.
    """

    def __init__(
        self,
        plan: Plan,
        samples: SampleNumbers,
        reconciler: Reconciler,
        now: Excerpt,
        line: Line,
    ) -> None:
        self._plan, self._reconciler, self._line = plan, reconciler, line
        self._samples, self._batch_sizes = samples, BatchSizes()
        self.memory = HostMemory()
        """Where rows are until they are written, if they come from a GPU."""
        self._last = now
        """The parameters after the last step of the last hand-over, or after what followed it."""
        self._declared: dict[str, Codec] = {}
        """The streams that were declared, each with the codec that keeps its rows."""
        self._broken: set[str] = set()
        """Books that were found to be kept by row no longer."""
        self._observed: set[str] = set()
        """Books that the last step kept by step, and with it all that came after."""

    def book(self, handover: Handover) -> tuple[ShardBlock | None, NonFiniteError | None, Findings]:
        """The block of some steps, up to the first whose gradient is not finite."""
        sharded, line = self._plan.parts.keys(), self._line
        probes = probes_of(handover.steps, sharded, line)
        steps, error = finite_steps(handover.steps, probes, sharded, line)
        if not steps:
            return None, error, Findings()
        columns, span = self._plan.columns, handover.span
        remarks: tuple[str, ...] = ()
        accounts = [books for books, _ in accounts_of([opened for opened, _ in handover.pages])]
        entries = Entries(self._plan, steps[0].number)
        factors = torch.zeros(len(steps), len(columns), dtype=torch.float64)
        events = self._changed_between(steps, handover, accounts)
        events += self._edited(steps, span, accounts)
        if error is None:
            events += self._changed_without_rows(steps, span, accounts)
        events = self._of_all(events)
        gathered = gather_evidence(columns, steps, handover.pages, probes, self._line)
        if gathered:
            evidence, found, agreed = find_factors(gathered, self._line)
            events += self._refuted(steps, evidence, agreed, handover.refused)
            if error is None:
                events += self._unaccounted(steps, evidence, found, handover, accounts)
            remark = self._batch_sizes.remark(steps, evidence, found)
            remarks = (remark,) if remark else ()
            in_bases = books_in_bases(evidence, self._line)
            for account, factor in zip(evidence, found.unbind(1), strict=True):
                books = list(account.looks)
                if self._broken.isdisjoint(books) or error is not None:
                    factors[:, [columns[book] for book in books]] = factor[:, None]
                else:
                    events += self._break(dict.fromkeys(books, steps[0].number), UNEXPLAINED)
                    account = replace(account, feeds=[])
                entries.add(account)
                if self._line.rank == 0 and account.feeds:  # all processes have the same
                    entries.keep_accounts(account, in_bases)
        self._observed = {name for name, at in columns.items() if steps[-1].states[at] == OBSERVED}
        broken = self._broken & span.before.keys()
        if broken and error is None:
            steps = self._book_as_changes(broken, steps, span)
        block = self._block(steps, handover.pages, entries, factors, events)
        return block, error, Findings(tuple(events), remarks)

    def _block(
        self,
        steps: Sequence[RecordedStep],
        pages: Pages,
        entries: Entries,
        factors: Tensor,
        events: Sequence[tuple[Event, Note]],
    ) -> ShardBlock:
        """What is written of these steps."""
        kept = {**entries.arrays, **entries.residual_arrays(), **entries.accounts}
        arrays = {name: [self.memory.copy(part) for part in parts] for name, parts in kept.items()}
        arrays |= self._samples.arrays(pages, arrays)
        arrays |= _step_arrays(steps, factors)
        steps = self._whole_changes(steps)
        if self._line.rank == 0:  # in all processes they are the same
            arrays |= _observed_arrays(steps)
        notes = [*(n for step in steps for n in step.notes), *(note for _, note in events)]
        as_json = [note._asdict() for note in notes if self._line.rank == 0]
        streams = [opened for opened, _ in pages]
        declared = self._declare(streams, entries.codecs, arrays)
        repeating = frozenset(opened.stream.name for opened in streams if opened.repeats)
        span_of = (steps[0].number, steps[-1].number)
        return ShardBlock(*span_of, arrays, as_json, declared, repeating)

    def _whole_changes(self, steps: Sequence[RecordedStep]) -> Sequence[RecordedStep]:
        """The steps with what is kept of whole books in process 0, where each process has parts."""
        parts, pieces = self._plan.parts, dict[str, Kept]()
        if not parts:
            return steps
        for at, step in enumerate(steps):
            for kind, kept in (("change", step.changes), ("divisor", step.divisors)):
                own = {name: kept[name] for name in sorted(kept.keys() & parts.keys())}
                pieces |= {f"{at} {kind} {n}": Piece(to_host(t), parts[n]) for n, t in own.items()}
        whole = Gathering(self._line, pieces).taken()

        def put_in(at: int, kind: str, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: whole.get(f"{at} {kind} {name}", own) for name, own in kept.items()}

        return [
            step._replace(
                changes=StepChanges.of(put_in(at, "change", step.changes)),
                divisors=put_in(at, "divisor", step.divisors),
            )
            for at, step in enumerate(steps)
        ]

    def _of_all(self, events: list[tuple[Event, Note]]) -> list[tuple[Event, Note]]:
        """What one of the processes found about books holds for all of them."""
        if self._line.of == 1:
            return events
        own = [[event.name, *note] for event, note in events]
        found = {
            note[1]: (Event[event], Note(*note))
            for said in reversed(self._line.said(own))
            for event, *note in said
        }
        self._broken |= found.keys()
        return [found[book] for book in sorted(found)]

    def _declare(
        self, streams: Sequence[OpenStream], codecs: Mapping[str, Codec], arrays: Arrays
    ) -> list[Declaration]:
        """Streams that have rows for the first time, or by another codec; in the model's order.

        The bases of a stream of summaries, and its layer, come with it.
        """
        new = {name for name, codec in codecs.items() if self._declared.get(name) != codec}
        for opened in streams:
            if opened.stream.name in new - self._declared.keys() and opened.layer is not None:
                layer = opened.layer.stream.name
                if layer not in self._declared and layer not in codecs:
                    new.add(layer)
                    codecs = {**codecs, layer: Exact()}
                for side, basis in _bases(opened):
                    arrays[f"{opened.stream.name}/{side}"] = [to_host(basis.bfloat16())]
        self._declared |= codecs
        chosen = [opened for opened in streams if opened.stream.name in new]
        chosen.sort(key=lambda opened: opened.order)
        return [replace(one.declaration, codec=codecs[one.stream.name]) for one in chosen]

    def moved_on(self, now: Excerpt, span: WeightSpan) -> bool:
        """Whether books that no observed change accounts for are not as the last step left them."""
        found = self._anywhere(differing([self._last], [now], span.before).keys())
        return not (found & span.before.keys() <= self._broken | self._observed)

    def _anywhere(self, books: AbstractSet[str]) -> AbstractSet[str]:
        """These books, and those that other processes have found of which each has a part."""
        if not self._plan.parts:
            return books
        names = list(self._plan.columns)
        found = self._line.any([name in books for name in names])
        return {name for name, is_found in zip(names, found, strict=True) if is_found}

    def _refuted(
        self,
        steps: Sequence[RecordedStep],
        evidence: Sequence[Evidence],
        agreed: Tensor,
        refused: Mapping[str, str],
    ) -> list[tuple[Event, Note]]:
        """Books whose rows are not their gradient."""
        events = []
        for index in torch.nonzero(~agreed.all(0)).flatten().tolist():
            at = int(torch.nonzero(~agreed[:, index])[0])
            for book in sorted(evidence[index].looks):
                reason = refused.get(book, UNEXPLAINED)
                events += self._break({book: steps[at].number}, reason)
        return events

    def _changed_between(
        self, steps: Sequence[RecordedStep], handover: Handover, accounts: Sequence[set[str]]
    ) -> list[tuple[Event, Note]]:
        """Books that changed between steps, or since the last; after the very last none count."""
        ends = [self._last, *(step.after for step in steps)]
        by_row = looks_of(steps).keys()
        found = differing(ends[:-1], [step.before for step in steps], by_row)
        self._last = ends[-1]
        if not handover.last:
            since = differing(ends[-1:], [handover.now], by_row)
            found = dict.fromkeys(since, len(steps) - 1) | found
            self._last = handover.now
        changed = {
            name: steps[at].number
            for name, at in found.items()
            if name in handover.span.before
            and steps[at].states[self._plan.columns[name]] != OBSERVED
        }
        return self._changed(changed, handover.span, accounts, OUTSIDE)

    def _edited(
        self, steps: Sequence[RecordedStep], span: WeightSpan, accounts: Sequence[set[str]]
    ) -> list[tuple[Event, Note]]:
        """Books that spot checks found to be changed by something else."""
        events: list[tuple[Event, Note]] = []
        for step in steps:
            for reason, books in step.edited.items():
                found = {
                    name: step.number
                    for name, is_edited in books.items()
                    if name in span.before
                    and step.states[self._plan.columns[name]] != OBSERVED
                    and bool(is_edited)
                }
                events += self._changed(found, span, accounts, reason)
        return events

    def _changed_without_rows(
        self, steps: Sequence[RecordedStep], span: WeightSpan, accounts: Sequence[set[str]]
    ) -> list[tuple[Event, Note]]:
        """Books without rows that changed by more than the changes that were observed."""
        by_row = (torch.tensor([step.states for step in steps]) == BY_ROW).any(0)
        names = [name for name in span.before if not by_row[self._plan.columns[name]]]
        names = [name for name in names if name not in self._broken]
        observed = with_changes(
            [step.changes for step in steps], {name: span.before[name] for name in names}
        )
        found = dict.fromkeys(unlike(observed, span.after), steps[0].number)
        return self._changed(found, span, accounts, OUTSIDE)

    def _unaccounted(
        self,
        steps: Sequence[RecordedStep],
        evidence: Sequence[Evidence],
        factors: Tensor,
        handover: Handover,
        accounts: Sequence[set[str]],
    ) -> list[tuple[Event, Note]]:
        """Books that their rows and the optimizer's rule do not lead to where they are."""
        span, now = handover.span, handover.now
        changed = differing([self._last], [now], span.before)  # after the very last
        put_in = self._anywhere(changed.keys())
        sound = [at for at, account in enumerate(evidence) if not self._broken & set(account.looks)]
        before = {name: start for name, start in span.before.items() if name not in put_in}
        chosen = [evidence[at] for at in sound]
        found = self._reconciler.unexplained(steps, chosen, factors[:, sound], before, span.after)
        first = dict.fromkeys(found, steps[0].number)
        return self._changed(first, span, accounts, UNACCOUNTED)

    def _changed(
        self, changed: dict[str, int], span: WeightSpan, accounts: Sequence[set[str]], reason: str
    ) -> list[tuple[Event, Note]]:
        """Something else changed these books, each at its step; those that share rows go along."""
        for books in accounts:
            if numbers := [changed[name] for name in books if name in changed]:
                changed = changed | dict.fromkeys(books & span.before.keys(), min(numbers))
        return self._break(changed, reason, Event.CHANGED_OUTSIDE)

    def _break(
        self, books: Mapping[str, int], reason: str, event: Event = Event.REFUTED
    ) -> list[tuple[Event, Note]]:
        """These books, each from its step on, can no longer be kept by row."""
        new = sorted(books.keys() - self._broken)
        self._broken |= books.keys()
        return [(event, Note(books[book], book, reason)) for book in new]

    def _book_as_changes(
        self, books: Iterable[str], steps: Sequence[RecordedStep], span: WeightSpan
    ) -> Sequence[RecordedStep]:
        """Books what these steps did to broken books as one observed change, at the last."""
        states = [list(step.states) for step in steps]
        changes: dict[int, dict[str, Tensor]] = {}
        for name, end in with_changes(
            [step.changes for step in steps], {name: span.before[name] for name in books}
        ).items():
            column, after = self._plan.columns[name], span.after[name]
            rest = (after - end).to(after.dtype)
            unseen = [at for at, state in enumerate(states) if state[column] != OBSERVED]
            for at in unseen:
                states[at][column] = UNTOUCHED
            last = unseen[-1] if unseen else len(steps) - 1
            changed = changes.setdefault(last, dict(steps[last].changes))
            changed[name] = changed.get(name, 0) + rest
            states[last][column] = OBSERVED
        return [
            step._replace(
                states=tuple(states[at]),
                changes=StepChanges.of(changes[at]) if at in changes else step.changes,
            )
            for at, step in enumerate(steps)
        ]


def _bases(opened: OpenStream) -> list[tuple[str, Tensor]]:
    """The bases that a stream's summaries are in, by the names of their arrays."""
    if opened.bases is None:
        return []
    sides = (("outputs", opened.bases.outputs), ("inputs", opened.bases.inputs))
    return [(name, basis) for name, basis in sides if basis is not None]


def _step_arrays(steps: Sequence[RecordedStep], factors: Tensor) -> Arrays:
    groups = max(len(step.hyper) for step in steps)  # a group may have been added on the way
    hyper = [step.hyper + step.hyper[:1] * (groups - len(step.hyper)) for step in steps]
    return {
        "hyper": [torch.tensor(hyper, dtype=torch.float64)],
        "groups": [torch.tensor([step.groups for step in steps], dtype=torch.int16)],
        "states": [torch.tensor([step.states for step in steps], dtype=torch.uint8)],
        "factors": [factors],
    }


def _observed_arrays(steps: Sequence[RecordedStep]) -> Arrays:
    """What the steps did to books that are kept by step, and what they divided others by."""
    arrays: Arrays = {}
    numbers = torch.tensor([step.number for step in steps])
    for book, (at, changes) in by_book([step.changes for step in steps]).items():
        arrays[f"{book}/changes"] = [changes]
        arrays[f"{book}/change_steps"] = [numbers[at]]
    for step in steps:
        for book, divisor in step.divisors.items():
            arrays.setdefault(f"{book}/divisors", []).append(to_host(divisor[None]))
            arrays.setdefault(f"{book}/divisor_steps", []).append(torch.tensor([step.number]))
    return arrays
