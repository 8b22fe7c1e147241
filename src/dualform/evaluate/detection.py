"""Finding mislabeled samples: how many of them are among those looked at first."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group
from rich.table import Table

from dualform.errors import EvaluationError
from dualform.evaluate.ranks import Ranks
from dualform.evaluate.scores import ScoresLike, matrix
from dualform.read.display import Displayed, framed, matplotlib_axes
from dualform.read.scores import Array, Scores

CHECKED = (0.01, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)


@dataclass(frozen=True, repr=False)
class Detection(Displayed):
    """How well a suspicion finds the flipped samples, if the most suspicious are looked at first.

    >>> detection = Detection(np.array([3.0, 2.0, 1.0]), np.array([True, False, False]))
    >>> detection.auc, detection.found(1 / 3)
    (1.0, 1.0)
    """

    suspicion: Array
    """(samples,): the larger, the earlier it is looked at."""
    flipped: NDArray[np.bool_]

    @property
    def auc(self) -> float:
        """The chance that a flipped sample is more suspicious than another; ties count half."""
        bad, all_of_them = int(self.flipped.sum()), len(self.flipped)
        ranks = Ranks(self.suspicion[:, None]).counting(np.ones(all_of_them))[:, 0]
        wins = ranks[self.flipped].sum() - bad * (bad + 1) / 2
        return float(wins / (bad * (all_of_them - bad)))

    @property
    def curve(self) -> tuple[Array, Array]:
        """(1 + samples,) each: the share looked at, and the share of the flipped found by then."""
        order = np.argsort(-self.suspicion, kind="stable")
        found = np.concatenate([[0], np.cumsum(self.flipped[order])]) / self.flipped.sum()
        return np.linspace(0, 1, len(found)), found

    def found(self, checked: float) -> float:
        """The share of the flipped that is found when this share of all is looked at."""
        return float(np.interp(checked, *self.curve))

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values, for JSON."""
        found = {f"{checked:g}": self.found(checked) for checked in CHECKED}
        counts = {"samples": len(self.flipped), "flipped": int(self.flipped.sum())}
        return {"auc": self.auc, **counts, "found": found}

    def plot(self, axes: Any = None) -> Any:
        """The share found against the share looked at; chance is the diagonal."""
        axes = matplotlib_axes(axes)
        axes.plot(*self.curve, label=f"AUC {self.auc:.4f}")
        axes.plot([0, 1], [0, 1], color="gray", ls=":", label="by chance")
        axes.set_xlabel("share of samples looked at")
        axes.set_ylabel("share of flipped found")
        axes.legend()
        return axes

    def __rich__(self) -> Group:
        table = Table()
        table.add_column("looked at")
        for checked in CHECKED:
            table.add_column(f"{checked:.0%}", justify="right")
        table.add_row("found", *(f"{self.found(checked):.1%}" for checked in CHECKED))
        bad, samples = int(self.flipped.sum()), len(self.flipped)
        return framed(f"{bad:,} flipped of {samples:,}: AUC {self.auc:.4f}", table)


def mislabeled(suspicion: ScoresLike, flipped: Collection[Any] | NDArray[Any]) -> Detection:
    """Holds a suspicion against the samples whose labels are known to be wrong.

    >>> mislabeled([0.9, 0.1, 0.8, 0.3], [True, False, False, True]).auc
    0.75
    >>> scores = Scores(["cat", "dog"], np.array([[0.1], [0.7]]), ["suspicion"])
    >>> mislabeled(scores, ["dog"]).auc
    1.0

    Args:
        suspicion: one number a sample; the larger, the more suspicious.
        flipped: True or False for each sample; or, for `Scores`, the ids of the flipped ones.
    """
    values = matrix(suspicion)
    if values.shape[1] != 1:
        raise EvaluationError(
            f"a suspicion of shape {values.shape}; expected one number a sample (of scores between "
            "all samples, that would be the diagonal)."
        )
    mask = _mask(suspicion, flipped, len(values))
    if mask.all() or not mask.any():
        raise EvaluationError(
            f"{int(mask.sum()):,} of {len(mask):,} samples are flipped; detection needs both kinds."
        )
    return Detection(values[:, 0], mask)


def _mask(suspicion: ScoresLike, flipped: Collection[Any], samples: int) -> NDArray[np.bool_]:
    given = np.asarray(flipped) if not isinstance(flipped, set | frozenset) else np.array([0])
    if given.dtype == bool and given.shape == (samples,):
        return given
    if not isinstance(suspicion, Scores) or given.dtype == bool:
        raise EvaluationError(
            f"flipped has {len(flipped):,} entries for {samples:,} samples; give True or False for "
            "each, or Scores and the ids of the flipped."
        )
    wanted = set(flipped if isinstance(flipped, set | frozenset) else given.tolist())
    unknown = wanted - set(suspicion.ids)
    if unknown:
        raise EvaluationError(
            f"flipped id {min(unknown, key=str)!r} is not among the {samples:,} scores' ids, such "
            f"as {suspicion.ids[0]!r}."
        )
    return np.array([name in wanted for name in suspicion.ids])
