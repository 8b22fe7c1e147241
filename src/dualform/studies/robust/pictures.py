"""The study in two pictures: right answers by strength, and gains by the rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dualform.studies.drawing import INK, Drawing, clean_axes, save_drawings
from dualform.studies.report import Picture
from dualform.studies.robust.results import RobustResults
from dualform.studies.robust.setting import ATTACKS, LAYERS, TRAININGS

COLORS = dict(
    zip(LAYERS, ("#8c8c8c", "#1b6ca8", "#8e5ea2", "#5b5b5b", "#3a8f5c", "#e07a1f"), strict=True)
)
UNITS = {
    "tokens": "share of tokens replaced",
    "noise": "standard deviation",
    "FGSM": "step",
    "PGD": "step",
}


def draw(results: RobustResults, out: Path) -> tuple[Picture, ...]:
    """Writes the pictures; the second where there is a layer to compare with."""
    drawings: list[Drawing] = [
        (
            "accuracy.png",
            "Right answers by the strength of each contamination, with 95 % intervals.",
            lambda plt: _accuracy(plt, results),
        )
    ]
    if results.setting.pairs():
        caption = "What the rounds add to each layer, with 95 % intervals over seeds."
        drawings.append(("gains.png", caption, lambda plt: _gains(plt, results)))
    return save_drawings(drawings, out)


def _accuracy(plt: Any, results: RobustResults) -> Any:
    figure, grid = plt.subplots(
        2, 4, figsize=(12, 5.6), layout="constrained", sharex="col", sharey="row"
    )
    for training, row in zip(TRAININGS, grid, strict=True):
        for attack, axes in zip(ATTACKS, row, strict=True):
            strengths = results.setting.strengths(attack)
            names = ["clean", *(f"{attack} {s:g}" for s in strengths)]
            for layer in results.setting.layers:
                found = [results.right(training, layer, name) for name in names]
                axes.errorbar(
                    [0, *strengths],
                    [one.mean for one in found],
                    np.nan_to_num([one.interval for one in found]),
                    color=COLORS[layer],
                    linestyle="--" if LAYERS[layer][1].get("symmetric") else "-",
                    label=layer,
                    marker="o",
                    markersize=3,
                    capsize=2,
                    lw=1.3,
                )
            last, first = training == TRAININGS[-1], attack == ATTACKS[0]
            clean_axes(
                axes,
                f"{attack}, {training} training",
                UNITS[attack] if last else "",
                "right, %" if first else "",
                grid=True,
            )
    handles = grid[0, 0].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, fontsize=9, loc="outside lower center", ncols=6)
    return figure


def _gains(plt: Any, results: RobustResults) -> Any:
    pairs, conditions = results.setting.pairs(), results.setting.conditions()
    figure, row = plt.subplots(
        1, 2, figsize=(10, 5), layout="constrained", sharex=True, sharey=True
    )
    for training, axes in zip(TRAININGS, row, strict=True):
        axes.axvline(0, color=INK, linewidth=0.8)
        for at, pair in enumerate(pairs):
            found = [results.gain(training, *pair, condition) for condition in conditions]
            axes.errorbar(
                [one.mean for one in found],
                [y + 0.22 * (at - (len(pairs) - 1) / 2) for y in range(len(conditions))],
                xerr=np.nan_to_num([one.interval for one in found]),
                fmt="o",
                markersize=4,
                color=COLORS[pair[0]],
                label=f"{pair[0]} − {pair[1]}",
            )
        axes.set_yticks(range(len(conditions)), conditions)
        axes.set_ylim(len(conditions) - 0.5, -0.5)
        clean_axes(axes, f"{training} training", "difference, points", grid=True)
    handles = row[0].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, fontsize=9, loc="outside lower center", ncols=4)
    return figure
