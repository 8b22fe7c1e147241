"""Before a step is made: do its rows explain the gradients, and whose are they?"""

from __future__ import annotations

from torch import Tensor

from dualform.optimizers import Rule, StateRule
from dualform.recording.books import Books
from dualform.recording.naming import Naming
from dualform.recording.probe import Evidence
from dualform.recording.settle import NOISY, UNEXPLAINED, Settler
from dualform.recording.steps import Step, probes_of
from dualform.recording.tally import settle_factors
from dualform.recording.watch import Watch


class Verifier:
    """Holds the rows written so far against the gradients of the step that is about to be made."""

    def __init__(
        self, books: Books, watch: Watch, settler: Settler, rule: Rule, naming: Naming
    ) -> None:
        self._books, self._watch, self._settler, self._rule = books, watch, settler, rule
        self._naming = naming

    def hold_to_names(self, step: Step) -> None:
        """Refuses samples without ids where they must have some, and are in the gradient."""
        if not self._naming.is_numbered:
            evidence, _, _ = self._settled(step)
            used = {number for account in evidence for number in account.batches(0)}
            if not used.isdisjoint(self._watch.unnamed):
                self._naming.number()

    def failing(self, step: Step) -> dict[str, str]:
        """Of the books that are new, those that their rows do not explain, and why."""
        if step.probe is None or not bool(step.probe[1].isfinite().all()):
            return {}
        evidence, factors, agreed = self._settled(step)
        failed: dict[str, str] = {}
        for at, account in enumerate(evidence):
            if isinstance(self._rule, StateRule):
                failed |= dict.fromkeys(account.noise(factors[:, at]), NOISY)
            if not agreed[0, at]:
                failed |= {
                    book: self._watch.owners.refused.get(book, UNEXPLAINED)
                    for book in account.looks
                }
        seen = set(step.probe[0])
        new = seen & self._books.unverified
        self._books.unverified -= seen
        return {book: reason for book, reason in failed.items() if book in new}

    def _settled(self, step: Step) -> tuple[list[Evidence], Tensor, Tensor]:
        """What the rows so far say about a step, before it is made."""
        return settle_factors(self._settler.evidence([step], self._watch.peek(), probes_of([step])))
