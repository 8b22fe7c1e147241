"""Ranks with ties, and what follows from them: Spearman's ρ and the rank correlation of methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group
from rich.table import Table

from dualform.errors import EvaluationError
from dualform.evaluate.scores import ScoresLike, matrix
from dualform.read.display import Displayed, framed, pandas_frame
from dualform.read.scores import Array


class Ranks:
    """The ranks of each column's entries, also when some entries count several times or not at all.

    Entries that are equal share the mean of their ranks.

    >>> ranks = Ranks(np.array([[3.0], [1.0], [1.0]]))
    >>> ranks.counting(np.array([1, 1, 1])).T
    array([[3. , 1.5, 1.5]])
    >>> ranks.counting(np.array([1, 2, 0])).T
    array([[3. , 1.5, 1.5]])
    """

    def __init__(self, columns: Array) -> None:
        self._order = np.argsort(columns, axis=0, kind="stable")
        ordered = np.take_along_axis(columns, self._order, axis=0)
        rises = np.ones(ordered.shape, dtype=bool)
        rises[1:] = ordered[1:] != ordered[:-1]
        ends = np.ones(ordered.shape, dtype=bool)
        ends[:-1] = rises[1:]
        at = np.arange(len(columns))[:, None]
        below = np.maximum.accumulate(np.where(rises, at, 0), axis=0)
        upto = np.minimum.accumulate(np.where(ends, at + 1, len(at))[::-1], axis=0)[::-1]
        self._below, self._upto = self._placed(below), self._placed(upto)
        """For each entry, how many of its column are smaller, and how many are not larger."""

    def counting(self, counts: NDArray[Any]) -> Array:
        """The ranks where the entry in row `i` counts `counts[i]` times."""
        totals = np.zeros((len(self._order) + 1, self._order.shape[1]))
        np.cumsum(counts[self._order], axis=0, out=totals[1:])
        below, upto = (np.take_along_axis(totals, a, axis=0) for a in (self._below, self._upto))
        return (below + upto + 1) / 2

    def _placed(self, ordered: NDArray[np.int64]) -> NDArray[np.int64]:
        placed = np.empty_like(ordered)
        np.put_along_axis(placed, self._order, ordered, axis=0)
        return placed


def correlation(a: Array, b: Array, counts: NDArray[Any]) -> Array:
    """(columns,): Pearson's correlation of columns of ranks; 0 where all ranks are the same."""
    share = counts[:, None] / counts.sum()
    a, b = (x - (x * share).sum(0) for x in (a, b))
    scale = np.sqrt((a * a * share).sum(0) * (b * b * share).sum(0))
    differ = scale > 1e-6  # the variance of ranks is rounding, or else more than 0.1
    found: Array = np.divide((a * b * share).sum(0), scale, out=np.zeros_like(scale), where=differ)
    return found


def spearman(a: Array, b: Array) -> Array:
    """ρ = the correlation of ranks, for each pair of columns; 0 where one column is constant.

    >>> spearman(np.array([[1.0], [2.0], [30.0]]), np.array([[0.0], [1.0], [1.0]])).round(4)
    array([0.866])
    """
    once = np.ones(len(a))
    return correlation(Ranks(a).counting(once), Ranks(b).counting(once), once)


@dataclass(frozen=True, repr=False)
class RankCorrelation(Displayed):
    """How alike methods rank the samples: the mean of ρ over the queries, methods × methods.

    >>> RankCorrelation(["a", "b"], np.array([[1.0, 0.5], [0.5, 1.0]])).matrix[0, 1]
    np.float64(0.5)
    """

    names: Sequence[str]
    matrix: Array

    def to_dict(self) -> dict[str, dict[str, float]]:
        """The matrix as plain values, for JSON."""
        return {
            name: dict(zip(self.names, map(float, row), strict=True))
            for name, row in zip(self.names, self.matrix, strict=True)
        }

    def to_pandas(self) -> Any:
        """A data frame with one row and one column a method."""
        frame = pandas_frame({name: self.matrix[:, at] for at, name in enumerate(self.names)})
        frame.index = list(self.names)
        return frame

    def __rich__(self) -> Group:
        table = Table()
        table.add_column("method")
        for name in self.names:
            table.add_column(name, justify="right")
        for name, row in zip(self.names, self.matrix, strict=True):
            table.add_row(name, *(f"{value:.3f}" for value in row))
        return framed("rank correlation of methods, mean over queries", table)


def rank_correlation(methods: Mapping[str, ScoresLike]) -> RankCorrelation:
    """The mean over queries of Spearman's ρ between the samples' scores, for each two methods.

    >>> one = np.array([[1.0, 5.0], [2.0, 4.0], [3.0, 6.0]])
    >>> rank_correlation({"one": one, "its square": one**2, "against": -one}).matrix
    array([[ 1.,  1., -1.],
           [ 1.,  1., -1.],
           [-1., -1.,  1.]])
    """
    arrays = {name: matrix(scores) for name, scores in methods.items()}
    if len({array.shape for array in arrays.values()}) != 1:
        shapes = ", ".join(f"'{name}' {array.shape}" for name, array in arrays.items())
        raise EvaluationError(
            f"rank_correlation got {shapes or 'no methods'}; give scores of the same samples × "
            "queries."
        )
    once = np.ones(len(next(iter(arrays.values()))))
    ranks = [Ranks(array).counting(once) for array in arrays.values()]
    found = [[correlation(a, b, once).mean() for b in ranks] for a in ranks]
    return RankCorrelation(list(arrays), np.array(found))
