"""Copies of weights: of books that are kept by step, and of the others since the last hand-over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from dualform.recording.excerpts import Excerpts, differing
from dualform.recording.meeting import PATIENCE
from dualform.recording.messages import WeightSpan
from dualform.recording.plan import Plan
from dualform.recording.processes import Line
from dualform.recording.shards import changes_of, local

MOST_JOINED = 1 << 16
"""Larger parameters are copied by themselves."""


class StepCopies:
    """The parameters that are kept by step, as they were when they were last looked at."""

    def __init__(self, plan: Plan) -> None:
        self._parameters = plan.parameters
        self._last: dict[str, Tensor] = {}
        """What was copied of each book; later copies may be among those that lie together."""
        self._joined: dict[tuple[str, ...], Tensor] = {}
        """Books that were last looked at together, and all their elements then, end to end."""

    def hold(self, book: str) -> None:
        """Copies a book that has not been looked at yet."""
        if book not in self._last:
            self._last[book] = local(self._parameters[book]).detach().clone()

    def begin_at(self, values: Mapping[str, Tensor]) -> None:
        """Counts changes from these values, where nothing was counted before."""
        self._last = {**values, **self._last}

    def changes(self, books: Iterable[str]) -> dict[str, Tensor]:
        """How these books have changed since they were last looked at.

        So what happened between two steps is not lost. Books that are not held are left out. Small
        ones of a type are looked at together: on a GPU a call costs more than its arithmetic.
        """
        groups: dict[object, list[str]] = {}
        for name in books:
            if name in self._last:
                p = local(self._parameters[name])
                alone = p.numel() > MOST_JOINED
                groups.setdefault(name if alone else (p.device, p.dtype), []).append(name)
        together = [tuple(names) for names in groups.values()]
        if self._joined.keys() != set(together):
            for names, values in self._joined.items():
                self._last |= self._cut(names, values)
            self._joined = {
                names: torch.cat([self._last[name].reshape(-1) for name in names])
                for names in together
            }
        changed: dict[str, Tensor] = {}
        for names in together:
            now = torch.cat([local(self._parameters[name]).detach().reshape(-1) for name in names])
            changed |= self._cut(names, now - self._joined[names])
            self._joined[names] = now
        return dict(sorted(changed.items()))  # in one order in all processes

    def _cut(self, names: Sequence[str], joined: Tensor) -> dict[str, Tensor]:
        """The parts of a vector in which books lie end to end, each in the shape of its book."""
        shapes = [local(self._parameters[name]).shape for name in names]
        parts = torch.split(joined, [shape.numel() for shape in shapes])
        return {n: t.view(shape) for n, t, shape in zip(names, parts, shapes, strict=True)}

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
