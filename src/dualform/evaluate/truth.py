"""Ground truth: what models give that were trained without some of the samples."""

from __future__ import annotations

import itertools
import os
import zipfile
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group
from rich.table import Table

from dualform.errors import EvaluationError
from dualform.evaluate.ranks import spearman
from dualform.read.display import Displayed, framed
from dualform.read.scores import Array


@dataclass(frozen=True, repr=False)
class GroundTruth(Displayed):
    """Outputs of models trained on subsets: for each subset its members, and each seed's outputs.

    >>> members = np.array([[True, False], [False, True]])
    >>> truth = GroundTruth(members, runs=np.array([[[1.0], [3.0]], [[0.0], [0.0]]]))
    >>> truth.outputs.tolist()
    [[2.0], [0.0]]
    """

    members: NDArray[np.bool_]
    """(subsets, samples)."""
    runs: Array
    """(subsets, seeds, queries)."""

    def __post_init__(self) -> None:
        if self.members.ndim != 2 or self.runs.ndim != 3 or len(self.members) != len(self.runs):
            raise EvaluationError(
                f"members of shape {self.members.shape} and runs of shape {self.runs.shape}; "
                "expected (subsets, samples) and (subsets, seeds, queries)."
            )

    @property
    def outputs(self) -> Array:
        """(subsets, queries): the mean over seeds."""
        mean: Array = self.runs.mean(axis=1)
        return mean

    @property
    def ceiling(self) -> float:
        """The LDS that a perfect prediction of the mean over all seeds would get.

        The outputs are means over S seeds, and so noisy. Each seed's ranking of the subsets is
        compared with each other's. If r is the correlation of two seeds, the mean of S has the
        reliability `S r / (1 + (S − 1) r)` (Spearman and Brown), and its root is what a perfect
        prediction correlates with it. `ρ = 6/π asin(r/2)`, as for normal distributions, leads from
        ranks to r and back. NaN with a single seed, which cannot be compared.
        """
        seeds = self.runs.shape[1]
        pairs = itertools.combinations(range(seeds), 2)
        found = [spearman(self.runs[:, a], self.runs[:, b]) for a, b in pairs]
        if not found:
            return float("nan")
        r = 2 * np.sin(np.pi / 6 * max(float(np.mean(found)), 0.0))
        perfect = np.sqrt(seeds * r / (1 + (seeds - 1) * r))
        return float(6 / np.pi * np.arcsin(perfect / 2))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes everything into one .npz file."""
        with open(path, "wb") as file:
            np.savez(file, members=self.members, runs=self.runs)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> GroundTruth:
        """What `save` has written."""
        try:
            with np.load(path, allow_pickle=False) as found:
                return cls(found["members"].astype(bool), found["runs"].astype(np.float64))
        except (ValueError, KeyError, AttributeError, zipfile.BadZipFile) as error:
            raise EvaluationError(
                f"'{os.fspath(path)}' is no ground truth ({error}); expected a file that "
                "GroundTruth.save wrote."
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """How much there is, and the ceiling, as plain values, for JSON."""
        (subsets, seeds, queries), samples = self.runs.shape, self.members.shape[1]
        sizes = {"subsets": subsets, "seeds": seeds, "queries": queries, "samples": samples}
        return {**sizes, "members": float(self.members.mean()), "ceiling": self.ceiling}

    def __rich__(self) -> Group:
        table = Table(show_header=False)
        for name, value in self.to_dict().items():
            table.add_row(name, f"{value:.3f}" if isinstance(value, float) else f"{value:,}")
        return framed("ground truth by retraining", table)
