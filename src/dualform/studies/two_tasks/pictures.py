"""The study in pictures: attention by task and class, the timeline, digits that were forgotten."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualform.read.scores import Array
from dualform.studies.data import DIGITS, GARMENTS
from dualform.studies.drawing import FAINT, INK, clean, save_pictures
from dualform.studies.report import Picture
from dualform.studies.two_tasks.attention import NETWORK
from dualform.studies.two_tasks.measure import FORGOTTEN
from dualform.studies.two_tasks.overwriting import SHOWN
from dualform.studies.two_tasks.results import TwoTasksResults
from dualform.studies.two_tasks.tasks import GROUPS, OUTPUTS, TASKS, Tasks

COLORS = {"digits": "#1b6ca8", "garments": "#e07a1f"}
SHADES = ("#9ecae1", "#4292c6", "#08519c", "#3a8f5c")
"""Of the layers, and of the whole network."""
NAMES = (*DIGITS, *GARMENTS)


def draw(results: TwoTasksResults, tasks: Tasks, tests: Tasks, out: Path) -> tuple[Picture, ...]:
    """Writes all pictures into a folder."""

    def examples(plt: Any) -> Any:
        return _examples(plt, results, tasks, tests)

    drawn: list[tuple[str, str, Callable[[Any], Any]]] = [
        (
            "attention.png",
            "Which share of the attention of test images training digits get, by layer.",
            lambda plt: _attention(plt, results),
        ),
        (
            "classes.png",
            "Which training classes the attention of each test class goes to, in percent.",
            lambda plt: _classes(plt, results),
        ),
        (
            "timeline.png",
            "What phase 1 built up and phase 2 took away of the output of test digits for their "
            "class, and how many test images are right.",
            lambda plt: _timeline(plt, results),
        ),
    ]
    end = max(results.setting.ends)
    if any(one[FORGOTTEN]["of"] for one in results.ends(end)):
        drawn += [
            (
                "forgotten.png",
                "Digits that were forgotten: which garments, and which layers, changed the margin.",
                lambda plt: _forgotten(plt, results),
            ),
            (
                "examples.png",
                "Forgotten digits, and the training garments that took most of their margins.",
                examples,
            ),
        ]
    return save_pictures(drawn, out)


def _attention(plt: Any, results: TwoTasksResults) -> Any:
    """Bars for each layer, in groups of one read each; above them the share of visits."""
    figure, grid = plt.subplots(2, 2, figsize=(10, 5.6), layout="constrained", sharey=True)
    visits = [np.mean([r["visits"] for r in reads]) for reads in results.reads.values()]
    for column, test in enumerate(TASKS):
        for axes, measure, title in zip(
            grid[:, column], ("keys", "sizes"), ("keys only", "exact, sizes"), strict=True
        ):
            layers = [*results.layers, *([NETWORK] if measure == "sizes" else [])]
            width = 0.8 / len(layers)
            for at, layer in enumerate(layers):
                found = results.shares(measure, layer, test)
                places = np.arange(len(found)) + (at - (len(layers) - 1) / 2) * width
                color = SHADES[-1] if layer == NETWORK else SHADES[at]
                name = "whole network" if layer == NETWORK else f"layer {layer}"
                errors = np.nan_to_num([one.interval for one in found])
                axes.bar(places, [one.mean for one in found], width * 0.9, color=color, label=name)
                axes.errorbar(
                    places, [one.mean for one in found], errors, fmt="none", ecolor=INK, lw=0.8
                )
            for at, share in enumerate(visits):
                label = "share of visits" if not at else None
                axes.hlines(100 * share, at - 0.45, at + 0.45, INK, ":", lw=1.2, label=label)
            axes.set_xticks(range(len(visits)), [n.replace(", ", "\n") for n in results.reads])
            axes.set_ylim(0, 105)
            clean(axes, f"test {test}: {title}", y="to digits, %")
    handles = grid[1, 1].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, fontsize=9, loc="outside lower center", ncols=5)
    return figure


def _classes(plt: Any, results: TwoTasksResults) -> Any:
    """Heat maps, training classes by test classes; every column adds up to 100 %."""
    last, end = results.layers[-1], f"in sequence, step {max(results.setting.ends):,}"
    first = next(iter(results.reads))
    shown = (
        (first, last, "keys", f"together: keys only, layer {last}"),
        (first, NETWORK, "sizes", "together: exact, whole network"),
        (end, NETWORK, "sizes", "in sequence: exact, whole network"),
    )
    figure, grid = plt.subplots(1, 3, figsize=(12, 4.7), layout="constrained", sharey=True)
    tables = [
        100 * np.mean([r["attention"][layer][measure] for r in results.reads[read]], 0)
        for read, layer, measure, _ in shown
    ]
    most = max(float(table.max()) for table in tables)
    for axes, table, (*_, title) in zip(grid, tables, shown, strict=True):
        image = axes.imshow(table, cmap="Blues", vmin=0, vmax=most)
        axes.set_xticks(range(len(NAMES)), NAMES, rotation=90)
        axes.set_yticks(range(len(NAMES)), NAMES)
        axes.axhline(OUTPUTS - 0.5, color=INK, linewidth=0.8)
        axes.axvline(OUTPUTS - 0.5, color=INK, linewidth=0.8)
        clean(axes, title, "test class", "training class" if axes is grid[0] else "")
    _scale(figure, image, grid, "share of the attention, %")
    return figure


def _scale(figure: Any, image: Any, axes: Any, label: str) -> None:
    """What the colors of a heat map mean."""
    bar = figure.colorbar(image, ax=axes, shrink=0.8)
    bar.set_label(label, fontsize=9, color=INK)
    bar.ax.tick_params(labelsize=8, color=FAINT, labelcolor=INK)


def _timeline(plt: Any, results: TwoTasksResults) -> Any:
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    switch, end = results.setting.switch, max(results.setting.ends)
    curves = np.stack([_account(one, end, switch) for one in results.sequences])
    _band(left, np.arange(end + 1), curves, COLORS["digits"], "through the whole network")
    steps = [point["step"] for point in results.sequences[0]["path"]]
    measured = np.mean([[p["output"] for p in one["path"]] for one in results.sequences], 0)
    left.plot(steps, measured, "o", color=INK, markersize=4, label="the output, measured")
    clean(left, "What steps added, read at their phase's end", "step", "output for the true class")
    reads = np.stack([_of_last_layer(one, end) for one in results.sequences])
    color = SHADES[2]
    _band(
        middle,
        np.arange(end + 1),
        reads,
        color,
        f"layer {results.layers[-1]}: weights before training, then steps",
    )
    clean(middle, f"The last layer, read at step {end:,}", "step", "")
    middle.sharey(left)
    for task in TASKS:
        found = np.array([[100 * p[task] for p in one["path"]] for one in results.sequences])
        _band(right, np.array(steps), found, COLORS[task], f"test {task}")
    right.set_ylim(0, 100)
    clean(right, "Test images that are right", "step", "%")
    for axes in (left, middle, right):
        axes.axvline(switch, color=INK, linewidth=0.8, linestyle=":")
        axes.grid(True, color=FAINT, linewidth=0.5, alpha=0.6)
        axes.legend(frameon=False, fontsize=8, loc="lower right")
        axes.text(
            switch, 1.0, " garments →", transform=axes.get_xaxis_transform(), fontsize=8, va="top"
        )
    return figure


def _account(sequence: dict[str, Any], end: int, switch: int) -> Array:
    """(end + 1,): the mean output as the steps of both phases built it up, exact at three steps."""
    built, stage = sequence["built"], sequence["ends"][str(end)]["stage"]
    steps, more = np.zeros(end + 1), np.array(stage["steps"])
    steps[0], steps[1 : switch + 1] = built["before"], built["steps"]
    steps[switch + 1 :] = more[switch:]
    steps[switch + 1] += more[:switch].sum()  # what momentum carries over, after the switch
    found: Array = steps.cumsum()
    return found


def _of_last_layer(sequence: dict[str, Any], end: int) -> Array:
    """(end + 1,): what the last layer's initial weights and steps add to its output, so far."""
    own = sequence["reads"][str(end)]["attention"]
    initial = next(reversed([own[name] for name in own if name != NETWORK]))["initial"]
    first = float(np.mean(initial[:OUTPUTS]))
    found: Array = np.cumsum([first, *sequence["ends"][str(end)]["last layer"]])
    return found


