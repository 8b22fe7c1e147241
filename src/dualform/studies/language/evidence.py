"""Which training positions count for a prompt: by all rows, and by visits that are run again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dualform.ledger.samples import SampleId
from dualform.read import Run
from dualform.read.explain import Explanation, Questions
from dualform.read.grouping import ByCell, Grouping
from dualform.read.key_rows import KeySimilarity
from dualform.read.rerun import Loss
from dualform.read.scores import Array
from dualform.read.spotlight import Reading
from dualform.read.zoom import MOST_VISITS, Zoom
from dualform.read.zoomed import ZoomedVisit


class Update(NamedTuple):
    """What one step made of one position of the training text."""

    value: float
    place: int
    step: int


@dataclass(frozen=True)
class Updates:
    """Which position of the training text each update is of, and which step made it.

    Places count the tokens of the text: a place stands for the prediction that was made there,
    when its token had been read.
    """

    places: NDArray[np.int64]
    steps: NDArray[np.int64]
    tokens: int
    """How many places the text has."""


@dataclass(frozen=True)
class PlaceEvidence:
    """What the positions of a training text contribute to some prompts, update by update.

    >>> updates = Updates(np.array([1, 2, 1]), np.array([1, 1, 2]), tokens=4)
    >>> evidence = PlaceEvidence(np.array([[0.5], [-1.0], [0.25]]), updates)
    >>> evidence.sums[:, 0].tolist(), evidence.largest(0, 2)[1]
    ([0.0, 0.75, -1.0, 0.0], Update(value=0.25, place=1, step=2))
    """

    values: Array
    """(updates, prompts)."""
    updates: Updates

    @cached_property
    def sums(self) -> Array:
        """(places, prompts): repeats of a position added up."""
        found = np.zeros((self.updates.tokens, self.values.shape[1]))
        np.add.at(found, self.updates.places, self.values)
        return found

    def largest(self, prompt: int, count: int, but: int = -1) -> list[Update]:
        """The updates that support a prompt most, other than those of one place."""
        own = np.where(self.updates.places == but, -np.inf, self.values[:, prompt])
        best = np.argsort(-own, kind="stable")[:count]
        return [
            Update(float(own[at]), int(self.updates.places[at]), int(self.updates.steps[at]))
            for at in best
            if own[at] > 0
        ]

    def only(self, prompts: Sequence[int]) -> PlaceEvidence:
        """The same for some of the prompts."""
        return PlaceEvidence(self.values[:, list(prompts)], self.updates)


@dataclass(frozen=True)
class ByUpdate(Grouping):
    """One group for each step and position that it saw.

    >>> by_update = ByUpdate(torch.tensor([3, 7]), torch.tensor([[-1, -1], [1, 0]]), length=2)
    >>> one = torch.ones(2, dtype=torch.long)
    >>> by_update.of(one, torch.tensor([7, 3]), one).tolist(), by_update.count
    ([1, 3], 4)
    """

    numbers: Tensor
    """(samples,): stored ids, sorted."""
    visits: Tensor
    """(steps + 1, samples): the number of each visit; -1 where there is none."""
    length: int
    """How many positions a sample has."""

    @property
    def count(self) -> int:
        """So many visits, times the positions."""
        return (int(self.visits.max()) + 1) * self.length

    def of(self, steps: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
        """Positions of a visit lie side by side."""
        visit = self.visits[steps, torch.searchsorted(self.numbers, samples)]
        return visit * self.length + positions


class RowEvidence:
    """Asks all rows of a run, in one scan for each question.

    Args:
        seen: the windows that each step saw, in order.
        length: how many tokens a window has.
        tokens: how many the training text has.
    """

    def __init__(self, run: Run, seen: Sequence[Tensor], length: int, tokens: int) -> None:
        self._source = run.source
        numbers = self._source.numbers
        visits = torch.full((len(seen) + 1, len(numbers)), -1)
        sizes = [0, *torch.tensor([len(ids) for ids in seen]).cumsum(0).tolist()]
        for step, ids in enumerate(seen, 1):
            known = torch.searchsorted(numbers, ids)
            visits[step, known] = sizes[step - 1] + torch.arange(len(ids))
        self._by_update = ByUpdate(numbers, visits, length)
        first = torch.cat([*seen])[:, None] * length
        places = (first + torch.arange(length)).flatten().numpy()
        steps = torch.cat([torch.full_like(ids, at) for at, ids in enumerate(seen, 1)])
        self._updates = Updates(places, steps.repeat_interleave(length).numpy(), tokens)
        self._streams = {stream.name: stream for stream in run.info.layers}

    def exact(self, reading: Reading) -> PlaceEvidence:
        """The signed contributions to what a layer says."""
        return PlaceEvidence(reading.sums(self._by_update), self._updates)

    def keys(self, reading: Reading) -> PlaceEvidence:
        """The published score of a layer, |x·q|."""
        inputs, stream = reading.queries.inputs, self._streams[reading.layer]
        similar = KeySimilarity((stream,), inputs, self._by_update, self._source.device)
        found = self._source.reader.reduce(similar, self._source.until)
        return PlaceEvidence(found.cpu().numpy(), self._updates)

    def network(self, asked: Questions) -> tuple[PlaceEvidence, dict[str, Array]]:
        """The signed contributions through all layers, and the sum of each parameter's."""
        sums = asked.sums(self._by_update)
        total = asked.total(sums, self._by_update)
        return PlaceEvidence(total, self._updates), {
            name: part.sum(0) for name, part in sums.items()
        }


