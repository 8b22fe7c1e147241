"""The study in pictures: the strongest training images, sorted scores, sums by class, votes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dualform.studies.data import Images
from dualform.studies.drawing import (
    FAINT,
    INK,
    Drawing,
    clean_axes,
    save_drawings,
    show_image,
)
from dualform.studies.mnist.examples import SHOWN
from dualform.studies.mnist.results import ASKED, MnistResults
from dualform.studies.mnist.setting import CLASSES
from dualform.studies.mnist.votes import MEASURES, NETWORK
from dualform.studies.report import Picture

OWN, OTHER, OUTPUT = "#1b6ca8", "#b9c4cc", "#e07a1f"
"""Of the class of a test image, of the class it is taken for, and of all others."""
KINDS = {"keys": "keys only", "given": "exact, for the output given"}
"""What is shown of an example."""
VOTED = {
    "keys": "#9ecae1",
    "keys mean": "#6baed6",
    "own": "#fdd0a2",
    "own relative": "#fdae6b",
    "evidence": "#e6550d",
    "own influence": "#3a8f5c",
}
"""The votes that are drawn; those for the output given are right by construction."""


def draw(results: MnistResults, images: Images, tests: Images, out: Path) -> tuple[Picture, ...]:
    """Writes all pictures into a folder."""
    drawn: list[Drawing] = [
        (
            "votes.png",
            "How often the first class is that of a test image, or the one it is taken for.",
            lambda plt: _votes(plt, results),
        )
    ]
    for at, example in enumerate(results.seeds[0]["examples"]):
        drawn += _of_example(results, example, at, images, tests)
    return save_drawings(drawn, out)


def _of_example(
    results: MnistResults, example: Mapping[str, Any], at: int, images: Images, tests: Images
) -> list[Drawing]:
    """The pictures of a test image; its scores are drawn of the first one only."""
    who = _name(example, results)
    scores: list[Drawing] = [
        (
            "sorted.png",
            f"Scores of training images for {who}, sorted by value within each class.",
            lambda plt: _sorted(plt, results, example),
        ),
        (
            "sums.png",
            f"Sums of these scores by class, for {who}.",
            lambda plt: _sums(plt, results, example),
        ),
    ]
    return [
        (
            f"strongest-{at}.png",
            f"The strongest training images for {who}, by layer.",
            lambda plt: _strongest(plt, results, example, images, tests),
        ),
        *(scores if not at else ()),
    ]


def _name(example: Mapping[str, Any], results: MnistResults) -> str:
    """A test image in words."""
    own, given = (results.classes[example[part]] for part in ("class", "given"))
    return f"test image {example['image']}, {own}" + (f" taken for {given}" if given != own else "")


def _votes(plt: Any, results: MnistResults) -> Any:
    """Bars for each layer, of each measure; a picture for each question."""
    figure, grid = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained", sharey=True)
    measures = [name for name in VOTED if name in results.measures]
    width = 0.85 / len(measures)
    for axes, (asked, title) in zip(grid, ASKED.items(), strict=True):
        for at, measure in enumerate(measures):
            found = [results.votes(measure, layer, asked) for layer in results.layers]
            places = np.arange(len(found)) + (at - (len(measures) - 1) / 2) * width
            heights = [np.nan if one is None else one.mean for one in found]
            errors = [np.nan if one is None else np.nan_to_num(one.interval) for one in found]
            label = MEASURES[measure]
            axes.bar(places, heights, width * 0.92, color=VOTED[measure], label=label)
            axes.errorbar(places, heights, errors, fmt="none", ecolor=INK, lw=0.8)
        axes.axhline(100 / CLASSES, color=INK, linewidth=0.8, linestyle=":", label="by chance")
        axes.set_xticks(range(len(results.layers)), map(_where, results.layers))
        axes.set_ylim(0, 104)
        before, after = title.removesuffix(", %").split(": ")
        clean_axes(axes, f"{before}:\n{after}", y="%" if axes is grid[0] else "")
    handles = grid[0].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, fontsize=9, loc="outside lower center", ncols=4)
    return figure


def _strongest(
    plt: Any, results: MnistResults, example: Mapping[str, Any], images: Images, tests: Images
) -> Any:
    """A row for each layer: the image, what is nearest by keys, what spoke for it, and against."""
    blocks = (
        ("keys", "for", "keys only"),
        ("given", "for", "exact: for the output given"),
        ("given", "against", "exact: against it"),
    )
    rows = results.layers
    figure = plt.figure(figsize=(14, 1.25 * len(rows) + 0.4), layout="constrained")
    parts = figure.subfigures(1, 1 + len(blocks), width_ratios=[1.3, *[SHOWN] * len(blocks)])
    image = parts[0].subplots(1, 1)
    show_image(image, tests.pixels[example["image"]], _name(example, results).replace(", ", "\n"))
    said = _by_place(example["said"])
    for part, (measure, side, title) in zip(parts[1:], blocks, strict=True):
        part.suptitle(title, fontsize=10, color=INK)
        grid = part.subplots(len(rows), SHOWN, squeeze=False)
        for line, where in zip(grid, rows, strict=True):
            for axes in line:
                axes.axis("off")
            shown = said.get((measure, where), {}).get(side, ())
            for axes, one in zip(line, shown, strict=False):
                label = results.classes[int(images.y[one["id"]])]
                show_image(axes, images.pixels[one["id"]], f"{label}  {_number(one['value'])}")
            if shown:
                line[0].text(
                    -0.15,
                    0.5,
                    _where(where).replace("\n", " "),
                    transform=line[0].transAxes,
                    rotation=90,
                    fontsize=8,
                    ha="right",
                    va="center",
                )
    return figure


def _sorted(plt: Any, results: MnistResults, example: Mapping[str, Any]) -> Any:
    """For each layer, the scores of each class from the largest to the smallest."""

    def make(axes: Any, one: Mapping[str, Any]) -> None:
        for label, curve in enumerate(one["curves"]):
            x = label + np.linspace(0.04, 0.96, len(curve))
            axes.plot(x, curve, color=_color(label, example), linewidth=1.4)
        axes.axhline(0, color=INK, linewidth=0.6)
        axes.set_xticks(np.arange(CLASSES) + 0.5, _short(results.classes))
        for label in range(1, CLASSES):
            axes.axvline(label, color=FAINT, linewidth=0.6)

    return _by_layer(plt, results, example, make)


def _sums(plt: Any, results: MnistResults, example: Mapping[str, Any]) -> Any:
    """For each layer, the sum of the scores of each class."""

    def make(axes: Any, one: Mapping[str, Any]) -> None:
        colors = [_color(label, example) for label in range(CLASSES)]
        axes.bar(range(CLASSES), one["sums"], color=colors)
        axes.axhline(0, color=INK, linewidth=0.6)
        axes.set_xticks(range(CLASSES), _short(results.classes))

    return _by_layer(plt, results, example, make)


def _by_layer(plt: Any, results: MnistResults, example: Mapping[str, Any], make: Any) -> Any:
    """A line of pictures for each kind of score: one for each layer, and the network."""
    said, layers = _by_place(example["said"]), results.layers
    figure, grid = plt.subplots(
        len(KINDS), len(layers), figsize=(14, 5.2), layout="constrained", squeeze=False
    )
    for line, (measure, title) in zip(grid, KINDS.items(), strict=True):
        for axes, where in zip(line, layers, strict=True):
            one = said.get((measure, where))
            if one is None:
                axes.axis("off")
                continue
            make(axes, one)
            axes.yaxis.set_major_formatter(lambda value, _: _number(value))
            clean_axes(axes, f"{title}, {_where(where).replace(chr(10), ' ')}")
    return figure


def _by_place(said: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], Mapping[str, Any]]:
    return {(one["measure"], one["where"]): one for one in said}


def _number(value: float) -> str:
    """In few letters.

    >>> _number(9420.0), _number(-0.2641), _number(1.6e6)
    ('9420', '-0.264', '1.6e6')
    """
    return f"{value:.0f}" if 100 <= abs(value) < 1e5 else f"{value:.3g}".replace("e+0", "e")


def _color(label: int, example: Mapping[str, Any]) -> str:
    """By what a class is to a test image."""
    return OWN if label == example["class"] else OUTPUT if label == example["given"] else OTHER


def _short(classes: Iterable[str]) -> list[str]:
    return [name[:6] for name in classes]


def _where(name: str) -> str:
    return "whole\nnetwork" if name == NETWORK else f"layer {name}"
