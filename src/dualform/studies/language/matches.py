"""Do the training positions that count have what a prompt has: its context, what it foretells?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.read.scores import Array
from dualform.studies.language.evidence import PlaceEvidence
from dualform.studies.language.prompts import Prompts

FIRST = 10
"""So many positions of each prompt are looked at."""


@dataclass(frozen=True)
class TrainingPlaces:
    """The places of a training text that a model was trained at, and what prompts find there."""

    tokens: Tensor
    """The training text; a place is followed by the next token."""
    count: int
    """The model was trained at so many of them, the first."""
    prompts: Prompts

    def same_next(self, prompt: int) -> NDArray[np.bool_]:
        """(places,): whether a place is followed by what is foretold."""
        following = self.tokens[1 : self.count + 1].numpy()
        found: NDArray[np.bool_] = following == int(self.prompts.foretold[prompt])
        return found

    def shared(self, prompt: int) -> NDArray[np.int64]:
        """(places,): how many tokens up to a place are the last tokens of a prompt.

        >>> x, none = torch.tensor([[9, 2, 3]]), torch.tensor([-1])
        >>> prompts = Prompts(x, torch.tensor([1]), torch.tensor([1]), none)
        >>> TrainingPlaces(torch.tensor([1, 2, 3, 3, 1]), 4, prompts).shared(0).tolist()
        [0, 0, 2, 1]
        """
        x, tokens = self.prompts.x[prompt], self.tokens[: self.count]
        found, alive = torch.zeros(self.count, dtype=torch.long), torch.ones(self.count).bool()
        for back in range(len(x)):
            same = torch.zeros_like(alive)
            same[back:] = tokens[: self.count - back] == x[-1 - back]
            alive &= same
            if not alive.any():
                break
            found += alive
        return found.numpy()

    def others(self, prompt: int) -> NDArray[np.bool_]:
        """(places,): all but the one where a training prompt ends."""
        found: NDArray[np.bool_] = np.arange(self.count) != int(self.prompts.places[prompt])
        return found

    def chance(self, prompt: int) -> dict[str, float]:
        """What places have on average that are drawn at random."""
        others, same, shared = self.others(prompt), self.same_next(prompt), self.shared(prompt)
        alike = shared[others & same]
        return {
            "same next": float(same[others].mean()),
            "shared": float(shared[others].mean()),
            "shared, same next": float(alike.mean()) if len(alike) else 0.0,
        }

    def first(self, sums: Array, prompt: int) -> list[int]:
        """The places that support a prompt most, the largest first; not the prompt itself."""
        values = np.where(self.others(prompt), sums[: self.count], -np.inf)
        best = np.argsort(-values, kind="stable")[:FIRST]
        return [int(at) for at in best if values[at] > 0]

    def found(self, places: Sequence[int], prompt: int) -> dict[str, float]:
        """What some places have on average.

        >>> prompts = Prompts(torch.tensor([[2, 3]]), *torch.tensor([[1], [1], [-1]]))
        >>> TrainingPlaces(torch.tensor([2, 3, 1, 3, 1]), 4, prompts).found([1, 3, 2, 0], 0)
        {'same next': 0.5, 'shared': 0.75}
        """
        at = np.array(places, dtype=int)
        return {
            "same next": float(self.same_next(prompt)[at].mean()) if len(at) else 0.0,
            "shared": float(self.shared(prompt)[at].mean()) if len(at) else 0.0,
        }


def measured(
    evidence: PlaceEvidence, places: TrainingPlaces, prompts: Sequence[int]
) -> dict[str, Any]:
    """What the first places of some prompts have, on average over the prompts."""
    summed = [
        places.found(places.first(evidence.sums[:, prompt], prompt), prompt) for prompt in prompts
    ]
    single = []
    for prompt in prompts:
        own = int(places.prompts.places[prompt])
        best = evidence.largest(prompt, FIRST, but=own)
        found = places.found([one.place for one in best], prompt)
        found["distinct"] = float(len({one.place for one in best}))
        found["step"] = float(np.mean([one.step for one in best])) if best else 0.0
        single.append(found)
    return {"summed": mean_of(summed), "single": mean_of(single)}


def itself(
    evidence: PlaceEvidence, places: TrainingPlaces, prompts: Sequence[int]
) -> dict[str, float]:
    """How often training prompts find their own place first, or among the first ones."""
    ranks = []
    for prompt in prompts:
        sums = evidence.sums[: places.count, prompt]
        ranks.append(int((sums > sums[int(places.prompts.places[prompt])]).sum()) + 1)
    return {
        "of": len(ranks),
        "first": float(np.mean([rank == 1 for rank in ranks])) if ranks else 0.0,
        "among the first": float(np.mean([rank <= FIRST for rank in ranks])) if ranks else 0.0,
    }


def overlap(
    kinds: tuple[PlaceEvidence, PlaceEvidence], places: TrainingPlaces, prompts: Sequence[int]
) -> float:
    """Which share of the first places two kinds of evidence have in common, on average."""
    both = [
        set.intersection(*({*places.first(one.sums[:, at], at)} for one in kinds)) for at in prompts
    ]
    return float(np.mean([len(found) / FIRST for found in both]))


def mean_of(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The means of numbers that go by the same names.

    >>> mean_of([{"a": 1.0}, {"a": 2.0}])
    {'a': 1.5}
    """
    return {name: float(np.mean([one[name] for one in found])) for name in found[0]}
