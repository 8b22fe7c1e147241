"""Steps of training: what each left behind, and what was kept of its gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dualform.errors import NonFiniteError
from dualform.recording.glance import Glance
from dualform.recording.probe import Look
from dualform.recording.tally import in_double


@dataclass(slots=True)
class Step:
    """Everything one optimizer step left behind."""

    number: int
    hyper: list[tuple[float, ...]]
    groups: list[int]
    states: list[int]
    looks: dict[str, Look]
    """How each book kept by row was probed; a book's stays the same throughout a parcel."""
    notes: list[dict[str, Any]] = field(default_factory=list)
    probe: tuple[tuple[str, ...], Tensor] | None = None
    """The books that the step touches by row, and what was kept of their gradients, end to end."""
    changes: dict[str, Tensor] = field(default_factory=dict)
    before: Glance = ()
    after: Glance = ()
    edited: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """What a spot check found: for each reason and book, whether the book must go by step."""

    @property
    def nbytes(self) -> int:
        """Bytes of the observed changes, and of what was kept of gradients."""
        kept = 0 if self.probe is None else self.probe[1].nbytes
        return kept + sum([change.nbytes for change in self.changes.values()])


def looks_of(steps: Sequence[Step]) -> dict[str, Look]:
    """How each book was probed."""
    return {name: look for step in steps for name, look in step.looks.items()}


def probes_of(steps: Sequence[Step]) -> dict[str, Tensor]:
    """(steps, numbers) for each book, in main memory; zero where a step did not touch it."""
    looks = looks_of(steps)
    probes = {
        name: torch.zeros(len(steps), look.numbers, dtype=torch.float64)
        for name, look in looks.items()
    }
    for names in dict.fromkeys(step.probe[0] for step in steps if step.probe is not None):
        taken = [p[1] if (p := step.probe) and p[0] == names else None for step in steps]
        where = torch.tensor([kept is not None for kept in taken])
        kept = torch.stack([kept for kept in taken if kept is not None])
        parts = torch.split(kept, [looks[name].kept for name in names], 1)
        found = [looks[name].probes(part) for name, part in zip(names, parts, strict=True)]
        for name, probe in zip(names, in_double(found), strict=True):
            probes[name][where] = probe
    return probes


def finite_steps(
    steps: Sequence[Step], probes: Mapping[str, Tensor]
) -> tuple[Sequence[Step], NonFiniteError | None]:
    """The steps up to the first whose gradient, or observed change, is not finite."""
    error = None
    for book, numbers, finite in _signals(steps, probes):
        if not finite.all():
            bad = numbers[int(torch.nonzero(~finite)[0])]
            if error is None or bad < error.step:
                error = NonFiniteError.at(book, bad)
    return [step for step in steps if error is None or step.number < error.step], error


def _signals(
    steps: Sequence[Step], probes: Mapping[str, Tensor]
) -> Iterator[tuple[str, list[int], Tensor]]:
    """Whether each book is finite at some steps: its probes, and its observed changes."""
    numbers = [step.number for step in steps]
    for book, probe in probes.items():
        yield book, numbers, probe.isfinite().all(1)
    for book in dict.fromkeys(name for step in steps for name in step.changes):
        changed = [step for step in steps if book in step.changes]
        sums = torch.stack([step.changes[book].sum() for step in changed])
        yield book, [step.number for step in changed], sums.isfinite()
