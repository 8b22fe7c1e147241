"""Patterns: how rows are arranged by sample, found from which rows changed with which samples."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIXES = "its rows mix samples: some depend on several samples at once"
NOBODY = "its rows belong to no sample: what the layer is given does not depend on the batch"


GOLDEN = (5**0.5 - 1) / 2


def spread(size: int, count: int) -> Tensor:
    """Some of so many places, all over them, and in step with nothing that repeats there.

    >>> spread(3, 128).tolist(), spread(100, 4).tolist()
    ([0, 1, 2], [0, 61, 23, 85])
    """
    if size <= count:
        return torch.arange(size)
    return (torch.arange(count, dtype=torch.float64) * GOLDEN % 1 * size).long()


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
    table = torch.zeros(worlds, samples, dtype=torch.bool, device="cpu")
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
