"""What experiments have shown so far of whose rows are whose, and when the next one is due."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dualform.layers import Site
from dualform.owners.batch import Batch
from dualform.owners.patterns import MIXES, Finding, Pattern
from dualform.owners.trial import Sighting, Trial, has_samples

PASSES = 32
"""So many passes are experiments at the most while there are layers that none has seen."""
TRIALS = 8
"""So many experiments must agree where the data could decide the order of rows."""
MOST_DIMENSIONS = 6
"""Rows have fewer dimensions before them."""

UNCLEAR = "some of its rows could not be given to a sample: they do not depend on any"
CHANGED = "the order of its rows changed from one forward pass to another"
UNSEEN = "no experiment has seen it on {} rows of {} samples; give the model its batch as tensors"


@dataclass
class Known:
    """What is known of the order of a site's rows."""

    site: Site
    patterns: dict[int, Pattern] = field(default_factory=dict)
    """By the number of dimensions before a row."""
    agreed: int = TRIALS
    """How many experiments found the same; one is enough where the data moves nothing."""
    followed: bool = False
    """Whether every pass must be an experiment."""


class Owners:
    """Knows to which samples the rows of each layer belong, as far as experiments have shown it."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], usual: int) -> None:
        self._parameters, self._usual = parameters, usual
        self.refused: dict[str, str] = {}
        """Books whose rows cannot be given to samples, and why."""
        self._known: dict[int, Known] = {}
        self._seen: set[str] = set()
        self._doubted: list[Known] = []
        """Those whose rows the data may order, so that further passes must be experiments."""
        self._passes, self._next = 0, 1
        self._trained, self._until = sum(p.requires_grad for p in parameters.values()), PASSES
        """How many parameters are trained, and up to which pass they are looked for."""
        self._draw = random.Random(0)

    def begin(
        self, batch: Batch, inputs: Sequence[Tensor], dropped: frozenset[str]
    ) -> Trial | None:
        """Makes the forward pass that now begins an experiment, where one is due."""
        if batch.size < 2:
            return None
        self._passes += 1
        if not self._is_due(dropped):
            return None
        chosen = [x for x in inputs if has_samples(x, batch.size)]
        if not chosen or int(batch.sample_of().max()) == 0:
            return None
        trained = {name for name, p in self._parameters.items() if p.requires_grad}
        return Trial(batch, chosen, self._usual, self._passes, frozenset(trained) - dropped)

    def _is_due(self, dropped: frozenset[str]) -> bool:
        trained = [name for name, p in self._parameters.items() if p.requires_grad]
        if dropped.issuperset(trained):  # nobody asks whose rows are whose
            return False
        if self._passes >= self._next:  # ever more seldom, and at no fixed times
            self._next += self._draw.randint(7 * self._next, 15 * self._next)
            return True
        if len(trained) != self._trained:  # layers were thawed, or frozen
            self._trained, self._until = len(trained), self._passes + PASSES
            return True
        if self._passes <= self._until:
            known = self._seen | dropped | self.refused.keys()
            if not known.issuperset(trained):
                return True
        return any(
            order.followed or order.agreed < TRIALS
            for order in self._doubted
            if not dropped.issuperset(order.site.terms)
        )

    def learn(self, sightings: Sequence[Sighting]) -> None:
        """Takes over what an experiment has found."""
        found: dict[int, list[Sighting]] = {}
        for sighting in sightings:
            site, finding = sighting.site, sighting.finding
            if finding.known:
                found.setdefault(id(site), []).append(sighting)
            elif finding.reason == MIXES:
                self.refuse(site, MIXES)
            elif finding.reason and id(site) not in self._known:  # else it only told nothing new
                self.refuse(site, finding.reason)
        for calls in found.values():
            self._seen |= calls[0].site.terms.keys()
            self._compare(calls)
        known = self._known.values()
        self._doubted = [order for order in known if order.followed or order.agreed < TRIALS]

    def _compare(self, calls: Sequence[Sighting]) -> None:
        """Holds what was found of all calls at a site against what earlier experiments found."""
        site = calls[0].site
        patterns = {(len(call.lead), call.finding.pattern) for call in calls}
        regular = len(dict(patterns)) == len(patterns) and None not in dict(patterns).values()
        order = self._known.get(id(site))
        if order is None:
            moves = any(call.moves for call in calls)
            order = self._known[id(site)] = Known(site, agreed=0 if moves else TRIALS)
            order.followed = not regular
        elif not order.followed:
            known = order.patterns
            if not regular or any(known.get(ndim, p) != p for ndim, p in patterns):
                order.followed = True
                if order.agreed >= TRIALS:  # passes since the last experiment went by a pattern
                    self.refuse(site, CHANGED)
        order.patterns |= {ndim: pattern for ndim, pattern in patterns if pattern is not None}
        order.agreed += 1

    def refuse(self, site: Site, reason: str) -> None:
        """The site's books have rows that cannot be given to samples."""
        for book in site.terms:
            self.refused.setdefault(book, reason)

    def of(
        self, site: Site, lead: Sequence[int], batch: Batch, seen: Sighting | None
    ) -> int | Tensor | str:
        """Whose the rows of a call are: how many neighbors share a sample, or each row's own.

        Or else the reason why that is not known.
        """
        for book in site.terms:
            if book in self.refused:
                return self.refused[book]
        if batch.size == 1:
            return math.prod(lead)
        found = Finding() if seen is None else seen.finding
        if found.owners is not None:
            return found.owners
        pattern = found.pattern or self._pattern(site, len(lead))
        stretch = None if pattern is None else pattern.stretch(lead, batch.size)
        if stretch is None and not batch.sample_of().any():
            return torch.zeros(math.prod(lead), dtype=torch.long, device="cpu")  # one for all
        shape = "×".join(map(str, lead)) or "1"
        unseen = found.reason or UNSEEN.format(shape, batch.size)
        return unseen if stretch is None else stretch

    def arranged(self, site: Site) -> dict[int, Pattern] | str | None:
        """The patterns of a site's rows, by the dimensions before a row.

        The reason where every pass must be an experiment; None while more of them are due.
        """
        own = self._known.get(id(site))
        if own is not None and own.followed:
            return CHANGED
        if own is not None and own.agreed < TRIALS:
            return None
        found = {ndim: self._pattern(site, ndim) for ndim in range(MOST_DIMENSIONS)}
        return {ndim: pattern for ndim, pattern in found.items() if pattern is not None}

    def _pattern(self, site: Site, ndim: int) -> Pattern | None:
        """The site's own pattern, or that which all other uses of the same books share."""
        own = self._known.get(id(site))
        if own is not None and (own.followed or ndim in own.patterns):
            return None if own.followed else own.patterns[ndim]
        others = [o for o in self._known.values() if o.site.terms.keys() == site.terms.keys()]
        found = {o.patterns.get(ndim) for o in others if not o.followed}
        return found.pop() if len(found) == 1 else None
