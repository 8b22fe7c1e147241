"""A ridge probe: what a linear map can tell of a label from vectors that it was not fitted to.

The labels are written as 0 and 1, one column a class, and fitted by ridge regression, in closed
form. A vector's class is that of the largest column.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from rich.console import Group
from torch import Tensor

from dualform.errors import AttentionError
from dualform.read.display import Displayed, columns, framed
from dualform.read.ridge import exact_ridge

Z_97_5 = 1.959964
"""Half the width of a 95 % interval, in standard deviations of a normal distribution."""


@dataclass(frozen=True, repr=False)
class Probe(Displayed):
    """What a fitted probe told of vectors that it had not seen; `predict` tells of others.

    >>> found = ridge_probe(torch.eye(2).repeat(20, 1), torch.arange(2).repeat(20))
    >>> found.accuracy, found.chance, found.predict(torch.tensor([[0.1, 0.9]])).item()
    (1.0, 0.45, 1)
    """

    accuracy: float
    """The share of held-out vectors whose label it told."""
    interval: tuple[float, float]
    """95 %, by Wilson's formula; held-out groups count as one draw each."""
    chance: float
    """The share that is told by always saying the label that most fitted vectors have."""
    rows: int
    """How many vectors were held out."""
    classes: tuple[int, ...]
    """The labels."""
    by_class: tuple[float, ...]
    """Of each label, the share of its held-out vectors that was told; NaN where there are none."""
    mean: Tensor
    """Of the vectors that it was fitted to."""
    weights: Tensor
    """(features, classes), for vectors from which the mean is taken."""
    intercept: Tensor
    """(classes)."""

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """The labels of vectors (rows, features)."""
        columns_ = (x.to(self.mean) - self.mean) @ self.weights + self.intercept
        return torch.tensor(self.classes, device=x.device)[columns_.argmax(-1).to(x.device)]

    @property
    def finding(self) -> str:
        """The result in one sentence."""
        low, high = self.interval
        told = f"{self.accuracy:.1%} of {self.rows:,} held-out labels ({low:.1%} to {high:.1%})"
        if low <= self.chance <= high:
            return f"The probe tells {told}, which is no better than chance, {self.chance:.1%}."
        word = "more" if self.accuracy > self.chance else "less"
        return f"The probe tells {told}, {word} than chance, {self.chance:.1%}."

    def __rich__(self) -> Group:
        table = columns(("label", "told"), {"label"})
        for label, share in zip(self.classes, self.by_class, strict=True):
            table.add_row(str(label), "–" if math.isnan(share) else f"{share:.1%}")
        return framed("ridge probe", table, self.finding)


@torch.no_grad()
def ridge_probe(
    x: Tensor,
    labels: Tensor,
    groups: Tensor | None = None,
    *,
    damping: float = 1.0,
    held_out: float = 0.5,
    seed: int = 0,
) -> Probe:
    """Fits a probe to some of the vectors, (rows, features), and tests it on the others.

    Args:
        labels: (rows), whole numbers.
        groups: (rows), numbers of what rows were taken from, such as their sample. All rows of a
            group are held out, or none: rows of one sample are alike.
        damping: λ of the ridge, as a multiple of the mean squared length of a vector. Features are
            divided by their standard deviation before.
        held_out: the share of groups that are held out, chosen by `seed`.

    >>> _ = torch.manual_seed(0)
    >>> labels = torch.arange(400) % 4
    >>> codes = torch.eye(4)[labels] + 0.3 * torch.randn(400, 4)
    >>> print(ridge_probe(codes, labels).finding)
    The probe tells 95.5% of 200 held-out labels (91.7% to 97.6%), more than chance, 22.0%.
    """
    groups = torch.arange(len(labels)) if groups is None else groups.cpu()
    _require(x, labels, groups)
    x, labels = x.double().cpu(), labels.cpu()
    known, own = _numbered(groups)
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))
    tested = round(len(known) * held_out)
    if not 0 < tested < len(known):
        raise AttentionError(
            f"held_out={held_out} of {len(known)} groups leaves none to fit to, or none to test "
            "on; give more groups, or a share between 0 and 1."
        )
    test = torch.isin(own, order[:tested])
    classes, y = _numbered(labels)
    weights, mean, intercept = _fitted(x[~test], y[~test], len(classes), damping)
    right = ((x[test] - mean) @ weights + intercept).argmax(-1) == y[test]
    accuracy = float(right.double().mean())
    often = torch.bincount(y[~test], minlength=len(classes)).argmax()
    return Probe(
        accuracy,
        _wilson(accuracy, tested),
        float((y[test] == often).double().mean()),
        int(test.sum()),
        tuple(classes.tolist()),
        tuple(float(right[y[test] == one].double().mean()) for one in range(len(classes))),
        mean,
        weights,
        intercept,
    )


def _fitted(x: Tensor, y: Tensor, classes: int, damping: float) -> tuple[Tensor, Tensor, Tensor]:
    """`(XᵀX + λ)⁻¹ Xᵀ Y` of centered X and Y, with X in units of its deviations."""
    mean, deviation = x.mean(0), x.std(0, unbiased=False)
    inverse = torch.where(deviation > 1e-12, 1 / deviation.clamp_min(1e-12), 0.0)
    x = (x - mean) * inverse
    told = torch.nn.functional.one_hot(y, classes).double()
    system = exact_ridge(x.T @ x, len(x)).damped(damping)
    if not system.added:  # all vectors are one
        return torch.zeros(x.shape[1], classes).double(), mean, told.mean(0)
    solved = system.solve(x.T @ (told - told.mean(0))) / system.added
    return inverse[:, None] * solved, mean, told.mean(0)


def _wilson(share: float, count: int) -> tuple[float, float]:
    z = Z_97_5 * Z_97_5 / count
    middle, half = share + z / 2, math.sqrt(z * share * (1 - share) + z * z / 4)
    return max(0.0, (middle - half) / (1 + z)), min(1.0, (middle + half) / (1 + z))


def _numbered(x: Tensor) -> tuple[Tensor, Tensor]:
    """What is in x, each once, and for each row which of it."""
    known = torch.tensor(sorted(set(x.tolist())), dtype=torch.long)
    return known, torch.searchsorted(known, x)


def _require(x: Tensor, labels: Tensor, groups: Tensor) -> None:
    if x.ndim != 2 or labels.shape != x.shape[:1] or groups.shape != x.shape[:1]:
        raise AttentionError(
            f"x has shape {tuple(x.shape)}, labels {tuple(labels.shape)} and groups "
            f"{tuple(groups.shape)}; give (rows, features) and one label, and one group, a row. "
            "Codes become rows by .flatten(1)."
        )
    if labels.is_floating_point() or labels.is_complex():
        raise AttentionError(
            f"labels are of type {labels.dtype}, and a probe tells classes; give whole numbers."
        )
    if len(_numbered(labels)[0]) < 2:
        raise AttentionError("all labels are the same, so there is nothing to tell; give several.")
    if not bool(x.isfinite().all()):
        raise AttentionError("x has numbers that are not finite; leave these rows out.")