WINDOWS = 10
"""In so many windows, those that support a prompt most, its strongest visits are looked for."""


@dataclass(frozen=True)
class ZoomedEvidence:
    """What a run that keeps summaries tells of some prompts, and the visits that were run again."""

    evidence: PlaceEvidence
    agreements: tuple[float, ...]
    """For each visit that was run again: the cosine of its rows with what the run has kept."""
    beyond: float
    """What the rows would add outside of the bases of summaries, relative to what they add."""

    @property
    def agreeing(self) -> float:
        """The share of visits that agree by 0.9."""
        return float(np.mean([one >= 0.9 for one in self.agreements]))


def zoomed_evidence(
    explanation: Explanation,
    run: Run,
    model: nn.Module,
    loss: Loss,
    visits: int,
    length: int,
    tokens: int,
) -> ZoomedEvidence:
    """The rows of the visits that support prompts most, through all layers.

    Args:
        visits: how many for each prompt.
    """
    chosen = sorted(
        {
            (step, window)
            for values in _by_visit(explanation, run)
            for window, step in sorted(values, key=lambda pair: -values[pair])[:visits]
        }
    )
    zoomed: list[ZoomedVisit] = []
    for begin in range(0, len(chosen), MOST_VISITS):
        steps: dict[SampleId, list[int]] = {}
        for step, window in chosen[begin : begin + MOST_VISITS]:
            steps.setdefault(window, []).append(step)
        zoomed += run.zoom([*steps], model, loss, steps).visits
    found = Zoom(zoomed, run.source).contributions(explanation)
    rows: dict[tuple[int, int], Array] = {}
    for place, value in zip(found.places, found.values, strict=True):
        key = (int(place.id) * length + place.position, place.step)
        rows[key] = rows.get(key, np.zeros(len(value))) + value
    at, when = np.array([*rows]).T
    sizes = [float(np.abs(part).sum()) for part in (found.beyond, found.values)]
    return ZoomedEvidence(
        PlaceEvidence(np.array([*rows.values()]), Updates(at, when, tokens)),
        tuple(visit.agreement.cosine for visit in zoomed),
        sizes[0] / max(sizes[1], 1e-30),
    )


def _by_visit(explanation: Explanation, run: Run) -> list[dict[tuple[int, int], float]]:
    """For each prompt what the visits of its strongest windows contribute: by window and step."""
    numbers, steps = run.source.numbers, run.steps + 1
    strongest = [np.argsort(-column)[:WINDOWS].tolist() for column in explanation.values.T]
    all_of_them = sorted({window for windows in strongest for window in windows})
    lines = torch.full((len(numbers),), -1)
    lines[all_of_them] = torch.arange(len(all_of_them))
    cells = ByCell(numbers, lines, torch.arange(steps), bins=steps)
    sums = explanation.sums(cells)[:-1].reshape(len(all_of_them), steps, -1)
    return [
        {
            (int(run.source.ids[window]), step): float(sums[lines[window], step, query])
            for window in windows
            for step in np.flatnonzero(sums[lines[window], :, query]).tolist()
        }
        for query, windows in enumerate(strongest)
    ]
