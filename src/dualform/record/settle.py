"""Settling: what the steps of training left behind becomes rows, checked against the gradients."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dualform.errors import NonFiniteError
from dualform.ledger import Block, SampleTable
from dualform.ledger.samples import encode_ids
from dualform.record.optimizers import BY_ROW, OBSERVED, UNTOUCHED
from dualform.record.plan import Plan
from dualform.record.probe import Evidence, StreamRows, lay_out, settle_factors
from dualform.record.tape import Batch, Page

Pages: TypeAlias = dict[int, list[Page]]
"""The pages of each source."""
Span: TypeAlias = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Parameters kept by row, before and after some steps."""
UNEXPLAINED = "its gradient is not the sum of the rows that were seen"


@dataclass(slots=True)
class Step:
    """Everything one optimizer step left behind."""

    number: int
    probes: list[Tensor | None]
    """One for each account; None where the step did not touch it by row."""
    outputs: list[slice]
    """Which outputs of each account the probes were taken at; the same throughout a parcel."""
    hyper: list[tuple[float, ...]]
    groups: list[int]
    states: list[int]
    changes: dict[str, Tensor] = field(default_factory=dict)
    notes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the observed changes."""
        return sum([change.nbytes for change in self.changes.values()])


class Settler:
    """Turns steps into blocks; knows the plan, the probe vectors and the samples met so far."""

    def __init__(
        self, plan: Plan, vectors: Sequence[Tensor], samples: SampleTable, numbered: int = 0
    ) -> None:
        self._plan = plan
        self._vectors = vectors
        self._samples = samples
        self._numbered = numbered
        self._column = {book.name: index for index, book in enumerate(plan.books)}
        self.failed: set[int] = set()
        """Accounts newly found to have rows that do not explain their gradient."""
        self._broken: set[int] = set()
        """All that ever were: what they still book by row is booked as a whole."""

    def settle(
        self, steps: Sequence[Step], pages: Pages, span: Span
    ) -> tuple[Block | None, NonFiniteError | None]:
        """The block of these steps, up to the first whose gradient is not finite."""
        steps, error = self._finite(steps)
        if not steps:
            return None, error
        arrays: dict[str, list[Tensor]] = {}
        notes = [note for step in steps for note in step.notes]
        factors = torch.zeros(len(steps), 0, dtype=torch.float64)
        if self._plan.accounts:
            evidence, factors, agreed = settle_factors(self.evidence(steps, pages))
            notes += self._note_failures(steps, agreed)
            for index in self._broken if error is None else ():
                self._book_span(index, steps, span)
                factors[:, index] = 0.0
                evidence[index] = replace(evidence[index], streams={})
            arrays.update(self._row_arrays(steps, evidence))
        arrays.update(self._sample_arrays(pages, arrays))
        arrays.update(_step_arrays(steps, factors))
        return Block(steps[0].number, steps[-1].number, arrays, notes), error

    def evidence(self, steps: Sequence[Step], pages: Pages) -> list[Evidence]:
        """What the rows of each account say about these steps."""
        states = torch.tensor([step.states for step in steps])
        first, last = steps[0].number, steps[-1].number
        rows = {
            index: [r for page in pages[index] if (r := lay_out(source, page, first, last))]
            for index, source in enumerate(self._plan.sources)
        }
        return [
            self._evidence(index, steps, states, rows) for index in range(len(self._plan.accounts))
        ]

    def _evidence(
        self,
        index: int,
        steps: Sequence[Step],
        states: Tensor,
        rows: dict[int, list[StreamRows]],
    ) -> Evidence:
        account = self._plan.accounts[index]
        sources = {at: self._plan.sources[at] for at in account.sources}
        biased = {at: "sum" in source.parameters.values() for at, source in sources.items()}
        outputs = steps[0].outputs[index]
        probes = [step.probes[index] for step in steps]
        vectors = self._vectors[index]
        width = len(range(sources[account.sources[0]].stream.values)[outputs])
        u = torch.zeros(len(probes), width * vectors.shape[1], dtype=torch.float64)
        if taken := [probe for probe in probes if probe is not None]:
            where = torch.tensor([probe is not None for probe in probes])
            u[where] = torch.stack(taken).flatten(1).to("cpu", torch.float64)
        forms = {name: form for s in sources.values() for name, form in s.parameters.items()}
        weights = self._touched(states, [name for name in forms if forms[name] == "outer"])
        biases = self._touched(states, [name for name in forms if forms[name] == "sum"])
        touched = torch.stack([weights, biases], 1)
        streams = {at: rows[at] for at in sources}
        return Evidence(streams, biased, vectors, outputs, u, touched)

    def _touched(self, states: Tensor, books: Sequence[str]) -> Tensor:
        """(steps,): whether any of these books was booked by row."""
        columns = [self._column[name] for name in books]
        return (states[:, columns] == BY_ROW).any(1)

    def _note_failures(self, steps: Sequence[Step], agreed: Tensor) -> list[dict[str, Any]]:
        notes: list[dict[str, Any]] = []
        for index in torch.nonzero(~agreed.all(0)).flatten().tolist():
            at = int(torch.nonzero(~agreed[:, index])[0])
            if index not in self._broken:
                self.failed.add(index)
                self._broken.add(index)
                notes += self.notes_of(index, steps[at].number)
        return notes

    def _book_span(self, index: int, steps: Sequence[Step], span: Span) -> None:
        """Books what these steps did to a failed account as one observed change, at the last."""
        by_row = [step for step in steps if step.probes[index] is not None]
        for name in self._plan.accounts[index].books if by_row else ():
            column = self._column[name]
            for step in by_row:
                step.states = [*step.states[:column], UNTOUCHED, *step.states[column + 1 :]]
            last = by_row[-1]
            before, after = span
            later = [step.changes[name] for step in steps if name in step.changes]
            last.changes[name] = functools.reduce(torch.sub, later, after[name] - before[name])
            last.states = [*last.states[:column], OBSERVED, *last.states[column + 1 :]]

    def notes_of(self, index: int, step: int) -> list[dict[str, Any]]:
        """Why the books of an account are kept by step from here on."""
        books = self._plan.accounts[index].books
        return [{"step": step, "book": book, "reason": UNEXPLAINED} for book in books]

    def _finite(self, steps: Sequence[Step]) -> tuple[Sequence[Step], NonFiniteError | None]:
        error = None
        for book, taken in self._signals(steps):
            finite = torch.stack([signal for _, signal in taken]).flatten(1).isfinite().all(1)
            if not finite.all():
                bad = taken[int(torch.nonzero(~finite)[0])][0]
                if error is None or bad < error.step:
                    error = NonFiniteError.at(book, bad)
        return [step for step in steps if error is None or step.number < error.step], error

    def _signals(self, steps: Sequence[Step]) -> Iterator[tuple[str, list[tuple[int, Tensor]]]]:
        """What each book shows of its steps: a probe of its account, or its observed change."""
        for index, account in enumerate(self._plan.accounts):
            probes = [(step.number, p) for step in steps if (p := step.probes[index]) is not None]
            if probes:
                yield account.books[0], probes
        for book in dict.fromkeys(name for step in steps for name in step.changes):
            yield (
                book,
                [(s.number, s.changes[book].sum()[None]) for s in steps if book in s.changes],
            )

    def _row_arrays(
        self, steps: Sequence[Step], evidence: Sequence[Evidence]
    ) -> dict[str, list[Tensor]]:
        arrays: dict[str, list[Tensor]] = {}
        offset = torch.tensor([steps[0].number, 0, 0])
        for account in evidence:
            for index, rows in account.pieces:
                if len(rows.counts):
                    name = self._plan.sources[index].stream.name
                    arrays.setdefault(f"{name}/keys", []).append(to_host(rows.keys))
                    arrays.setdefault(f"{name}/values", []).append(to_host(rows.values))
                    arrays.setdefault(f"{name}/segments", []).append(rows.segments + offset)
        return {name: _one_dtype(parts) for name, parts in arrays.items()}

    def _sample_arrays(
        self, pages: Pages, arrays: dict[str, list[Tensor]]
    ) -> dict[str, list[Tensor]]:
        """The samples of the batches that left rows, and the strings met for the first time."""
        tables = [part for name, ps in arrays.items() if name.endswith("/segments") for part in ps]
        used = sorted({number for table in tables for number in table[:, 1].tolist()})
        marks = [page.marks for group in pages.values() for page in group]
        batches = {batch.number: batch for filled in marks for _, batch in filled}
        kept = [batches[number] for number in used]
        if not kept:
            return {}
        table = torch.tensor([(batch.number, batch.size) for batch in kept])
        ids = torch.cat([self._ids(batch) for batch in kept])
        found = {"batches": [table], "samples": [ids]}
        new = self._samples.take_new()
        return {**found, "ids": [encode_ids(new)]} if new else found

    def _ids(self, batch: Batch) -> Tensor:
        if batch.ids is not None:
            return self._samples.numbers(batch.ids)
        first, self._numbered = self._numbered, self._numbered + batch.size
        return self._samples.numbers(torch.arange(first, self._numbered))


def _one_dtype(parts: list[Tensor]) -> list[Tensor]:
    """Parts of one array share a dtype; autocast may have been switched between them."""
    widest = functools.reduce(torch.promote_types, [part.dtype for part in parts])
    return [part.to(widest) for part in parts]


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
