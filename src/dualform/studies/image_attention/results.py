"""What the seeds found, as a table, sentences and a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dualform.studies.comparison import (
    LayerComparison,
    clear_differences,
    cost_sentence,
    draw_differences,
    precisely,
)
from dualform.studies.drawing import INK, clean_axes, pyplot
from dualform.studies.encoders import REFERENCE
from dualform.studies.estimate import Estimate, estimate
from dualform.studies.parts import Found
from dualform.studies.report import Cell, NumberTable, Picture

COLORS = {"time": "#1b6ca8", "flops": "#e07a1f", "kept": "#3a8f5c"}
NAMES = {"time": "time of a step", "flops": "operations", "kept": "memory kept for backward"}


@dataclass(frozen=True)
class ImageResults:
    """What was found of each layer, with each seed."""

    dataset: str
    trained: Mapping[str, Sequence[Found]]
    costs: Found

    @property
    def comparison(self) -> LayerComparison:
        """Accuracies, in percent."""
        values = {
            layer: [100 * float(one["accuracy"]) for one in found]
            for layer, found in self.trained.items()
        }
        return LayerComparison(self.dataset, values)

    def distance(self, layer: str) -> Estimate:
        """How far apart heads are, relative to the length of their outputs."""
        return estimate(one["distance"] for one in self.trained[layer])

    @property
    def distances(self) -> LayerComparison:
        """The same, in percent of √2, which unrelated directions have."""
        values = {
            layer: [100 * float(one["distance"]) / math.sqrt(2) for one in found]
            for layer, found in self.trained.items()
        }
        return LayerComparison(self.dataset, values)

    def tables(self) -> tuple[NumberTable, ...]:
        """One row for each layer."""
        rows: list[tuple[Cell, ...]] = [
            (
                layer,
                self.comparison.reached(layer),
                self.comparison.difference(layer),
                self.distance(layer),
                estimate(cost["time"]),
                cost["flops"] / 1e6,
                cost["kept"] / 1e6,
            )
            for layer, cost in self.costs.items()
        ]
        columns = (
            "attention",
            "right, %",
            "− softmax",
            "head distance",
            "step time / softmax",
            "MFLOP an image",
            "MB kept for backward",
        )
        note = (
            "Head distance: √2 for unrelated directions, 0 for heads that repeat each other. "
            "Times: medians of blocks of rounds in which every layer makes one step."
        )
        return (NumberTable(f"{self.dataset}: test images", columns, tuple(rows), note),)

    def findings(self) -> tuple[str, ...]:
        """Whole sentences."""
        return (clear_differences([self.comparison]), *self._heads(), *cost_sentence(self.costs))

    def _heads(self) -> Iterator[str]:
        for layer, found in self.distances.differences.items():
            if math.isnan(found.interval):
                continue
            clear = "" if abs(found.mean) > found.interval else ", which may be nothing"
            word = "farther apart" if found.mean > 0 else "closer together"
            size = Estimate(abs(found.mean), found.interval, found.count)
            yield (
                f"Heads of {layer} are {word} than those of softmax, by {precisely(size)} % of "
                f"√2{clear}."
            )


def draw(results: ImageResults, out: Path) -> tuple[Picture, ...]:
    """Writes layers.png, where there is a softmax to differ from."""
    if REFERENCE not in results.costs or len(results.costs) < 2:
        return ()
    plt = pyplot()
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(12, 3.4), layout="constrained", sharey=True
    )
    draw_differences(left, results.comparison, INK, "")
    clean_axes(left, "Accuracy", "difference to softmax, points", grid=True)
    draw_differences(middle, results.distances, INK, "")
    clean_axes(middle, "Distance of heads", "difference to softmax, % of √2", grid=True)
    layers = [layer for layer in results.costs if layer != REFERENCE]
    for cost, color in COLORS.items():
        own = {layer: np.mean(results.costs[layer][cost]) for layer in results.costs}
        ratios = [own[layer] / own[REFERENCE] for layer in layers]
        right.plot(ratios, range(len(layers)), "o", color=color, label=NAMES[cost])
    right.axvline(1, color=INK, linewidth=0.8)
    figure.legend(frameon=False, fontsize=8, loc="outside lower right", ncols=3)
    clean_axes(right, "Costs", "as multiples of softmax's", grid=True)
    figure.savefig(out / "layers.png", dpi=110, facecolor="white")
    plt.close(figure)
    caption = "Accuracy and distance of heads against softmax, with 95 % intervals, and costs."
    return (Picture("layers.png", caption),)
