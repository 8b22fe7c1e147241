"""Whose row is it? An experiment decides which sample each row of a layer belongs to.

A shape does not say it: 48 rows of 6 samples may be 8 tokens of each, or 8 times all of them. So
the first forward passes are experiments (`twins.py`): in each world half of the samples have
another sample's input, and no two samples have it in the same worlds. A row belongs to a sample if
it differs in that sample's worlds and in no others; it mixes samples if it differs in more.

What is found is a *pattern*, such as "the second dimension counts samples", and serves all further
passes; random later ones are experiments too, and must find the same. Where the data decides the
order of rows (routing, sorting, packing), every pass is an experiment, and each row is given to its
sample by itself.

Some rows depend on no sample, such as a class token that is handed to each of them. For those the
shape proposes a pattern. Worlds of their own change the rows that this pattern gives to half of the
samples; it is right if then only rows of these samples change in the layers behind.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dualform.record.layers import Rows, Seen, Site, Use
from dualform.record.tape import Batch
from dualform.record.twins import Twins, other, outside, room_for, shares_memory

PASSES = 32
"""So many passes are experiments at the most while there are layers that none has seen."""
TRIALS = 8
"""So many experiments must agree where the data could decide the order of rows."""
PROPOSALS = 8
"""For so many layers whose rows depend on no sample, an experiment tries what shapes propose."""

MIXES = "its rows mix samples: some depend on several samples at once"
NOBODY = "its rows belong to no sample: what the layer is given does not depend on the batch"
UNCLEAR = "some of its rows could not be given to a sample: they do not depend on any"
CHANGED = "the order of its rows changed from one forward pass to another"
UNSEEN = "no experiment has seen the layer used on {} rows of {} samples"


@dataclass(frozen=True)
class Pattern:
    """Which of the dimensions before a row counts samples.

    >>> Pattern(2, 1).stretch((7, 6), 6)  # (time, batch): neighbors belong to different samples
    1
    >>> Pattern(1, 0, "samples first").stretch((12,), 6)  # two neighbors to each sample
    2
    """

    ndim: int
    dim: int
    folded: str | int = ""
    """How positions are folded into the dimension: not at all, behind each sample ("samples
    first"), or so many behind each sample and others around them."""

    def stretch(self, lead: Sequence[int], samples: int) -> int | None:
        """How many neighboring rows belong to one sample; None where the pattern does not fit."""
        if len(lead) != self.ndim:
            return None
        size, behind = lead[self.dim], math.prod(lead[self.dim + 1 :])
        if self.folded == "":
            return behind if size == samples else None
        inner = size // samples if isinstance(self.folded, str) else self.folded
        return behind * inner if inner and size % (samples * inner) == 0 else None


def patterns(lead: Sequence[int], samples: int) -> Iterator[Pattern]:
    """All patterns that a shape admits, the most usual ones first.

    >>> [p.folded for p in patterns((12,), 3)]
    ['samples first', 1, 2]
    """
    ndim = len(lead)
    yield from (Pattern(ndim, dim) for dim, size in enumerate(lead) if size == samples)
    for dim, size in enumerate(lead):
        places = size // samples
        if places > 1 and size % samples == 0:
            yield Pattern(ndim, dim, "samples first")
            yield from (Pattern(ndim, dim, n) for n in range(1, places) if places % n == 0)


def codes(samples: int, draw: random.Random) -> Tensor:
    """(worlds, samples): in which worlds each sample is exchanged.

    Every sample in half of them, no two in the same: so what depends on two differs in more.

    >>> codes(6, random.Random(0)).int().sum(0)
    tensor([2, 2, 2, 2, 2, 2])
    """
    worlds = next(n for n in itertools.count(2) if math.comb(n, n // 2) >= samples)
    words = list(itertools.combinations(range(worlds), worlds // 2))
    table = torch.zeros(worlds, samples, dtype=torch.bool)
    for sample, word in enumerate(draw.sample(words, samples)):
        table[list(word), sample] = True
    return table


@dataclass(frozen=True)
class Finding:
    """What an experiment says of a call's rows: their pattern, the owner of each, or neither."""

    pattern: Pattern | None = None
    owners: Tensor | None = None
    """(rows,): samples; -1 where that is open."""
    reason: str = ""
    """Why they cannot be told apart."""

    @property
    def known(self) -> bool:
        """Whether it says anything of whose the rows are."""
        return self.pattern is not None or self.owners is not None


def judge(lead: Sequence[int], changed: Tensor, members: Tensor, sample_of: Tensor) -> Finding:
    """Finds the pattern in which rows changed, or else the owner of each row.

    Args:
        changed: (worlds, rows): which rows differ.
        members: (worlds, samples): which samples were exchanged.
        sample_of: the sample at each place of the batch; a sample may have several.
    """
    if not changed.any():
        return Finding(reason=NOBODY)
    best, most = None, -1.0
    for pattern in patterns(lead, len(sample_of)):
        owned = members[:, owners_by(pattern, lead, sample_of)]
        if not (changed & ~owned).any():
            share = float(changed.sum() / owned.sum())  # the right one explains most changes
            best, most = (pattern, share) if share > most else (best, most)
    return _one_by_one(changed, members) if best is None else Finding(best)


def owners_by(pattern: Pattern, lead: Sequence[int], sample_of: Tensor) -> Tensor:
    """(rows,): the sample of each row, by a pattern that fits.

    >>> owners_by(Pattern(2, 1), (2, 3), torch.arange(3))
    tensor([0, 1, 2, 0, 1, 2])
    """
    stretch = pattern.stretch(lead, len(sample_of))
    assert stretch is not None
    return sample_of[torch.arange(math.prod(lead)) // stretch % len(sample_of)]


def _one_by_one(changed: Tensor, members: Tensor) -> Finding:
    bits = 2 ** torch.arange(len(members))[:, None]
    words, known = (changed * bits).sum(0), (members * bits).sum(0)
    equal = words[:, None] == known
    owners = torch.where(equal.any(1), equal.int().argmax(1), -1)
    weight = members.sum(0).max()
    if bool(((owners < 0) & (changed.sum(0) >= weight)).any()):
        return Finding(reason=MIXES)
    return Finding(owners=owners)


@dataclass
class Sighting:
    """The rows of one call, as an experiment saw them."""

    site: Site
    lead: tuple[int, ...]
    changed: Tensor
    """(worlds, rows)."""
    moves: bool
    finding: Finding = field(default_factory=Finding)


@dataclass(frozen=True)
class Proposal:
    """A pattern that a shape proposes for rows that depend on no sample, and its two worlds."""

    sighting: Sighting
    pattern: Pattern
    worlds: slice
    half: Tensor
    """(2, samples): whose rows were changed in each."""


class Trial:
    """One experiment: a forward pass, from the model's inputs to the findings for its calls."""

    def __init__(self, batch: Batch, inputs: Sequence[Tensor], usual: int, seed: int) -> None:
        self._draw = random.Random(seed)
        self.sample_of = batch.sample_of()
        self._samples, self._places = int(self.sample_of.max()) + 1, len(self.sample_of)
        self._members = codes(self._samples, self._draw)
        self._axes = _axes(inputs, self._places, usual)
        self._main = len(self._members)
        worlds = self._main * len(self._axes) + 2 * PROPOSALS
        self.twins = Twins(worlds, room_for(inputs[0]))
        self._proposals: list[Proposal] = []
        self._sightings: list[Sighting] = []
        self._uses: list[tuple[Seen, list[Sighting]]] = []
        for at, axis in enumerate(self._axes):
            self._exchange(inputs, axis, at * self._main)

    def _exchange(self, inputs: Sequence[Tensor], axis: int, first: int) -> None:
        """Gives some samples the input of another, in each world."""
        chosen = [(x, at) for x in inputs if (at := _sample_dim(x, self._places, axis)) is not None]
        for world, members in enumerate(self._members):
            shift = self._draw.randrange(1, self._places)
            twins = []
            for x, dim in chosen:
                mask = members[self.sample_of].to(x.device)
                shape = [-1 if at == dim else 1 for at in range(x.ndim)]
                twins.append(
                    torch.where(mask.view(shape), other(x.detach(), dim, shift), x.detach())
                )
            self.twins.change([x for x, _ in chosen], first + world, twins)

    def observe(self, use: Seen) -> list[Sighting]:
        """Looks at the rows of a call that has just been made.

        Its own outputs stand in for the errors, which will come back in the same places.
        """
        with torch.no_grad():
            all_rows = list(use.rows(list(use.outputs)))
        with outside():
            found = [self._sight(rows) for rows in all_rows]
            if isinstance(use, Use) and len(found) == 1 and not found[0].changed.any():
                self._propose(use, found[0])
        self._uses.append((use, found))
        return found

    def _sight(self, rows: Rows) -> Sighting:
        keys, values, site = rows.keys, rows.values, rows.site
        lead = tuple(keys.shape[: keys.ndim - site.key_dims])
        changed = self.twins.differing(keys, site.key_dims)
        if values is not None:
            changed |= self.twins.differing(values, site.value_dims)
        changed = changed.reshape(len(changed), math.prod(lead)).cpu()
        return Sighting(site, lead, changed, self.twins.moves(keys))

    def _propose(self, use: Use, sighting: Sighting) -> None:
        """Changes rows that depend on no sample as if they belonged to half of the samples."""
        output = use.output
        if output is None or not output.is_floating_point():
            return
        for pattern in itertools.islice(patterns(sighting.lead, self._places), 2):
            if len(self._proposals) == PROPOSALS:
                return
            first = self._main * len(self._axes) + 2 * len(self._proposals)
            picked = torch.zeros(self._samples, dtype=torch.bool)
            picked[self._draw.sample(range(self._samples), max(1, self._samples // 2))] = True
            half = torch.stack([picked, ~picked])
            owners = owners_by(pattern, sighting.lead, self.sample_of)
            for world in range(2):
                mask = _mask_of(use, half[world][owners].reshape(sighting.lead))
                changed = torch.where(mask, output.detach() * 1.5 + 1, output.detach())
                self.twins.change([output], first + world, [changed])
            self._proposals.append(Proposal(sighting, pattern, slice(first, first + 2), half))

    def close(self) -> list[Sighting]:
        """Judges everything that was seen; the worlds are let go."""
        self.twins.clear()
        self._sightings = [
            sighting
            for use, found in self._uses
            for sighting in found
            if not (isinstance(use, Use) and use.superseded)
        ]
        self._uses = []
        for sighting in self._sightings:
            sighting.finding = self._judge(sighting, self._axis())
        for proposal in self._proposals:
            if self._holds(proposal):
                self._accept(proposal)
        return self._sightings

    def _axis(self) -> int:
        """The reading of the input under which the fewest calls mix samples."""
        mixing = [
            sum([self._judge(s, at).reason == MIXES for s in self._sightings])
            for at in range(len(self._axes))
        ]
        return mixing.index(min(mixing))

    def _judge(self, sighting: Sighting, axis: int) -> Finding:
        worlds = slice(axis * self._main, (axis + 1) * self._main)
        alive = torch.tensor(self.twins.alive[worlds])
        if not alive.any() or not math.prod(sighting.lead):
            return Finding()
        changed = sighting.changed[worlds]
        found = judge(sighting.lead, changed[alive], self._members[alive], self.sample_of)
        return found if alive.all() or found.owners is None else Finding()

    def _holds(self, proposal: Proposal) -> bool:
        """Whether only rows of the samples changed whose rows were changed, and some did."""
        seen = torch.zeros(2, dtype=torch.bool)
        for sighting in self._sightings:
            if (pattern := sighting.finding.pattern) is not None:
                owners = owners_by(pattern, sighting.lead, self.sample_of)
                changed = sighting.changed[proposal.worlds]
                if bool((changed & ~proposal.half[:, owners]).any()):
                    return False
                seen |= changed.any(1)
        return bool(seen.all())

    def _accept(self, proposal: Proposal) -> None:
        """Takes the pattern, also for rows behind it that depend on no other sample."""
        if proposal.sighting.finding.reason == NOBODY:
            proposal.sighting.finding = Finding(proposal.pattern)
        for sighting in self._sightings:
            if sighting.finding.reason == NOBODY:
                changed = sighting.changed[proposal.worlds]
                found = judge(sighting.lead, changed, proposal.half, self.sample_of)
                if found.pattern is not None:
                    sighting.finding = found


def _axes(inputs: Sequence[Tensor], places: int, usual: int) -> list[int]:
    """The dimensions of the inputs that may count samples; both where that is open."""
    both = any(x.ndim > 1 and x.shape[0] == x.shape[1] == places for x in inputs)
    return [usual, 1 - usual] if both else [usual]


def _sample_dim(x: Tensor, places: int, axis: int) -> int | None:
    """Where an input counts samples; masks say how inputs are arranged, and are left alone."""
    dims = [at for at in (axis, 1 - axis) if at < x.ndim and x.shape[at] == places]
    return None if not dims or x.dtype == torch.bool or shares_memory(x) else dims[0]


def _mask_of(use: Use, rows: Tensor) -> Tensor:
    """Which elements of a call's output make up some of its rows."""
    output = use.output
    assert output is not None
    error = torch.zeros_like(output, requires_grad=True)
    with torch.enable_grad():
        values = error if use.value is None else use.value(error)
        wide = rows.to(values.device).reshape(*rows.shape, *[1] * (values.ndim - rows.ndim))
        (mask,) = torch.autograd.grad((values * wide).sum(), error)
    return mask != 0


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
        self._passes, self._next = 0, 1
        self._draw = random.Random(0)

    def begin(self, batch: Batch, inputs: Sequence[Tensor], dropped: set[str]) -> Trial | None:
        """Makes the forward pass that now begins an experiment, where one is due."""
        fitting = [x for x in inputs if _sample_dim(x, batch.size, self._usual) is not None]
        if batch.size < 2 or not fitting or int(batch.sample_of().max()) == 0:
            return None
        self._passes += 1
        return Trial(batch, fitting, self._usual, self._passes) if self._is_due(dropped) else None

    def _is_due(self, dropped: set[str]) -> bool:
        if self._passes >= self._next:  # ever more seldom, and at no fixed times
            self._next += self._draw.randint(7 * self._next, 15 * self._next)
            return True
        trained = {name for name, p in self._parameters.items() if p.requires_grad}
        unseen = trained - self._seen - dropped - self.refused.keys()
        orders = [o for o in self._known.values() if not dropped.issuperset(o.site.terms)]
        doubted = any(order.followed or order.agreed < TRIALS for order in orders)
        return doubted or bool(unseen and self._passes <= PASSES)

    def learn(self, sightings: Sequence[Sighting]) -> None:
        """Takes over what an experiment has found."""
        found: dict[int, list[Sighting]] = {}
        for sighting in sightings:
            if sighting.finding.reason:
                self.refuse(sighting.site, sighting.finding.reason)
            elif sighting.finding.known:
                found.setdefault(id(sighting.site), []).append(sighting)
        for calls in found.values():
            self._seen |= calls[0].site.terms.keys()
            self._compare(calls)

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
        shape = "×".join(map(str, lead)) or "1"
        return UNSEEN.format(shape, batch.size) if stretch is None else stretch

    def _pattern(self, site: Site, ndim: int) -> Pattern | None:
        """The site's own pattern, or that which all other uses of the same books share."""
        own = self._known.get(id(site))
        if own is not None and (own.followed or ndim in own.patterns):
            return None if own.followed else own.patterns[ndim]
        others = [o for o in self._known.values() if o.site.terms.keys() == site.terms.keys()]
        found = {o.patterns.get(ndim) for o in others if not o.followed}
        return found.pop() if len(found) == 1 else None
