"""What networks were right about, as tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from dualform.studies.comparison import LayerComparison
from dualform.studies.estimate import estimate
from dualform.studies.hypernetwork.setting import HypernetworkSetting, TrainingSetting
from dualform.studies.parts import Found
from dualform.studies.report import Cell, NumberTable

SCORE = {"fuzzy_logic": "R², %", "raven": "features right, %"}
"""What a score is, task by task."""


@dataclass(frozen=True)
class TaskResults:
    """What was found of each layer on one task, with each seed."""

    training: TrainingSetting[Any]
    trained: Mapping[str, Sequence[Found]]

    @property
    def name(self) -> str:
        """The task."""
        return str(self.training.task.name)

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that networks are tested on; all but the first are held out of training."""
        return tuple(self.training.task.parts[1:])

    def scores(self, part: str) -> LayerComparison:
        """How right each layer is on a part, in percent."""
        return self._compared(part, lambda found: found["scores"][part])

    def told(self, when: str = "trained") -> LayerComparison:
        """The percentage of rules that a probe tells from codes, "untrained" or "trained"."""
        return self._compared("probe", lambda found: found["probe"][when]["accuracy"])

    def chance(self) -> float:
        """The share of rules that is told without codes, in percent."""
        probes = (one["probe"]["trained"] for found in self.trained.values() for one in found)
        return fmean(100 * one["chance"] for one in probes)

    def _compared(self, name: str, of: Callable[[Found], float]) -> LayerComparison:
        values = {
            layer: [100 * float(of(one)) for one in found] for layer, found in self.trained.items()
        }
        return LayerComparison(f"{self.name}, {name}", values)


@dataclass(frozen=True)
class HypernetworkResults:
    """What was found on both tasks, and how many answers puzzles have."""

    setting: HypernetworkSetting
    tasks: tuple[TaskResults, ...]
    answers: Found

    def tables(self) -> tuple[NumberTable, ...]:
        """All tables, in the order of the questions."""
        return (
            *(self._scores(task) for task in self.tasks),
            *(self._differences(task) for task in self.tasks),
            self._probes(),
            self._answers(),
            self._by_rule(),
        )

    def _scores(self, task: TaskResults) -> NumberTable:
        rows: list[tuple[Cell, ...]] = [
            (
                layer,
                *(task.scores(part).reached(layer) for part in task.parts),
                estimate(one["loss"] for one in found),
            )
            for layer, found in task.trained.items()
        ]
        columns = ("layer", *task.parts, "training loss")
        return NumberTable(
            f"{task.name}: {SCORE[task.name]}", columns, tuple(rows), NOTES[task.name]
        )

    def _differences(self, task: TaskResults) -> NumberTable:
        rows: list[tuple[Cell, ...]] = [
            (layer, *(task.scores(part).difference(layer) for part in task.parts))
            for layer in task.trained
            if layer != "softmax"
        ]
        return NumberTable(
            f"{task.name}: {SCORE[task.name]}, minus softmax", ("layer", *task.parts), tuple(rows)
        )

    def _probes(self) -> NumberTable:
        rows: list[tuple[Cell, ...]] = [
            (
                task.name,
                layer,
                task.told("untrained").reached(layer),
                task.told().reached(layer),
                task.chance(),
            )
            for task in self.tasks
            for layer in task.trained
        ]
        return NumberTable(
            "rules that a probe tells from latent codes, %",
            ("task", "layer", "untrained", "trained", "without codes"),
            tuple(rows),
            "Of held-out problems of the part test. fuzzy_logic: which of the functions; raven: "
            "which of 8 rules an asked feature follows.",
        )

    def _answers(self) -> NumberTable:
        rows: list[tuple[Cell, ...]] = []
        own = self.setting.raven.task.features
        named = {f"any, {n} features": each for n, each in self.answers["features"].items()}
        named |= {f"{part}, {own} features": each for part, each in self.answers["parts"].items()}
        for name, counts in named.items():
            rows.append((name, *answer_shares(counts), len(counts) - 1))
        return NumberTable(
            "raven: puzzles by how many answers agree with the eight panels, %",
            ("puzzles", "1", "2", "3", "more", "most"),
            tuple(rows),
            "Before those with several answers are left out of the tests.",
        )

    def _by_rule(self) -> NumberTable:
        rows = tuple((rule, 100 * share) for rule, share in self.answers["rules"].items())
        return NumberTable(
            "raven: rows of one feature that several answers agree with, %",
            ("rule", "several"),
            rows,
        )


def answer_shares(counts: Sequence[int]) -> tuple[float, float, float, float]:
    """The percentages with one answer, two, three and more; counts are those with 0, 1, 2, …

    >>> answer_shares([0, 3, 0, 0, 1])
    (75.0, 0.0, 0.0, 25.0)
    """
    one, two, three, *more = [100 * count / sum(counts) for count in counts[1:]] + [0.0] * 3
    return one, two, three, sum(more)


NOTES = {
    "fuzzy_logic": "100 is right, 0 is to tell the mean always; combinations: new ones of known "
    "terms; terms: functions of new terms.",
    "raven": "12.5 is chance; rules: new combinations of known rules; permutations: columns that "
    "are matched as in no training puzzle.",
}
