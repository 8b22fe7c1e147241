"""What the seeds found, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from dualform.studies.balance import BOUND
from dualform.studies.estimate import Estimate, estimate
from dualform.studies.mnist.setting import WATCHED, MnistSetting
from dualform.studies.mnist.votes import MEASURES, NETWORK, STRONGEST
from dualform.studies.parts import Found
from dualform.studies.report import Cell, NumberTable

ASKED = {
    "right": "right images: how often the first class is theirs, %",
    "wrong, its class": "wrong images: how often the first class is theirs, %",
    "wrong, the output": "wrong images: how often the first class is the output, %",
}
"""What votes are asked, and the titles of their tables."""
ORDERED = ("keys", "keys strongest", "keys unscaled", "own relative", "evidence")
"""By which measures the order of classes is shown."""


@dataclass(frozen=True)
class MnistResults:
    """What was found with each seed."""

    setting: MnistSetting
    classes: Sequence[str]
    seeds: Sequence[Found]

    @cached_property
    def layers(self) -> list[str]:
        """The layers by name, in the order of the network, which comes last."""
        found = dict.fromkeys(one["where"] for one in self.seeds[0]["said"])
        return [*(name for name in found if name != NETWORK), NETWORK]

    @property
    def measures(self) -> list[str]:
        """Those that were asked, in the order of the tables."""
        asked = {one["measure"] for one in self.seeds[0]["said"]}
        return [name for name in MEASURES if name in asked]

    def votes(self, measure: str, where: str, asked: str) -> Estimate | None:
        """How often a vote was right, in percent; None where it was not asked."""
        return _mean(one["votes"][asked] for one in self._said(measure, where))

    def places(self, measure: str, where: str) -> list[Estimate] | None:
        """The mean place of each class, for images of the watched class."""
        found = [one["places"] for one in self._said(measure, where) if one["places"]]
        return [estimate(own) for own in zip(*found, strict=True)] if found else None

    def first(self, places: Sequence[Estimate], count: int) -> list[str]:
        """The classes that come first, by their mean places."""
        order = sorted(range(len(places)), key=lambda label: places[label].mean)
        return [self.classes[label] for label in order[:count]]

    @property
    def looked(self) -> tuple[int, ...]:
        """The classes whose places are given: of digits, also 1 and 8, as notes on the paper do."""
        return (WATCHED, *((1, 8) if self.setting.dataset == "mnist" else ()))

    def alike(self, measure: str, where: str, asked: str) -> Estimate | None:
        """Which share of the strongest images has the class of the test image, in percent."""
        found = (one for seed in self.seeds for one in seed["alike"])
        return _mean(
            one[asked] for one in found if (one["measure"], one["where"]) == (measure, where)
        )

    def tables(self) -> tuple[NumberTable, ...]:
        """All of them."""
        return (
            self._images(),
            *(self._votes(asked, title) for asked, title in ASKED.items()),
            self._places(),
            self._alike(),
            self._audit(),
        )

    def _said(self, measure: str, where: str) -> Iterator[Found]:
        for seed in self.seeds:
            for one in seed["said"]:
                if (one["measure"], one["where"]) == (measure, where):
                    yield one

    def _images(self) -> NumberTable:
        rows: list[tuple[Cell, ...]] = [
            ("right, of all test images, %", estimate((s["accuracy"] for s in self.seeds), 100))
        ]
        rows += [
            (f"{side} images that are asked about", estimate(s["asked"][side] for s in self.seeds))
            for side in ("right", "wrong")
        ]
        missed = max(seed["missed"] for seed in self.seeds)
        rows += [("of the change of outputs, all classes miss at most", missed)]
        return NumberTable("the networks, and what they are asked", ("", "mean"), tuple(rows))

    def _votes(self, asked: str, title: str) -> NumberTable:
        rows = [
            (MEASURES[name], *(self.votes(name, layer, asked) for layer in self.layers))
            for name in self.measures
        ]
        return NumberTable(title, ("the first class by", *self._columns), tuple(rows))

    def _places(self) -> NumberTable:
        rows: list[tuple[Cell, ...]] = []
        for measure in ORDERED:
            for layer, column in zip(self.layers, self._columns, strict=True):
                found = self.places(measure, layer)
                if found is not None:
                    first, own = ", ".join(self.first(found, 4)), (found[at] for at in self.looked)
                    rows.append((f"{MEASURES[measure]}, {column}", first, *own))
        return NumberTable(
            f"the order of classes, for right test images of {self.classes[WATCHED]}",
            ("ordered by", "the first", *(f"place of {self.classes[at]}" for at in self.looked)),
            tuple(rows),
            "By their mean place, from 1: over images, then over seeds.",
        )

    def _alike(self) -> NumberTable:
        rows = [
            (
                title,
                side,
                *(self.alike(measure, layer, side) for layer in self.layers if layer != NETWORK),
            )
            for measure, title in (("keys", "keys only"), ("given", "exact, for the output given"))
            for side in ("right", "wrong")
        ]
        return NumberTable(
            f"which share of the {STRONGEST} strongest training images has the class of the test "
            "image, %",
            ("strongest by", "test images", *self._columns[:-1]),
            tuple(rows),
        )

    def _audit(self) -> NumberTable:
        rows: list[tuple[Cell, ...]] = []
        for book in self.seeds[0]["audit"]["books"]:
            found = [seed["audit"]["books"][book] for seed in self.seeds]
            worst = max(found, key=lambda one: one["remainder"])
            kept = "yes" if worst["remainder"] <= BOUND else "no"
            rows.append((book, worst["remainder"], kept, worst["rounding"]))
        coverage = 100 * min(seed["audit"]["coverage"] for seed in self.seeds)
        return NumberTable(
            "do the books balance?",
            ("parameter", "largest remainder", f"at most {BOUND:.0e}", "what rounding can be"),
            tuple(rows),
            f"Relative to the change of the parameter, in {self.setting.training.steps:,} steps. "
            "What rounding can be: where every step rounds the stored weights by as much as it "
            f"can. Coverage: {coverage:.4g} % of the trained parameters by row.",
        )

    @property
    def _columns(self) -> list[str]:
        return ["whole network" if name == NETWORK else f"layer {name}" for name in self.layers]


def _mean(values: Iterator[float | None]) -> Estimate | None:
    """Of the seeds that have one, in percent."""
    found = [value for value in values if value is not None]
    return estimate(found, 100) if found else None
