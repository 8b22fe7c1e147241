"""Scores as they are given: a `Scores`, an array, or a file of one."""

from __future__ import annotations

import os
import zipfile
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from dualform.errors import EvaluationError
from dualform.read.scores import Array, Scores

ScoresLike: TypeAlias = Scores | ArrayLike


def matrix(scores: ScoresLike) -> Array:
    """(samples, queries) in float64; a single row of numbers is one query."""
    values = scores.values if isinstance(scores, Scores) else scores
    array = np.asarray(values, dtype=np.float64)
    array = array[:, None] if array.ndim == 1 else array
    if array.ndim != 2 or not array.size:
        raise EvaluationError(
            f"scores of shape {array.shape}; expected samples × queries, with at least one of each."
        )
    if not np.isfinite(array).all():
        raise EvaluationError(
            f"{int((~np.isfinite(array)).sum()):,} of {array.size:,} scores are not finite."
        )
    return array


def by_position(scores: ScoresLike, samples: int) -> Array:
    """(samples, queries): row `i` belongs to the sample that a task knows by the position `i`.

    Scores of a run stand in the order of its ids, which must therefore be the positions.
    """
    array = matrix(scores)
    if isinstance(scores, Scores):
        if sorted(scores.ids, key=str) != sorted(range(samples), key=str):
            raise EvaluationError(
                f"these scores are of {len(scores.ids):,} samples such as {scores.ids[0]!r}, the "
                f"ground truth is of positions 0 to {samples - 1:,}; record with positions as ids, "
                "or give an array with one row a position."
            )
        return array[np.argsort(np.array(scores.ids, dtype=np.int64))]
    if len(array) != samples:
        raise EvaluationError(
            f"scores of {len(array):,} samples (shape {array.shape}), but the ground truth has "
            f"{samples:,}; scores are samples × queries."
        )
    return array


def load_scores(path: str | os.PathLike[str]) -> Scores | Array:
    """Scores from a .npy file, or from a .npz file with `values` and, if it has them, `ids`.

    >>> import tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "scores.npz")
    >>> np.savez(path, values=[[1.0], [2.0]], ids=[1, 0])
    >>> load_scores(path).ids
    [1, 0]
    """
    try:
        found: Any = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return matrix(found)
        with found:
            values = matrix(found["values"])
            if "ids" not in found:
                return values
            names = [str(query) for query in range(values.shape[1])]
            return Scores(found["ids"].tolist(), values, names)
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise EvaluationError(
            f"'{os.fspath(path)}' has no scores ({error}); expected a .npy file, samples × "
            "queries, or a .npz file with such `values` (and `ids`)."
        ) from error
