"""The study in pictures: how right networks are, what codes tell, how many answers fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dualform.studies.comparison import LayerComparison
from dualform.studies.drawing import FAINT, INK, Drawing, clean_axes, save_drawings
from dualform.studies.hypernetwork.results import (
    SCORE,
    HypernetworkResults,
    TaskResults,
    answer_shares,
)
from dualform.studies.report import Picture

COLORS = ("#1b6ca8", "#e07a1f", "#3a8f5c")
"""Of the parts of a task: known rules, and the two that are held out."""
BEFORE, AFTER = "#8c8c8c", "#1b6ca8"


def draw(results: HypernetworkResults, out: Path) -> tuple[Picture, ...]:
    """Writes all pictures into a folder."""
    drawings: tuple[Drawing, ...] = (
        (
            "scores.png",
            "How right each layer is on known rules and on what is held out of training.",
            lambda plt: _scores(plt, results),
        ),
        (
            "codes.png",
            "The share of rules that a ridge probe tells from latent codes, before training and "
            "after; dotted: without codes.",
            lambda plt: _codes(plt, results),
        ),
        (
            "answers.png",
            "Puzzles by how many answers agree with the eight panels, and rows of one feature "
            "that several answers agree with, by rule.",
            lambda plt: _answers(plt, results),
        ),
    )
    return save_drawings(drawings, out)


def _dots(axes: Any, rows: Sequence[tuple[str, LayerComparison, str]]) -> None:
    """For each layer a dot a row, with its interval and the values of its seeds."""
    layers = list(rows[0][1].values)
    for at, (label, found, color) in enumerate(rows):
        shift = 0.22 * ((len(rows) - 1) / 2 - at)
        means = [found.reached(layer) for layer in layers]
        places = [len(layers) - 1 - place + shift for place in range(len(layers))]
        for place, layer in zip(places, layers, strict=True):
            own = found.values[layer]
            axes.plot(own, [place] * len(own), "|", color=color, alpha=0.5, markersize=6)
        axes.errorbar(
            [one.mean for one in means],
            places,
            xerr=[one.interval for one in means],
            fmt="o",
            color=color,
            markersize=4.5,
            linewidth=1.2,
            label=label,
        )
    axes.set_yticks(range(len(layers)), layers[::-1])


def _grid(plt: Any, results: HypernetworkResults) -> tuple[Any, list[tuple[Any, TaskResults]]]:
    """Panels as high as their tasks have layers."""
    heights = [1.2 + len(task.trained) for task in results.tasks]
    figure, column = plt.subplots(
        len(heights),
        1,
        figsize=(7.6, 0.46 * sum(heights) + 1.2),
        layout="constrained",
        height_ratios=heights,
        squeeze=False,
    )
    return figure, list(zip(column[:, 0], results.tasks, strict=True))


def _scores(plt: Any, results: HypernetworkResults) -> Any:
    figure, panels = _grid(plt, results)
    for axes, task in panels:
        _dots(
            axes,
            [(p, task.scores(p), color) for p, color in zip(task.parts, COLORS, strict=True)],
        )
        low = min(v for p in task.parts for row in task.scores(p).values.values() for v in row)
        axes.set_xlim(min(0.0, low) - 3, 103)
        if task.name == "raven":
            axes.axvline(12.5, color=INK, linewidth=0.8, linestyle=":")
        clean_axes(axes, task.name, SCORE[task.name], grid=True)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _codes(plt: Any, results: HypernetworkResults) -> Any:
    figure, panels = _grid(plt, results)
    for axes, task in panels:
        rows = [("untrained", BEFORE), ("trained", AFTER)]
        _dots(axes, [(when, task.told(when), color) for when, color in rows])
        axes.axvline(task.chance(), color=INK, linewidth=0.8, linestyle=":")
        axes.set_xlim(0, 103)
        clean_axes(axes, task.name, "rules told, %", grid=True)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _answers(plt: Any, results: HypernetworkResults) -> Any:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for at, (features, counts) in enumerate(results.answers["features"].items()):
        places = [place + 0.2 * (at - 1.5) for place in range(4)]
        label = f"{features} feature{'s' if int(features) > 1 else ''}"
        left.bar(places, answer_shares(counts), 0.18, label=label, color=(FAINT, *COLORS)[at])
    left.set_xticks(range(4), ("1", "2", "3", "more"))
    clean_axes(left, "Puzzles", "answers that agree", "% of puzzles")
    left.legend(frameon=False, fontsize=8)
    rules = results.answers["rules"]
    right.barh(list(rules)[::-1], [100 * share for share in rules.values()][::-1], color=AFTER)
    clean_axes(right, "One feature, matched", "% with several answers")
    return figure
