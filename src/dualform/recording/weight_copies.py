"""Copies of weights: of books that are kept by step, and of the others since the last hand-over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.recording.changes import ChangePlace, StepChanges
from dualform.recording.excerpts import Excerpts, differing
from dualform.recording.meeting import PATIENCE
from dualform.recording.messages import WeightSpan
from dualform.recording.plan import Plan
from dualform.recording.processes import Line
from dualform.recording.shards import changes_of, is_sharded, local

MOST_JOINED = 1 << 16
"""Larger parameters are copied by themselves."""


@dataclass(frozen=True)
class CopiedTogether:
    """Books whose elements are copied end to end, or one that is large."""

    names: tuple[str, ...]
    parameters: list[Tensor]
    shapes: list[torch.Size]
    kind: tuple[torch.device, torch.dtype]
    flat: list[Tensor]
    """All elements of each, in the parameter's own memory; none where they are looked up anew."""
    pointers: list[int]
    """Where that is."""

    @classmethod
    def of(cls, names: Sequence[str], parameters: Mapping[str, Tensor]) -> CopiedTogether:
        """Parameters of which each process has a part are looked up anew, and large ones.

        What is in the place of a large one should not be kept from being freed.
        """
        own = [parameters[name] for name in names]
        parts = [local(p).detach() for p in own]
        lasting = len(names) > 1 and not any(map(is_sharded, own))
        flat = [part.reshape(-1) for part in parts] if lasting else []
        kind = (parts[0].device, parts[0].dtype)
        pointers = [part.data_ptr() for part in flat]
        return cls(tuple(names), own, [part.shape for part in parts], kind, flat, pointers)

    @property
    def is_current(self) -> bool:
        """Whether the parameters are where they were, or at least what they were."""
        if self.flat:
            return [parameter.data_ptr() for parameter in self.parameters] == self.pointers
        parts = [local(parameter) for parameter in self.parameters]
        return all(
            part.shape == shape and (part.device, part.dtype) == self.kind
            for part, shape in zip(parts, self.shapes, strict=True)
        )

    def now(self) -> Tensor:
        """All elements as they are now."""
        return torch.cat(self.flat or [local(p).detach().reshape(-1) for p in self.parameters])

    def cut(self, joined: Tensor) -> dict[str, Tensor]:
        """The parts of a vector in which books lie end to end, each in the shape of its book."""
        parts = torch.split(joined, [shape.numel() for shape in self.shapes])
        return {
            name: part if part.shape == shape else part.view(shape)
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }


class StepCopies:
    """The parameters that are kept by step, as they were when they were last looked at."""

    def __init__(self, plan: Plan) -> None:
        self._parameters = plan.parameters
        self._last: dict[str, Tensor] = {}
        """What was copied of each book; later copies may be among those that lie together."""
        self._joined: dict[tuple[str, ...], tuple[CopiedTogether, Tensor]] = {}
        """Books that were last looked at together, and all their elements then."""
        self._looked: tuple[str, ...] = ()
        """All of these books, as long as they lie where they did."""
        self._places: dict[str, ChangePlace] = {}
        """Where changes have each of them, in one order in all processes; it is never changed."""

    def hold(self, book: str) -> None:
        """Copies a book that has not been looked at yet."""
        if book not in self._last:
            self._last[book] = local(self._parameters[book]).detach().clone()

    def begin_at(self, values: Mapping[str, Tensor]) -> None:
        """Counts changes from these values, where nothing was counted before."""
        self._last = {**values, **self._last}

    def changes(self, books: Iterable[str]) -> StepChanges:
        """How these books have changed since they were last looked at.

        So what happened between two steps is not lost. Books that are not held are left out. Small
        ones of a type are looked at together: on a GPU a call costs more than its arithmetic.
        """
        asked = tuple([name for name in books if name in self._last])
        if asked != self._looked or not all(own.is_current for own, _ in self._joined.values()):
            self._join(asked)
        changed = []
        for names, (own, before) in self._joined.items():
            now = own.now()
            changed.append(now - before)
            self._joined[names] = own, now
        return StepChanges(self._places, tuple(changed))

    def _join(self, books: tuple[str, ...]) -> None:
        """Sorts books by what is looked at together."""
        groups: dict[object, list[str]] = {}
        for name in books:
            p = local(self._parameters[name])
            alone = p.numel() > MOST_JOINED
            groups.setdefault(name if alone else (p.device, p.dtype), []).append(name)
        listed = [CopiedTogether.of(names, self._parameters) for names in groups.values()]
        together = {own.names: own for own in listed}
        self._looked, places = books, {}
        for vector, own in enumerate(listed):
            start = 0
            for name, shape in zip(own.names, own.shapes, strict=True):
                places[name] = ChangePlace(vector, start, shape)
                start += shape.numel()
        self._places = dict(sorted(places.items()))
        if self._joined.keys() == together.keys():
            self._joined = {names: (together[names], self._joined[names][1]) for names in together}
            return
        for own, values in self._joined.values():
            self._last |= own.cut(values)
        last = {
            names: torch.cat([self._last[name].reshape(-1) for name in names]) for names in together
        }
        self._joined = {names: (own, last[names]) for names, own in together.items()}

    def late_changes(self, line: Line) -> dict[str, Tensor]:
        """The changes of all books that have changed; in some process, where each has a part."""
        found = self.changes(list(self._last))
        flags = [change.any() for change in found.values()]
        moved = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []
        moved = line.any(moved, PATIENCE)
        return {name: found[name] for name, is_moved in zip(found, moved, strict=True) if is_moved}


class SpanCopies:
    """The parameters that are not kept by step, as they were at the last hand-over."""

    def __init__(self, plan: Plan, excerpts: Excerpts) -> None:
        self._parameters, self._excerpts = plan.parameters, excerpts
        self.start: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        """How often torch had changed each parameter then."""
        self.excerpt = excerpts.take()
        """Of all parameters, then."""

    def take(self, by_step: frozenset[str], trained: Iterable[str]) -> WeightSpan:
        """The parameters as they were at the last call, and as they are now.

        What has certainly not changed is not copied again.
        """
        before, excerpt = self.start, self._excerpts.take()
        moved = differing([self.excerpt], [excerpt])
        versions = {name: changes_of(p) for name, p in self._parameters.items()}
        still = {
            name
            for name in before.keys() - moved.keys() - set(trained)
            if versions[name] == self._versions[name]
        }
        self.excerpt, self._versions = excerpt, versions
        names = [name for name in self._parameters if name not in by_step]
        now = {name: before[name] for name in still}
        for name in {*names, *before} - still:
            now[name] = local(self._parameters[name]).detach().clone()
        self.start = {name: now[name] for name in names}
        return WeightSpan(before, now)
