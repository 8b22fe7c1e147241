"""An experiment: a forward pass in which samples are exchanged, to see which rows change."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dualform.layers import Rows, Seen, Site, Use
from dualform.owners.batch import Batch
from dualform.owners.calls import other
from dualform.owners.patterns import (
    MIXES,
    NOBODY,
    Finding,
    Pattern,
    codes,
    judge,
    owners_by,
    patterns,
)
from dualform.owners.twins import Twins, outside, shares_memory
from dualform.owners.world_memory import LEAST, room_for

LOST = "an experiment could not follow its rows, since an operation failed with other inputs: {}"
TOO_LARGE = (
    "an experiment could not follow its rows: tensors before or behind it are too large to be "
    "computed several times; give the model a smaller batch in the first step"
)
PROPOSALS = 8
"""For so many layers whose rows depend on no sample, an experiment tries what shapes propose."""


@dataclass
class Sighting:
    """The rows of one call, as an experiment saw them."""

    site: Site
    lead: tuple[int, ...]
    changed: Tensor
    """(worlds, rows)."""
    lost: Tensor
    """(worlds,): where nobody knows which rows changed."""
    moves: bool
    finding: Finding = field(default_factory=Finding)

    @property
    def unmoved(self) -> bool:
        """Whether no row changed in any world, as far as that is known everywhere."""
        return not (self.changed.any() or self.lost.any())


@dataclass(frozen=True, eq=False)
class Proposal:
    """A pattern that a shape proposes for rows that depend on no sample, and its two worlds."""

    sighting: Sighting
    pattern: Pattern
    worlds: slice
    half: Tensor
    """(2, samples): whose rows were changed in each."""


class Trial:
    """One experiment: a forward pass, from the model's inputs to the findings for its calls."""

    def __init__(
        self,
        batch: Batch,
        inputs: Sequence[Tensor],
        usual: int,
        seed: int,
        wanted: frozenset[str] | None = None,
    ) -> None:
        self._draw = random.Random(seed)
        self._unseen = wanted
        """Books that no call has used yet; None where that is not known."""
        self.sample_of = batch.sample_of()
        self._samples, self._places = int(self.sample_of.max()) + 1, len(self.sample_of)
        self._members = codes(self._samples, self._draw)
        self._axes = _axes(inputs, self._places, usual)
        self._main = len(self._members)
        self._sure = LEAST * len(self._axes)
        """So many worlds are the last to lose what they hold; next come those of proposals."""
        worlds = self._main * len(self._axes) + 2 * PROPOSALS
        self.twins = Twins(worlds, room_for(inputs[0]), self._sure + 2 * PROPOSALS)
        self._proposals: list[Proposal] = []
        self._proposed = 0
        self._sightings: list[Sighting] = []
        self._uses: list[tuple[Seen, list[Sighting]]] = []
        with outside():
            for at, axis in enumerate(self._axes):
                self._exchange(inputs, axis, self._worlds_of(at))

    @classmethod
    def of(cls, samples: int, inputs: Sequence[Tensor], usual: int) -> Trial | None:
        """An experiment with a batch that nobody trains on; None where it has nothing to tell."""
        chosen = [x for x in inputs if has_samples(x, samples)]
        return cls(Batch(0, None, 0, samples), chosen, usual, 0) if samples > 1 and chosen else None

    def _worlds_of(self, at: int) -> list[int]:
        """The worlds of one reading of the input; those of both alternate."""
        places = range(at, self._main * len(self._axes), len(self._axes))
        return [world if world < self._sure else world + 2 * PROPOSALS for world in places]

    def _exchange(self, inputs: Sequence[Tensor], axis: int, worlds: Sequence[int]) -> None:
        """Gives some samples the input of another, in each world."""
        for world, members in zip(worlds, self._members, strict=True):
            shift, twins = self._draw.randrange(1, self._places), []
            for x in inputs:
                dim = sample_dim(x, self._places, axis)
                shape = [-1 if at == dim else 1 for at in range(x.ndim)]
                mask = members[self.sample_of].to(x.device).view(shape)
                twins.append(torch.where(mask, other(x.detach(), dim, shift), x.detach()))
            self.twins.change(inputs, world, twins)

    def observe(self, use: Seen) -> list[Sighting]:
        """Looks at the rows of a call that has just been made: at their keys, as a rule.

        Where those say nothing, its outputs stand in for the errors that will come back there.
        """
        outputs, found = use.outputs, self._sight(use, None)
        if not all(sighting.changed.any() for sighting in found):
            found = self._sight(use, list(use.outputs))
            if isinstance(use, Use) and len(found) == 1 and found[0].unmoved:
                with outside():
                    self._propose(use, found[0])
        self._uses.append((use, found))
        if self._proposals and len(self._axes) == 1:
            with outside():
                self._refute(found)
        self._end_early(found, outputs)
        return found

    def _end_early(self, found: Sequence[Sighting], outputs: Sequence[Tensor]) -> None:
        """Lets the worlds go where all books were seen, and nobody can follow what comes next.

        So they take no memory while a loss is computed of what was too large for them.
        """
        if self._unseen is not None:
            self._unseen = self._unseen.difference(*[sighting.site.terms for sighting in found])
            if not self._unseen and all(self.twins.is_lost(output) for output in outputs):
                self.twins.clear()

    def _sight(self, use: Seen, errors: Sequence[Tensor] | None) -> list[Sighting]:
        with torch.no_grad():
            all_rows = list(use.rows(errors))
        with outside():
            return [self._sighting(rows) for rows in all_rows]

    def _sighting(self, rows: Rows) -> Sighting:
        keys, values, site = rows.keys, rows.values, rows.site
        lead = tuple(keys.shape[: keys.ndim - site.key_dims])
        changed, lost = self.twins.differing(keys, site.key_dims), self.twins.lost(keys)
        if values is not None:
            lost = lost if changed.any() else self.twins.lost(values)  # keys come first
            changed |= self.twins.differing(values, site.value_dims)
        changed = changed.reshape(len(changed), math.prod(lead)).cpu()
        return Sighting(site, lead, changed, lost, self.twins.moves(keys))

    def _propose(self, use: Use, sighting: Sighting) -> None:
        """Changes rows that depend on no sample as if they belonged to half of the samples."""
        (output,) = use.outputs
        if not output.is_floating_point():
            return
        for pattern in itertools.islice(patterns(sighting.lead, self._places), 2):
            if self._proposed == PROPOSALS:
                return
            first = self._sure + 2 * self._proposed
            self._proposed += 1
            picked = torch.zeros(self._samples, dtype=torch.bool)
            picked[self._draw.sample(range(self._samples), max(1, self._samples // 2))] = True
            half = torch.stack([picked, ~picked])
            owners = owners_by(pattern, sighting.lead, self.sample_of)
            for world in range(2):
                mask = _mask_of(use, half[world][owners].reshape(sighting.lead))
                changed = torch.where(mask, output.detach() * 1.5 + 1, output.detach())
                self.twins.change([output], first + world, [changed])
            self._proposals.append(Proposal(sighting, pattern, slice(first, first + 2), half))

    def _refute(self, found: Sequence[Sighting]) -> None:
        """Gives up the worlds of proposals that these rows contradict: nothing would save them."""
        for sighting in found:
            pattern = self._judge(sighting, 0).pattern
            wrong = [p for p in self._proposals if self._contradicts(sighting, pattern, p)]
            for proposal in wrong:
                self.twins.give_up(range(len(self.twins.alive))[proposal.worlds])
            self._proposals = [p for p in self._proposals if p not in wrong]

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
        with outside():
            self._judge_all()
        return self._sightings

    def _judge_all(self) -> None:
        readings = [
            [self._judge(sighting, at) for sighting in self._sightings]
            for at in range(len(self._axes))
        ]
        mixing = [sum([found.reason == MIXES for found in findings]) for findings in readings]
        findings = readings[mixing.index(min(mixing))]  # the reading that mixes samples least
        for sighting, finding in zip(self._sightings, findings, strict=True):
            sighting.finding = finding
        for proposal in self._proposals:
            if self._holds(proposal):
                self._accept(proposal)
        self._excuse()

    def _excuse(self) -> None:
        """Says where rows may depend on no sample only because worlds could not be followed."""
        doubtful = [proposal.sighting for proposal in self._proposals if self._is_lost(proposal)]
        for sighting in self._sightings:
            if sighting.finding.reason == NOBODY:
                if self.twins.failed:
                    sighting.finding = Finding(reason=LOST.format(self.twins.failed))
                elif any(sighting is one for one in doubtful):
                    sighting.finding = Finding(reason=TOO_LARGE)

    def _judge(self, sighting: Sighting, axis: int) -> Finding:
        worlds = self._worlds_of(axis)
        changed, lost = sighting.changed[worlds], sighting.lost[worlds]
        told = torch.tensor(self.twins.alive)[worlds] & ~lost
        if not math.prod(sighting.lead):
            return Finding()
        untold = Finding(reason=TOO_LARGE if lost.any() else "")
        if told.sum() < LEAST:
            return untold
        found = judge(sighting.lead, changed[told], self._members[told], self.sample_of)
        return found if told.all() or found.owners is None else untold

    def _holds(self, proposal: Proposal) -> bool:
        """Whether only rows of the samples changed whose rows were changed, and some did."""
        seen = torch.zeros(2, dtype=torch.bool)
        if self._is_lost(proposal):
            return False  # what was lost might have told otherwise
        for sighting in self._sightings:
            if (pattern := sighting.finding.pattern) is not None:
                if self._contradicts(sighting, pattern, proposal):
                    return False
                seen |= sighting.changed[proposal.worlds].any(1)
        return bool(seen.all())

    def _is_lost(self, proposal: Proposal) -> bool:
        """Whether a world of the proposal lost the rows of some layer."""
        return any(bool(sighting.lost[proposal.worlds].any()) for sighting in self._sightings)

    def _contradicts(self, sighting: Sighting, pattern: Pattern | None, proposal: Proposal) -> bool:
        """Whether rows of other samples changed than those whose rows were changed."""
        if pattern is None:
            return False
        owners = owners_by(pattern, sighting.lead, self.sample_of)
        changed = sighting.changed[proposal.worlds]
        return bool((changed & ~proposal.half[:, owners]).any())

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


def has_samples(x: Tensor, places: int) -> bool:
    """Whether an input can be exchanged by sample; masks only say how others are arranged.

    >>> has_samples(torch.zeros(3, 2), 3), has_samples(torch.zeros(3, 2), 5)
    (True, False)
    """
    return places in x.shape[:2] and x.dtype != torch.bool and not shares_memory(x)


def sample_dim(x: Tensor, places: int, axis: int) -> int:
    """The dimension of an input that counts samples; `axis` where both do."""
    first = min(axis, x.ndim - 1)
    return first if x.shape[first] == places else 1 - first


def _mask_of(use: Use, rows: Tensor) -> Tensor:
    """Which elements of a call's output make up some of its rows."""
    error = torch.zeros_like(use.outputs[0], requires_grad=True)
    with torch.enable_grad():
        values = error if use.value is None else use.value(error)
        wide = rows.to(values.device).reshape(*rows.shape, *[1] * (values.ndim - rows.ndim))
        (mask,) = torch.autograd.grad((values * wide).sum(), error)
    return mask != 0
