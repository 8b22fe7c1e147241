"""What the seeds found, as tables, sentences and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dualform.studies.comparison import (
    LayerComparison,
    clear_differences,
    cost_sentence,
    draw_differences,
    precisely,
)
from dualform.studies.drawing import clean_axes, pyplot
from dualform.studies.encoders import REFERENCE
from dualform.studies.estimate import Estimate, estimate
from dualform.studies.parts import Found
from dualform.studies.report import Cell, NumberTable, Picture
from dualform.studies.uea.training import ALL, HELD_OUT

PUBLISHED = {"JapaneseVowels": 98.7, "Handwriting": 32.0, "UWaveGestureLibrary": 85.6}
"""The column Transformer in the table of time series of Primal-Attention (Chen, Tao, Tonin and
Suykens, NeurIPS 2023), of which its public code says that it is the best accuracy: the epoch is
chosen by TEST."""
PROTOCOLS = {
    "four fifths, chosen epoch": (HELD_OUT, "best"),
    "four fifths, last epoch": (HELD_OUT, "last"),
    "all of TRAIN, last epoch": (ALL, "last"),
}
"""How a model comes about: what it is trained on, and which epoch's weights read TEST."""
COLORS = ("#9ecae1", "#4292c6", "#e07a1f")


@dataclass(frozen=True)
class UeaResults:
    """What was found on each set, with each seed, of each layer."""

    sizes: Mapping[str, tuple[int, int]]
    """How many samples TRAIN and TEST have."""
    seeds: Mapping[str, Sequence[Found]]
    costs: Mapping[str, Found]

    def comparison(self, name: str, protocol: str) -> LayerComparison:
        """The layers on a set, by one protocol."""
        trained, epoch = PROTOCOLS[protocol]
        values = {
            layer: [100 * float(one[layer][trained][epoch]) for one in self.seeds[name]]
            for layer in self.costs[name]
        }
        return LayerComparison(name, values)

    def tables(self) -> tuple[NumberTable, ...]:
        """Accuracies of each set, then what layers cost and how far apart their heads are."""
        return (*(self._accuracy(name) for name in self.sizes), self._costs())

    def _accuracy(self, name: str) -> NumberTable:
        comparisons = [self.comparison(name, protocol) for protocol in PROTOCOLS]
        rows = []
        for layer in self.costs[name]:
            cells: list[Cell] = [layer]
            for one in comparisons:
                cells += [one.reached(layer), one.difference(layer)]
            rows.append(tuple(cells))
        columns = [(protocol, "− softmax") for protocol in PROTOCOLS]
        train, test = self.sizes[name]
        note = f"{train} samples to train on, {test} to test on."
        if name in PUBLISHED:
            note += (
                f" Published for softmax at width 512, with the epoch chosen by TEST: "
                f"{PUBLISHED[name]}."
            )
        return NumberTable(
            f"{name}: accuracy on TEST, %",
            ("attention", *(title for pair in columns for title in pair)),
            tuple(rows),
            note,
        )

    def _costs(self) -> NumberTable:
        rows: list[tuple[Cell, ...]] = [
            (
                name,
                layer,
                self.distance(name, layer),
                estimate(cost["time"]),
                cost["flops"] / 1e6,
                cost["kept"] / 1e6,
            )
            for name, costs in self.costs.items()
            for layer, cost in costs.items()
        ]
        return NumberTable(
            "what layers cost, and how far apart their heads are",
            (
                "set",
                "attention",
                "head distance",
                "step time / softmax",
                "MFLOP a sample",
                "MB kept for backward",
            ),
            tuple(rows),
            "Head distance: of the models trained on all of TRAIN; √2 for unrelated directions. "
            "Times: medians of blocks of rounds in which every layer makes one step.",
        )

    def distance(self, name: str, layer: str) -> Estimate:
        """How far apart heads are, of the models that were trained on all of TRAIN."""
        return estimate(one[layer][ALL]["distance"] for one in self.seeds[name])

    def findings(self) -> tuple[str, ...]:
        """Whole sentences."""
        return (*self._differences(), *self._epochs(), *self._heads(), *self._costs_told())

    def _differences(self) -> Iterator[str]:
        for protocol in PROTOCOLS:
            found = clear_differences([self.comparison(name, protocol) for name in self.sizes])
            yield f"{protocol[0].upper()}{protocol[1:]}: {found[0].lower()}{found[1:]}"

    def _epochs(self) -> Iterator[str]:
        """How early the epoch is chosen, and what that costs."""
        for name, seeds in self.seeds.items():
            chosen = sorted(int(s[layer][HELD_OUT]["epoch"]) for s in seeds for layer in s)
            lost = estimate((_gained_by_the_last_epoch(one) for one in seeds), 100)
            yield (
                f"{name}: a fifth of TRAIN chooses epochs {chosen[0]} to {chosen[-1]}; the last "
                f"epoch of the same trainings is better on TEST by {precisely(lost)} points, mean "
                "over layers."
            )

    def _heads(self) -> Iterator[str]:
        for name, costs in self.costs.items():
            if REFERENCE not in costs:
                continue
            found = {layer: self.distance(name, layer) for layer in costs}
            told = ", ".join(f"{layer} {one}" for layer, one in found.items())
            yield f"{name}: the distance of heads is {told}."

    def _costs_told(self) -> Iterator[str]:
        for name, costs in self.costs.items():
            for told in cost_sentence(costs):
                yield f"{name}: {told[0].lower()}{told[1:]}"


def _gained_by_the_last_epoch(seed: Found) -> float:
    """By how much the last epoch is better on TEST than the chosen one, mean over layers."""
    held = [one[HELD_OUT] for one in seed.values()]
    return statistics.fmean(one["last"] - one["best"] for one in held)


def draw(results: UeaResults, out: Path) -> tuple[Picture, ...]:
    """Writes differences.png, where there is a softmax to differ from."""
    if not any(REFERENCE in costs and len(costs) > 1 for costs in results.costs.values()):
        return ()
    plt = pyplot()
    count = len(results.sizes)
    figure, grid = plt.subplots(
        1,
        count,
        figsize=(1.5 + 3.4 * count, 3.4),
        layout="constrained",
        sharey=True,
        squeeze=False,
    )
    for axes, name in zip(grid[0], results.sizes, strict=True):
        shifts = (0.22, 0.0, -0.22)
        for protocol, color, shift in zip(PROTOCOLS, COLORS, shifts, strict=True):
            draw_differences(axes, results.comparison(name, protocol), color, protocol, shift)
        clean_axes(axes, name, "accuracy − softmax's, same seed, points", grid=True)
    handles = grid[0][0].get_legend_handles_labels()
    columns = 3 if count > 1 else 1
    figure.legend(*handles, frameon=False, fontsize=9, loc="outside lower center", ncols=columns)
    figure.savefig(out / "differences.png", dpi=110, facecolor="white")
    plt.close(figure)
    caption = "Differences to softmax by protocol, with 95 % intervals over seeds."
    return (Picture("differences.png", caption),)