def _band(axes: Any, x: NDArray[np.int64], values: Array, color: str, label: str) -> None:
    """A mean over seeds, between the least and the largest."""
    axes.fill_between(x, values.min(0), values.max(0), color=color, alpha=0.2, linewidth=0)
    axes.plot(x, values.mean(0), color=color, linewidth=1.6, label=label)


def _forgotten(plt: Any, results: TwoTasksResults) -> Any:
    """What each class of garments changed of the margin, by rival; and by layer."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 4.4), layout="constrained", width_ratios=[1.6, 1]
    )
    end = max(results.setting.ends)
    found = [one[FORGOTTEN] for one in results.ends(end) if one[FORGOTTEN]["of"]]
    counts = np.sum([one["rivals"] for one in found], 0)
    table = np.sum([one["table"] for one in found], 0) / np.maximum(counts, 1)[:, None]
    table[counts == 0] = np.nan
    most = float(np.nanmax(np.abs(table)))
    image = left.imshow(table, cmap="RdBu", vmin=-most, vmax=most)
    left.set_xticks(range(OUTPUTS), GARMENTS, rotation=45, ha="right")
    names = [f"{k} ({garment})" for k, garment in enumerate(GARMENTS)]
    left.set_yticks(range(OUTPUTS), names)
    _scale(figure, image, left, "change of the margin, mean")
    clean(left, "Margin against the output it is taken for", "training garments", "taken for")
    layers = results.layers
    for at, layer in enumerate(layers):
        values = [one["layers"][layer] for one in found]
        right.bar(at, np.mean(values), 0.6, color=SHADES[at])
        right.plot([at] * len(values), values, "o", color=INK, markersize=3)
    right.axhline(0, color=INK, linewidth=0.8)
    right.set_xticks(range(len(layers)), [f"layer {layer}" for layer in layers])
    clean(right, f"Change of the margin by layer, until step {end:,}")
    return figure


def _examples(plt: Any, results: TwoTasksResults, tasks: Tasks, tests: Tasks) -> Any:
    """A row for each digit: itself, and the garments that took most."""
    rows = results.sequences[0]["examples"]
    size = (1.25 * (SHOWN + 1.4), 1.5 * len(rows))
    figure, grid = plt.subplots(
        len(rows), SHOWN + 1, figsize=size, layout="constrained", squeeze=False
    )
    train, groups = tasks.images.pixels, tasks.groups
    for line, row in zip(grid, rows, strict=True):
        title = f"{GROUPS[row['group']]} → {row['rival']}\nmargin {row['change']:+.1f}"
        _show(line[0], tests.digits.pixels[row["image"]], title)
        for axes, sample, value in zip(line[1:], row["against"], row["values"], strict=True):
            _show(axes, train[sample], f"{GROUPS[int(groups[sample])]}\n{value:+.2f}")
    return figure


def _show(axes: Any, pixels: Any, title: str) -> None:
    axes.imshow(pixels.numpy(), cmap="gray_r")
    axes.set_title(title, fontsize=8, color=INK)
    axes.axis("off")
