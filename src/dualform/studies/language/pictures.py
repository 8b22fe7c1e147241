"""The study in pictures: what the first positions have, by layer; where a logit comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dualform.studies.drawing import FAINT, INK, clean_axes, save_drawings
from dualform.studies.estimate import Estimate
from dualform.studies.language.measure import EXACT, KEYS, NETWORK
from dualform.studies.language.results import LanguageResults
from dualform.studies.report import Picture

COLORS = {KEYS: "#9aa5b1", EXACT: "#1b6ca8"}
NAMES = {KEYS: "keys only", EXACT: "exact"}
PARTS = {"same next": "foretold token follows, %", "shared": "tokens of context shared"}


def draw(results: LanguageResults, out: Path) -> tuple[Picture, ...]:
    """Writes all pictures into a folder."""
    drawn: list[tuple[str, str, Callable[[Any], Any]]] = [
        (
            "layers.png",
            "How often the foretold token follows the first ten training positions of test "
            "prompts, and how many tokens they share with the prompt, by layer.",
            lambda plt: _layers(plt, results),
        ),
        (
            "through.png",
            "What each layer added to the logit of the foretold token, through the whole network.",
            lambda plt: _through(plt, results),
        ),
    ]
    return save_drawings(drawn, out)


def _layers(plt: Any, results: LanguageResults) -> Any:
    """Two bars a layer, and one for the whole network; dotted lines are chance."""
    models = [*results.models]
    sizes = [len(results.layers(model)) + 1 for model in models]
    figure, grid = plt.subplots(
        2,
        len(models),
        figsize=(1.6 + 0.62 * sum(sizes), 5.6),
        layout="constrained",
        squeeze=False,
        sharex="col",
        width_ratios=sizes,
    )
    for column, model in zip(grid.T, models, strict=True):
        for axes, (what, title) in zip(column, PARTS.items(), strict=True):
            _matches(axes, results, model, what)
            top = axes is column[0]
            clean_axes(axes, model if top else "", y=title if model == models[0] else "")
        names = [*results.layers(model), "whole\nnetwork"]
        column[1].set_xticks(range(len(names)), names, rotation=45, ha="right")
    handles = grid[0, 0].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, fontsize=9, loc="outside lower center", ncols=4)
    return figure


def _matches(axes: Any, results: LanguageResults, model: str, what: str) -> None:
    layers = results.layers(model)
    for side, how in ((-0.2, KEYS), (0.2, EXACT)):
        found = [results.found(model, f"{how} {one}", "test", "summed", what) for one in layers]
        _bars(axes, np.arange(len(layers)) + side, found, COLORS[how], NAMES[how])
    whole = results.found(model, f"{EXACT} {NETWORK}", "test", "summed", what)
    _bars(axes, np.array([float(len(layers))]), [whole], COLORS[EXACT], "")
    scale = 100 if what == "same next" else 1
    chance = results.mean(model, "chance", "test", what, scale=scale)
    axes.axhline(chance.mean, color=INK, linestyle=":", linewidth=1, label="any position")
    axes.set_ylim(0, 105 if what == "same next" else None)


def _bars(axes: Any, at: Any, found: Sequence[Estimate], color: str, label: str) -> None:
    means, errors = [one.mean for one in found], np.nan_to_num([one.interval for one in found])
    axes.bar(at, means, 0.38, color=color, label=label)
    axes.errorbar(at, means, errors, fmt="none", ecolor=INK, lw=0.8)


def _through(plt: Any, results: LanguageResults) -> Any:
    models = [*results.models]
    counts = [len(results.models[model][0]["through"]) for model in models]
    size = (11, 0.9 + 0.27 * max(counts))
    figure, row = plt.subplots(1, len(models), figsize=size, layout="constrained", squeeze=False)
    for axes, model in zip(row[0], models, strict=True):
        names = [*results.models[model][0]["through"]]
        found = [results.mean(model, "through", name) for name in names]
        places, means = np.arange(len(names)), [one.mean for one in found]
        errors = np.nan_to_num([one.interval for one in found])
        axes.barh(places, means, 0.7, color=COLORS[EXACT])
        axes.errorbar(means, places, xerr=errors, fmt="none", ecolor=INK, lw=0.8)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_yticks(places, names)
        axes.invert_yaxis()
        axes.grid(True, axis="x", color=FAINT, linewidth=0.5)
        clean_axes(axes, model, "added to the logit")
    return figure
