"""LDS, the linear datamodeling score: do the scores foretell what models without samples give?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table

from dualform.errors import EvaluationError
from dualform.evaluate.ranks import Ranks, correlation
from dualform.evaluate.scores import ScoresLike, by_position
from dualform.evaluate.truth import GroundTruth
from dualform.read.display import Displayed, framed, matplotlib_axes
from dualform.read.scores import Array


@dataclass(frozen=True, repr=False)
class LDS(Displayed):
    """ρ between foretold and measured outputs of the subsets, for each query, and their mean.

    >>> LDS(np.array([0.4, 0.6]), (0.3, 0.7), ceiling=0.8, subsets=50).mean
    0.5
    """

    per_query: Array
    interval: tuple[float, float]
    """Of the mean, at least 95 %: see `lds`."""
    ceiling: float
    """What a perfect prediction would get: see `GroundTruth.ceiling`."""
    subsets: int

    @property
    def mean(self) -> float:
        """The mean over the queries."""
        return float(self.per_query.mean())

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "mean": self.mean,
            "interval": list(self.interval),
            "ceiling": self.ceiling,
            "queries": len(self.per_query),
            "subsets": self.subsets,
            "per_query": self.per_query.tolist(),
        }

    def plot(self, axes: Any = None) -> Any:
        """How the queries' scores are spread, with the mean and the ceiling."""
        axes = matplotlib_axes(axes)
        axes.hist(self.per_query, bins=np.linspace(-1, 1, 41))
        axes.axvline(self.mean, color="black", label=f"mean {self.mean:.3f}")
        if np.isfinite(self.ceiling):
            axes.axvline(self.ceiling, color="black", ls=":", label=f"ceiling {self.ceiling:.3f}")
        axes.set_xlabel("LDS")
        axes.set_ylabel("queries")
        axes.legend()
        return axes

    def __rich__(self) -> Group:
        table = Table()
        names = ("mean", "95 %", "ceiling", "lowest", "median", "highest", "queries", "subsets")
        for name in names:
            table.add_column(name, justify="right")
        low, high = self.interval
        spread = np.quantile(self.per_query, [0.0, 0.5, 1.0])
        cells = [f"{self.mean:.3f}", f"{low:.3f} to {high:.3f}", f"{self.ceiling:.3f}"]
        cells += [f"{value:.3f}" for value in spread]
        table.add_row(*cells, f"{len(self.per_query):,}", f"{self.subsets:,}")
        return framed("LDS: ρ between foretold and measured outputs", table)


def lds(scores: ScoresLike, truth: GroundTruth, resamples: int = 1000, seed: int = 0) -> LDS:
    """ρ over subsets between `Σ_{i in subset} scores_i` and the subset's output, for each query.

    The interval comes from drawing subsets and queries again with replacement, both at once,
    `resamples` times. Repeated subsets make ρ smaller, as fewer subsets do: so the spread of those
    means is mirrored at the mean itself (the basic bootstrap), which corrects for it. Drawing both
    ways counts some chance twice; the interval is rather too wide than too narrow.

    >>> members = np.random.default_rng(0).random((40, 10)) < 0.5
    >>> scores = np.arange(10.0)
    >>> truth = GroundTruth(members, (members @ scores)[:, None, None] ** 3)
    >>> lds(scores, truth).mean, lds(-scores, truth).mean
    (1.0, -1.0)
    """
    values = by_position(scores, truth.members.shape[1])
    subsets, queries = truth.outputs.shape
    if values.shape[1] != queries:
        raise EvaluationError(
            f"scores for {values.shape[1]} queries, but the ground truth has {queries}; give one "
            "column for each, in the same order."
        )
    if subsets < 3:
        raise EvaluationError(f"a ground truth of {subsets} subsets; a rank correlation needs 3.")
    foretold, measured = Ranks(truth.members @ values), Ranks(truth.outputs)

    def rho(counts: Array) -> Array:
        return correlation(foretold.counting(counts), measured.counting(counts), counts)

    chance = np.random.default_rng(seed)
    means = [
        rho(_drawn(chance, subsets)) @ _drawn(chance, queries) / queries for _ in range(resamples)
    ]
    per_query = rho(np.ones(subsets))
    return LDS(per_query, _mirrored(per_query.mean(), means), truth.ceiling, subsets)


def _mirrored(mean: float, resampled: Sequence[float]) -> tuple[float, float]:
    """The middle 95 % of what was resampled, mirrored at the mean; the mean belongs to it."""
    low, high = 2 * mean - np.quantile(resampled, [0.975, 0.025])
    return float(np.clip(low, -1, mean)), float(np.clip(high, mean, 1))


def _drawn(chance: np.random.Generator, count: int) -> Array:
    """How often each of `count` things comes up in as many draws."""
    return np.bincount(chance.integers(count, size=count), minlength=count).astype(np.float64)
