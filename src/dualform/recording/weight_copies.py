"""Copies of weights: of books that are kept by step, and of the others since the last hand-over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from dualform.private import version_of
from dualform.recording.excerpts import Excerpts, differing
from dualform.recording.messages import WeightSpan
from dualform.recording.plan import Plan


class StepCopies:
    """The parameters that are kept by step, as they were when they were last looked at."""

    def __init__(self, plan: Plan) -> None:
        self._parameters = plan.parameters
        self._last: dict[str, Tensor] = {}

    def hold(self, book: str) -> None:
        """Copies a book that has not been looked at yet."""
        if book not in self._last:
            self._last[book] = self._parameters[book].detach().clone()

    def begin_at(self, values: Mapping[str, Tensor]) -> None:
        """Counts changes from these values, where nothing was counted before."""
        self._last = {**values, **self._last}

    def changes(self, books: Iterable[str]) -> dict[str, Tensor]:
        """How these books have changed since they were last looked at.

        So what happened between two steps is not lost. Books that are not held are left out.
        """
        changed = {}
        for name in books:
            if name in self._last:
                now = self._parameters[name].detach().clone()
                changed[name], self._last[name] = now - self._last[name], now
        return changed

    def late_changes(self) -> dict[str, Tensor]:
        """The changes of all books that have changed."""
        found = self.changes(list(self._last))
        return {name: change for name, change in found.items() if bool(change.any())}


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
        versions = {name: version_of(p) for name, p in self._parameters.items()}
        still = {
            name
            for name in before.keys() - moved.keys() - set(trained)
            if versions[name] == self._versions[name]
        }
        self.excerpt, self._versions = excerpt, versions
        names = [name for name in self._parameters if name not in by_step]
        now = {name: before[name] for name in still}
        for name in {*names, *before} - still:
            now[name] = self._parameters[name].detach().clone()
        self.start = {name: now[name] for name in names}
        return WeightSpan(before, now)
