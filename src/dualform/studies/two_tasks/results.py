"""What the seeds found, as tables and sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dualform.studies.books import books_table
from dualform.studies.estimate import Estimate, estimate
from dualform.studies.parts import Found
from dualform.studies.report import Cell, NumberTable
from dualform.studies.two_tasks.attention import NETWORK
from dualform.studies.two_tasks.measure import FORGOTTEN, KEPT
from dualform.studies.two_tasks.overwriting import CULPRITS, ROLES
from dualform.studies.two_tasks.tasks import OUTPUTS, TASKS, TwoTasksSetting

SIDES = {"digits": slice(0, OUTPUTS), "garments": slice(OUTPUTS, 2 * OUTPUTS)}
"""Where the classes of each task are."""


def attended(part: Sequence[Sequence[float]], training: str, test: str) -> float:
    """What test images of a task give to training images of a task, mean over their classes.

    It is rounded to what sums in float64 are good for.

    >>> attended(np.full((20, 20), 0.05), "digits", "garments")
    0.5
    """
    return round(float(np.array(part)[SIDES[training], SIDES[test]].sum(0).mean()), 9)


@dataclass(frozen=True)
class TwoTasksResults:
    """What was found with each seed."""

    setting: TwoTasksSetting
    together: Sequence[Found]
    sequences: Sequence[Found]

    @cached_property
    def reads(self) -> dict[str, list[dict[str, Any]]]:
        """What was read at a time, of each seed, by the name of the time."""
        setting = self.setting
        found = {f"together, step {setting.together:,}": list(self.together)}
        for step in (setting.switch, *setting.ends):
            which = "at the switch" if step == setting.switch else "in sequence"
            own = [sequence["reads"][str(step)] for sequence in self.sequences]
            found[f"{which}, step {step:,}"] = own
        return found

    @cached_property
    def layers(self) -> list[str]:
        """The layers by name, in the order of the network."""
        return [name for name in self.together[0]["attention"] if name != NETWORK]

    def stages(self, part: Callable[[dict[str, Any]], float]) -> list[Estimate]:
        """Something of what training digits built up, and of what came after until each end."""
        stages = [[one["built"] for one in self.sequences]]
        stages += [[one["stage"] for one in self.ends(end)] for end in self.setting.ends]
        return [estimate(map(part, stage)) for stage in stages]

    def ends(self, end: int) -> list[dict[str, Any]]:
        """What was overwritten until a step, of each seed."""
        return [one["ends"][str(end)] for one in self.sequences]

    def outcomes(self, part: Callable[[dict[str, Any]], float]) -> list[Estimate | None]:
        """Something of the digits that were forgotten, and kept, at each end; None without any."""
        found: list[Estimate | None] = []
        for end in self.setting.ends:
            for name in (FORGOTTEN, KEPT):
                values = [part(one[name]) for one in self.ends(end) if one[name]["of"]]
                found.append(estimate(values) if values else None)
        return found

    def tables(self) -> tuple[NumberTable, ...]:
        """All of them."""
        return (
            self._accuracy(),
            *(self._shares(test) for test in TASKS),
            *(self._signed(test) for test in TASKS),
            self._overwriting(),
            self._margins(),
            books_table(
                {
                    "together": [one["audit"] for one in self.together],
                    "in sequence": [one["audit"] for one in self.sequences],
                }
            ),
        )

    def _accuracy(self) -> NumberTable:
        rows: list[tuple[Cell, ...]] = [
            (name, *(estimate((r["accuracy"][task] for r in reads), 100) for task in TASKS))
            for name, reads in self.reads.items()
        ]
        return NumberTable("test images that are right, %", ("read", *TASKS), tuple(rows))

    def _shares(self, test: str) -> NumberTable:
        rows: list[tuple[Cell, ...]] = [
            (
                "visits in training",
                *(estimate((r["visits"] for r in reads), 100) for reads in self.reads.values()),
            )
        ]
        for measure, title in (("keys", "keys only"), ("sizes", "exact")):
            for layer in [*self.layers, *([NETWORK] if measure == "sizes" else [])]:
                where = "whole network" if layer == NETWORK else f"layer {layer}"
                rows.append((f"{title}, {where}", *self.shares(measure, layer, test)))
        return NumberTable(
            f"share of the attention of test {test} that training digits get, %",
            ("attention", *self.reads),
            tuple(rows),
            "Training garments get the rest. Exact: of the sum of the sizes of all contributions "
            "to the output for the true class.",
        )

    def shares(self, measure: str, layer: str, test: str) -> list[Estimate]:
        """The share that digits get of the attention of test images, in percent, at each read."""
        return [
            estimate((attended(r["attention"][layer][measure], "digits", test) for r in reads), 100)
            for reads in self.reads.values()
        ]

    def _signed(self, test: str) -> NumberTable:
        rows: list[tuple[Cell, ...]] = []
        for name, reads in self.reads.items():
            for layer in [*self.layers, NETWORK]:
                found = [r["attention"][layer] for r in reads]
                where = "whole network" if layer == NETWORK else f"layer {layer}"
                ends = [
                    estimate(float(np.mean(one[part][SIDES[test]])) for one in found)
                    for part in ("initial", "total")
                ]
                sums = (
                    estimate(attended(one["signed"], task, test) for one in found) for task in TASKS
                )
                rows.append((name, where, ends[0], *sums, ends[1]))
        return NumberTable(
            f"what the output of test {test} for their class is made of",
            ("read", "where", "before training", "digits", "garments", "output"),
            tuple(rows),
            "Sums of signed contributions, in units of the output. A layer is asked along the "
            "gradient of that output, given its input.",
        )

    def _overwriting(self) -> NumberTable:
        switch = self.setting.switch
        ends = (f"switch to step {end:,}" for end in self.setting.ends)
        rows: list[tuple[Cell, ...]] = [("output before", *self.stages(lambda s: s["before"]))]
        rows += [(name, *self.stages(entry("roles", name))) for name in ROLES]
        rows += [
            ("all digits", *self.stages(digits_part)),
            ("all garments", *self.stages(garments_part)),
            ("output after", *self.stages(lambda s: s["after"])),
            ("remainder", *self.stages(stage_remainder)),
        ]
        rows += [
            (f"through layer {name}", *self.stages(entry("layers", name))) for name in self.layers
        ]
        return NumberTable(
            "how the output of test digits for their class changed, and by which training images",
            ("part", f"start to switch, step {switch:,}", *ends),
            tuple(rows),
            "Through the whole network. The parts by training images add up to the change, and so "
            "do the parts by layer. Digits after the switch: what momentum carried over.",
        )

    def _margins(self) -> NumberTable:
        rows: list[tuple[Cell, ...]] = [
            ("test digits", *self.outcomes(lambda one: one["of"])),
            ("margin at the switch", *self.outcomes(lambda one: one["before"])),
        ]
        rows += [(name, *self.outcomes(entry("culprits", name))) for name in CULPRITS]
        rows += [("margin after", *self.outcomes(lambda one: one["after"]))]
        rows += [
            (f"through layer {name}", *self.outcomes(entry("layers", name))) for name in self.layers
        ]
        strongest = self.outcomes(lambda one: 100 * one["rival is strongest"])
        rows += [("rival's garments take most, % of digits", *strongest)]
        names = [f"{name}, step {end:,}" for end in self.setting.ends for name in (FORGOTTEN, KEPT)]
        return NumberTable(
            "margins of test digits that were right at the switch",
            ("part", *names),
            tuple(rows),
            "The margin is the output for the digit's class minus that for its rival: the class it "
            f"is taken for, or the next best. Means over the first "
            f"{self.setting.explained_margins:,} digits of each kind.",
        )


def entry(part: str, name: str) -> Callable[[dict[str, Any]], float]:
    """Takes one number out of a part of what was found.

    >>> entry("layers", "0")({"layers": {"0": 1.5}})
    1.5
    """
    return lambda found: float(found[part][name])


def digits_part(stage: dict[str, Any]) -> float:
    """What digits changed of an output."""
    return float(sum(stage["roles"][name] for name in ROLES[:2]))


def garments_part(stage: dict[str, Any]) -> float:
    """What garments changed of an output."""
    return float(sum(stage["roles"][name] for name in ROLES[2:]))


def stage_remainder(stage: dict[str, Any]) -> float:
    """What no training image accounts for: rounding, and the error of the integration."""
    return float(stage["after"] - stage["before"] - digits_part(stage) - garments_part(stage))
