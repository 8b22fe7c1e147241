"""What the seeds found, as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dualform.studies.estimate import Estimate, estimate
from dualform.studies.parts import Found
from dualform.studies.report import Cell, NumberTable
from dualform.studies.robust.setting import TRAININGS, RobustSetting


@dataclass(frozen=True)
class RobustResults:
    """What was found of each layer after each training, with each seed."""

    setting: RobustSetting
    trained: Mapping[tuple[str, str], Sequence[Found]]
    """By training and layer."""
    costs: Found

    def right(self, training: str, layer: str, condition: str) -> Estimate:
        """The share of right answers, in percent."""
        return estimate(100 * one["right"][condition] for one in self.trained[training, layer])

    def gain(self, training: str, layer: str, other: str, condition: str) -> Estimate:
        """By how many points a layer is better than another with the same seed."""
        pairs = zip(self.trained[training, layer], self.trained[training, other], strict=True)
        differences = (a["right"][condition] - b["right"][condition] for a, b in pairs)
        return estimate(round(100 * one, 9) for one in differences)

    def share(self, training: str, layer: str, part: str) -> Estimate | None:
        """What percentage of S or K lies in keys of corrupted tokens; None without rounds."""
        found = [one["sparse"] for one in self.trained[training, layer]]
        values = [100 * one[part] for one in found if one is not None]
        values = [value for value in values if not math.isnan(value)]
        return estimate(values) if values else None

    def tables(self) -> tuple[NumberTable, ...]:
        """Answers and gains after each training, and what layers cost."""
        each = (table for t in TRAININGS for table in (self._answers(t), self._gains(t)))
        return (*each, self._layers())

    def _answers(self, training: str) -> NumberTable:
        layers = self.setting.layers
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (condition, *(self.right(training, layer, condition) for layer in layers))
            for condition in self.setting.conditions()
        )
        title = f"Right answers after {training} training, %"
        return NumberTable(title, ("test images", *layers), rows)

    def _gains(self, training: str) -> NumberTable:
        pairs = self.setting.pairs()
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (condition, *(self.gain(training, *pair, condition) for pair in pairs))
            for condition in self.setting.conditions()
        )
        title = f"Gains by the rounds after {training} training, points"
        names = (f"{layer} − {other}" for layer, other in pairs)
        return NumberTable(title, ("test images", *names), rows)

    def _layers(self) -> NumberTable:
        rows: list[tuple[Cell, ...]] = []
        for layer in self.setting.layers:
            cost = self.costs[layer]
            shares = (self.share(t, layer, part) for t in TRAININGS for part in ("S", "K"))
            rows.append((layer, estimate(cost["time"]), cost["flops"] / 1e6, *shares))
        columns = (
            "attention",
            f"step time / {self.setting.layers[0]}",
            "MFLOP an image",
            *(f"% of {part}, {training}" for training in TRAININGS for part in ("S", "K")),
        )
        note = (
            "% of S and of K: what share of their entries' sizes, in the first layer, lies in the "
            "keys of corrupted tokens, when a quarter of the tokens is corrupted."
        )
        return NumberTable("Costs, and where S is", columns, tuple(rows), note)
