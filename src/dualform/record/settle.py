"""Settling: what the steps of training left behind becomes rows, checked against the gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dualform.errors import NonFiniteError
from dualform.ledger import Block, SampleTable
from dualform.ledger.samples import encode_ids
from dualform.record.optimizers import BY_ROW
from dualform.record.plan import Plan
from dualform.record.probe import Evidence, StreamRows, collect, settle_factors
from dualform.record.watch import Batch, Capture

UNEXPLAINED = "its gradient is not the sum of the rows that were seen"


@dataclass(slots=True)
class Step:
    """Everything one optimizer step left behind."""

    number: int
    captures: list[Capture]
    probes: list[Tensor | None]
    """One for each account; None where the step did not touch it by row."""
    hyper: list[tuple[float, ...]]
    groups: list[int]
    states: list[int]
    changes: dict[str, Tensor] = field(default_factory=dict)
    notes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and changes."""
        rows = sum([capture.x.nbytes + capture.error.nbytes for capture in self.captures])
        return rows + sum([change.nbytes for change in self.changes.values()])


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
        """Accounts whose rows were found not to explain their gradient."""

    def settle(self, steps: Sequence[Step]) -> tuple[Block | None, NonFiniteError | None]:
        """The block of these steps, up to the first whose gradient is not finite."""
        steps, error = self._finite(steps)
        if not steps:
            return None, error
        arrays: dict[str, Tensor] = {}
        notes = [note for step in steps for note in step.notes]
        factors = torch.zeros(len(steps), 0, dtype=torch.float64)
        if self._plan.accounts:
            evidence, factors, agreed = settle_factors(self.evidence(steps))
            notes += self._note_failures(steps, agreed)
            arrays.update(self._row_arrays(steps, evidence))
        arrays.update(_step_arrays(steps, factors))
        arrays.update(self._sample_arrays(steps, arrays))
        return Block(steps[0].number, steps[-1].number, arrays, notes), error

    def evidence(self, steps: Sequence[Step]) -> list[Evidence]:
        """What the rows of each account say about these steps."""
        captures: dict[int, list[tuple[int, Capture]]] = {}
        for at, step in enumerate(steps):
            for capture in step.captures:
                captures.setdefault(capture.source, []).append((at, capture))
        states = torch.tensor([step.states for step in steps])
        return [
            self._evidence(index, steps, states, captures)
            for index in range(len(self._plan.accounts))
        ]

    def _evidence(
        self,
        index: int,
        steps: Sequence[Step],
        states: Tensor,
        captures: dict[int, list[tuple[int, Capture]]],
    ) -> Evidence:
        account, sources = self._plan.accounts[index], self._plan.sources
        streams = {
            at: rows
            for at in account.sources
            if (rows := collect(sources[at], captures.get(at, [])))
        }
        biased = {at: "sum" in sources[at].parameters.values() for at in account.sources}
        forms = {
            name: form for at in account.sources for name, form in sources[at].parameters.items()
        }
        probes = [step.probes[index] for step in steps]
        u = torch.zeros(len(steps), sources[account.sources[0]].stream.values, dtype=torch.float64)
        if taken := [probe for probe in probes if probe is not None]:
            where = torch.tensor([probe is not None for probe in probes])
            u[where] = torch.stack(taken).to("cpu", torch.float64)
        touched = torch.stack(
            [
                self._touched(states, [name for name in forms if forms[name] == form])
                for form in ("outer", "sum")
            ],
            1,
        )
        return Evidence(streams, biased, self._vectors[index], u, touched)

    def _touched(self, states: Tensor, books: Sequence[str]) -> Tensor:
        """(steps,): whether any of these books was booked by row."""
        columns = [self._column[name] for name in books]
        return (states[:, columns] == BY_ROW).any(1)

    def _note_failures(self, steps: Sequence[Step], agreed: Tensor) -> list[dict[str, Any]]:
        notes: list[dict[str, Any]] = []
        for index in torch.nonzero(~agreed.all(0)).flatten().tolist():
            at = int(torch.nonzero(~agreed[:, index])[0])
            self.failed.add(index)
            notes += self.notes_of(index, steps[at].number)
        return notes

    def notes_of(self, index: int, step: int) -> list[dict[str, Any]]:
        """Why the books of an account are kept by step from here on."""
        books = self._plan.accounts[index].books
        return [{"step": step, "book": book, "reason": UNEXPLAINED} for book in books]

    def _finite(self, steps: Sequence[Step]) -> tuple[Sequence[Step], NonFiniteError | None]:
        error = None
        for book, taken in self._signals(steps):
            finite = torch.stack([signal.sum() for _, signal in taken]).isfinite()
            if not finite.all():
                bad = taken[int(torch.nonzero(~finite)[0])][0]
                if bad <= steps[-1].number:
                    steps = [step for step in steps if step.number < bad]
                    error = _not_finite(book, bad)
            if not steps:
                break
        return steps, error

    def _signals(self, steps: Sequence[Step]) -> Iterator[tuple[str, list[tuple[int, Tensor]]]]:
        """What each book shows of its steps: a probe of its account, or its observed change."""
        for index, account in enumerate(self._plan.accounts):
            probes = [(step.number, p) for step in steps if (p := step.probes[index]) is not None]
            if probes:
                yield account.books[0], probes
        for book in dict.fromkeys(name for step in steps for name in step.changes):
            yield book, [(s.number, s.changes[book]) for s in steps if book in s.changes]

    def _row_arrays(self, steps: Sequence[Step], evidence: Sequence[Evidence]) -> dict[str, Tensor]:
        arrays: dict[str, Tensor] = {}
        for account in evidence:
            for index, rows in account.streams.items():
                if len(rows.counts):
                    name = self._plan.sources[index].stream.name
                    arrays.update(_stream_arrays(name, rows, steps[0].number))
        return arrays

    def _sample_arrays(self, steps: Sequence[Step], arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        """The samples of the batches that left rows, and the strings met for the first time."""
        tables = [array for name, array in arrays.items() if name.endswith("/segments")]
        used = {number for table in tables for number in table[:, 1].tolist()}
        batches = {c.batch.number: c.batch for step in steps for c in step.captures}
        kept = [batches[number] for number in sorted(used)]
        if not kept:
            return {}
        table = torch.tensor([[batch.number, batch.size] for batch in kept])
        found = {"batches": table, "samples": torch.cat([self._ids(batch) for batch in kept])}
        new = self._samples.take_new()
        return {**found, "ids": encode_ids(new)} if new else found

    def _ids(self, batch: Batch) -> Tensor:
        if batch.ids is not None:
            return self._samples.numbers(batch.ids)
        first, self._numbered = self._numbered, self._numbered + batch.size
        return torch.arange(first, self._numbered)


def _not_finite(book: str, step: int) -> NonFiniteError:
    return NonFiniteError(
        f"the gradient of '{book}' is not finite at step {step} (NaN in the loss?). The run is "
        f"committed up to step {step - 1}; go back to a checkpoint and go on with resume=True."
    )


def _stream_arrays(name: str, rows: StreamRows, first: int) -> dict[str, Tensor]:
    offset = torch.tensor([first, 0, 0])
    return {
        f"{name}/keys": to_host(rows.keys),
        f"{name}/values": to_host(rows.values),
        f"{name}/segments": rows.segments + offset,
    }


def _step_arrays(steps: Sequence[Step], factors: Tensor) -> dict[str, Tensor]:
    arrays = {
        "hyper": torch.tensor([step.hyper for step in steps], dtype=torch.float64),
        "groups": torch.tensor([step.groups for step in steps], dtype=torch.int16),
        "states": torch.tensor([step.states for step in steps], dtype=torch.uint8),
        "factors": factors,
    }
    for book in dict.fromkeys(name for step in steps for name in step.changes):
        found = [(step.number, step.changes[book]) for step in steps if book in step.changes]
        arrays[f"{book}/changes"] = to_host(torch.stack([change for _, change in found]))
        arrays[f"{book}/change_steps"] = torch.tensor([number for number, _ in found])
    return arrays


def to_host(array: Tensor) -> Tensor:
    """The array in main memory; through pinned memory where it comes from an accelerator."""
    if not array.is_cuda:
        return array.cpu()
    host = torch.empty(array.shape, dtype=array.dtype, pin_memory=True)
    return host.copy_(array)
