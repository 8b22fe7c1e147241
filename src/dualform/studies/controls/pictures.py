"""The study in pictures: answers of reads, rebuilt weights, LDS, and what removals take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dualform.studies.controls.left_out import EXACT, VARIANTS
from dualform.studies.controls.measure import TRUE, UNTRAINED
from dualform.studies.controls.results import ASKED, COLUMNS, SELF, ControlsResults
from dualform.studies.drawing import FAINT, INK, Drawing, clean_axes
from dualform.studies.estimate import Estimate, estimate

SHADES = {
    TRUE: "#08519c",
    "random labels, by label": "#e07a1f",
    "random labels, by true class": "#f3b27a",
    UNTRAINED: "#9a9a9a",
}
"""Of the networks."""
TONES = ("#9ecae1", "#4292c6", "#08519c", "#3a8f5c", "#e07a1f")
"""Of layers, or of how much is removed."""


def drawings(results: ControlsResults) -> list[Drawing]:
    """All pictures, with their captions."""
    return [
        (
            "answers.png",
            "How often the right class has the largest total, by read and network.",
            lambda plt: _answers(plt, results),
        ),
        (
            "asked.png",
            "Exact reads: which class has the largest total when they are asked about the "
            "network's answer, and about another class.",
            lambda plt: _asked(plt, results),
        ),
        (
            "left-out.png",
            "Weights and contributions without momentum, without clipping, and without both.",
            lambda plt: _left_out(plt, results),
        ),
        (
            "retraining.png",
            "Which reads foretell retraining on halves, and what is lost without the training "
            "images that each ranks first.",
            lambda plt: _retraining(plt, results),
        ),
    ]


def _dots(
    axes: Any, found: Sequence[Estimate | None], shift: float, color: str, label: str
) -> None:
    """Means with their intervals, one line each, from the top."""
    for at, one in enumerate(found):
        if one is not None:
            axes.errorbar(
                one.mean,
                at + shift,
                xerr=np.nan_to_num(one.interval),
                fmt="o",
                color=color,
                markersize=4.5,
                elinewidth=1.2,
                label=label,
            )
            label = ""


def _lines(axes: Any, words: Sequence[str]) -> None:
    """Names of the lines, from the top, with faint rules between them."""
    axes.set_yticks(range(len(words)), words)
    axes.set_ylim(len(words) - 0.5, -0.5)
    for at in range(1, len(words)):
        axes.axhline(at - 0.5, color=FAINT, linewidth=0.6)


def _answers(plt: Any, results: ControlsResults) -> Any:
    rows = (SELF, *results.reads)
    figure, grid = plt.subplots(1, 2, figsize=(11, 5), layout="constrained", sharey=True)
    titles = (("target", "the right class is first"), ("output", "the network's answer is first"))
    for axes, (kind, title) in zip(grid, titles, strict=True):
        for at, column in enumerate(COLUMNS):
            found = [results.rate(column, read, kind) for read in rows]
            if kind == "output":
                found[0] = None
            _dots(axes, found, 0.18 * (at - 1.5), SHADES[column], column)
        _lines(axes, rows)
        axes.axvline(10, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xlim(-2, 102)
        clean_axes(axes, title, "test digits, % (dotted: chance)")
    handles = grid[0].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, fontsize=9, loc="outside lower center", ncols=4)
    return figure


def _asked(plt: Any, results: ControlsResults) -> Any:
    figure, grid = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained", sharey=True)
    for axes, (column, labels) in zip(grid, ASKED.items(), strict=True):
        shown: tuple[tuple[str, list[Estimate | None]], ...] = (
            (
                "asked about its answer: that answer",
                [results.rate(labels, r, "output") for r in results.exact_reads],
            ),
            (
                "asked about another class: that class",
                [results.asked(column, r, "asked for") for r in results.exact_reads],
            ),
            (
                "asked about another class: its answer",
                [results.asked(column, r, "output") for r in results.exact_reads],
            ),
        )
        for at, (label, found) in enumerate(shown):
            _dots(axes, found, 0.22 * (at - 1), (TONES[2], TONES[4], "#9a9a9a")[at], label)
        _lines(axes, results.exact_reads)
        axes.set_xlim(-2, 102)
        clean_axes(axes, column, "largest total, % of test digits")
    handles = grid[0].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, fontsize=9, loc="outside lower center", ncols=3)
    return figure


def _left_out(plt: Any, results: ControlsResults) -> Any:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained", sharey=True)
    names = [name for name in VARIANTS if name != EXACT]
    for at, layer in enumerate(results.layers):
        shift = 0.2 * (at - (len(results.layers) - 1) / 2)
        color, label = TONES[at], f"layer {layer}"
        _dots(left, [results.error(name, layer) for name in names], shift, color, label)
        ranks = [results.agreement(name, layer, "ranks") for name in names]
        _dots(right, ranks, shift, color, label)
    for axes in (left, right):
        _lines(axes, names)
    left.set_xlim(left=0)
    clean_axes(left, "rebuilt weights", "error, % of the change by training")
    clean_axes(right, "contributions of training images", "rank correlation with the exact ones")
    left.legend(frameon=False, fontsize=8)
    return figure


def _retraining(plt: Any, results: ControlsResults) -> Any:
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(12, 4.2), layout="constrained", sharey=True
    )
    names = results.removers
    for at, own in enumerate(results.lds.values()):
        low, high = own[0].interval
        left.errorbar(
            own[0].mean,
            at,
            xerr=[[own[0].mean - low], [high - own[0].mean]],
            fmt="o",
            color=TONES[2],
            markersize=4.5,
        )
        left.plot([one.mean for one in own], [at] * len(own), "|", color=INK, markersize=9)
    left.axvline(0, color=INK, linewidth=0.8)
    ceiling = results.truth.ceiling
    if np.isfinite(ceiling):
        left.axvline(ceiling, color=INK, linewidth=0.8, linestyle=":")
    for at, count in enumerate(results.setting.removed):
        shift = 0.22 * (at - (len(results.setting.removed) - 1) / 2)
        color, label = TONES[(1, 2, 3)[at]], f"without {count:,}"
        falls = [estimate(results.falls(name, count)) for name in names]
        flips = [estimate(results.flips(name, count), 100) for name in names]
        _dots(middle, falls, shift, color, label)
        _dots(right, flips, shift, color, label)
    for axes in (left, middle, right):
        _lines(axes, names)
    middle.axvline(0, color=INK, linewidth=0.8)
    clean_axes(left, "foretelling halves", "LDS (dotted: at best; ticks: other networks)")
    clean_axes(middle, "removing what is ranked first", "the margin falls by")
    clean_axes(right, "removing what is ranked first", "right answers that turn wrong, %")
    right.set_xlim(-4, 104)
    handles = middle.get_legend_handles_labels()
    figure.legend(*handles, frameon=False, fontsize=9, loc="outside lower center", ncols=3)
    return figure
