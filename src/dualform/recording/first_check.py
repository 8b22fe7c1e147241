"""Before a step is made: do its rows explain the gradients, and do its samples have ids?"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dualform.optimizers import Rule
from dualform.recording.accounts import Evidence, gather_evidence, probes_of
from dualform.recording.book_states import BookStates, Event
from dualform.recording.bookkeeping import NOISY, UNEXPLAINED
from dualform.recording.factors import find_factors
from dualform.recording.meeting import Meeting
from dualform.recording.messages import RecordedStep
from dualform.recording.plan import Plan
from dualform.recording.sample_ids import SampleIds
from dualform.recording.watch import Watch


class FirstCheck:
    """Holds the rows written so far against the gradients of the step that is about to be made."""

    def __init__(
        self,
        plan: Plan,
        rule: Rule,
        states: BookStates,
        watch: Watch,
        sample_ids: SampleIds,
        meeting: Meeting,
    ) -> None:
        self._plan, self._rule, self._states = plan, rule, states
        self._watch, self._sample_ids, self._meeting = watch, sample_ids, meeting

    def number_unnamed(self) -> None:
        """Refuses samples without ids where they must have some; of several processes."""
        if self._watch.rows.unnamed and not self._sample_ids.is_numbered:
            self._sample_ids.number()

    @property
    def naming(self) -> int:
        """1 where samples have ids, 2 where they are numbered, 0 where nobody knows yet."""
        return 2 if self._sample_ids.is_numbered else int(self._sample_ids.named)

    def require_ids(self, step: RecordedStep) -> None:
        """Refuses samples without ids where they must have some, and are in the gradient."""
        if not self._sample_ids.is_numbered:
            evidence, _, _ = self._compare(step, self._probes(step))
            used = {number for account in evidence for number in account.batches(0)}
            if not used.isdisjoint(self._watch.rows.unnamed):
                self._sample_ids.number()

    def failing(self, step: RecordedStep) -> dict[str, str]:
        """Of the books that are new, those that their rows do not explain, and why.

        The others are verified from now on.
        """
        if step.probe is None:
            return {}
        probes = self._probes(step)
        if not all(bool(probe.isfinite().all()) for probe in probes.values()):
            return {}
        evidence, factors, agreed = self._compare(step, probes)
        failed, line = dict[str, str](), self._meeting.line
        for at, account in enumerate(evidence):
            if not self._rule.by_numbers:
                failed |= dict.fromkeys(account.noise(factors[:, at], line), NOISY)
            if not agreed[0, at]:
                refused = self._watch.owners.refused
                failed |= {book: refused.get(book, UNEXPLAINED) for book in account.looks}
        new = self._states.unverified.intersection(step.probe[0])
        self._states.happen(Event.VERIFIED, new - failed.keys())
        return {book: failed[book] for book in sorted(new & failed.keys())}

    def _probes(self, step: RecordedStep) -> dict[str, Tensor]:
        return probes_of([step], self._plan.parts.keys(), self._meeting.line)

    def _compare(
        self, step: RecordedStep, probes: Mapping[str, Tensor]
    ) -> tuple[list[Evidence], Tensor, Tensor]:
        """What the rows so far say about a step, before it is made."""
        pages, line = self._meeting.pages(self._watch.rows.peek()), self._meeting.line
        evidence = gather_evidence(self._plan.columns, [step], pages, probes, line)
        return find_factors(evidence, line)
