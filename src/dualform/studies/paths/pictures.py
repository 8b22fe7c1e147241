"""The study in pictures: chains by noise, and networks by how many heads are left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dualform.studies.drawing import INK, Drawing, clean_axes, save_drawings
from dualform.studies.estimate import Estimate
from dualform.studies.paths.pruning import METHODS
from dualform.studies.paths.results import PathsResults
from dualform.studies.report import Picture

COLORS = ("#8c8c8c", "#1b6ca8", "#3a8f5c", "#e07a1f", "#8e5ea2", "#b8405e")
OF_METHODS = dict(
    zip(METHODS, ("#1b6ca8", "#66a3cc", "#3a8f5c", "#e07a1f", "#8c8c8c"), strict=True)
)


def draw(results: PathsResults, out: Path) -> tuple[Picture, ...]:
    """Writes both pictures into a folder."""
    drawings: tuple[Drawing, ...] = (
        (
            "chains.png",
            "Hidden chains: test accuracy by noise, of the Gaussian process and of layers of some "
            "widths, with 95 % intervals.",
            lambda plt: _chains(plt, results),
        ),
        (
            "pruning.png",
            "Left: how scores of heads agree with what is lost without each. Right: test accuracy "
            "without the heads of the lowest scores. With 95 % intervals.",
            lambda plt: _pruning(plt, results),
        ),
    )
    return save_drawings(drawings, out)


def _line(axes: Any, x: list[float], found: list[Estimate], **style: Any) -> None:
    means = [one.mean for one in found]
    axes.errorbar(x, means, [one.interval for one in found], marker="o", ms=3.5, lw=1.5, **style)


def _chains(plt: Any, results: PathsResults) -> Any:
    figure, axes = plt.subplots(figsize=(6, 3.8), layout="constrained")
    noises = list(results.setting.noises)
    for kernel, color in zip(results.kernels, COLORS, strict=False):
        _line(axes, noises, [results.chain(n, kernel) for n in noises], color=color, label=kernel)
    clean_axes(axes, "hidden chains", "noise", "test accuracy", grid=True)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _pruning(plt: Any, results: PathsResults) -> Any:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for at, (method, color) in enumerate(OF_METHODS.items()):
        found = results.agreement(method)
        left.barh(at, found.mean, xerr=found.interval, color=color, ecolor=INK, capsize=3)
        counts = list(range(results.setting.layers * results.setting.heads + 1))
        curve = [results.pruned(method, n) for n in counts]
        _line(right, [float(n) for n in counts], curve, color=color, label=method)
    left.set_yticks(range(len(METHODS)), METHODS)
    left.invert_yaxis()
    clean_axes(left, "agreement with ablation", "rank correlation", grid=True)
    clean_axes(right, "pruning", "heads left out", "test accuracy", grid=True)
    right.legend(frameon=False, fontsize=8)
    return figure
