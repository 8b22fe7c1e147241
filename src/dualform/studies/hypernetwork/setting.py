"""How large the study is: the tasks, and the networks that are trained on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from dualform.studies.hypernetwork.fuzzy_logic import FuzzyLogic
from dualform.studies.hypernetwork.network import LAYERS
from dualform.studies.hypernetwork.raven import Raven

Given = TypeVar("Given", FuzzyLogic, Raven)

THREE = ("softmax", "linear", "HYLA")
"""The layers that the paper compares first."""


@dataclass(frozen=True)
class TrainingSetting(Generic[Given]):
    """A task, the networks that learn it, and for how long.

    >>> SETTINGS["small"].raven.task.name
    'raven'
    """

    task: Given
    width: int
    heads: int
    depth: int
    steps: int
    batch: int
    rate: float = 3e-3
    decay: float = 0.1
    layers: tuple[str, ...] = tuple(LAYERS)


@dataclass(frozen=True)
class HypernetworkSetting:
    """Both tasks, and with how many problems and seeds networks are measured.

    >>> [one.task.name for one in SETTINGS["small"].trainings]
    ['fuzzy_logic', 'raven']
    """

    fuzzy_logic: TrainingSetting[FuzzyLogic]
    raven: TrainingSetting[Raven]
    seeds: int = 3
    tests: int = 2000
    """Problems of each part that a network is tested on."""
    probed: int = 1000
    """Problems whose latent codes are probed."""
    tasks: tuple[str, ...] = (FuzzyLogic.name, Raven.name)
    """On which of both networks are trained."""
    shorter: int = 1
    """So many times fewer steps are made."""
    layers: tuple[str, ...] = ()
    """Which layers are trained beside softmax, in place of those that each task has here."""

    @property
    def trainings(self) -> tuple[TrainingSetting[Any], ...]:
        """The settings of the tasks."""
        both: tuple[TrainingSetting[Any], ...] = (self.fuzzy_logic, self.raven)
        chosen = tuple(dict.fromkeys(("softmax", *self.layers))) if self.layers else None
        return tuple(
            replace(one, steps=one.steps // self.shorter, layers=chosen or one.layers)
            for one in both
            if one.task.name in self.tasks
        )


SETTINGS = {
    "small": HypernetworkSetting(
        TrainingSetting(
            FuzzyLogic(variables=3, rows=16), width=32, heads=8, depth=2, steps=800, batch=64
        ),
        TrainingSetting(
            Raven(features=2), width=32, heads=8, depth=2, steps=800, batch=64, layers=THREE
        ),
    ),
    "tiny": HypernetworkSetting(
        TrainingSetting(
            FuzzyLogic(variables=3, rows=4), width=8, heads=2, depth=1, steps=3, batch=4
        ),
        TrainingSetting(
            Raven(features=2), width=8, heads=2, depth=2, steps=2, batch=4, layers=THREE
        ),
        seeds=2,
        tests=20,
        probed=40,
    ),
    "middle": HypernetworkSetting(
        TrainingSetting(FuzzyLogic(), width=64, heads=8, depth=2, steps=5000, batch=256),
        TrainingSetting(
            Raven(),
            width=128,
            heads=16,
            depth=4,
            steps=5000,
            batch=512,
            rate=1e-3,
            layers=THREE,
        ),
        tests=10_000,
        probed=2000,
    ),
    "paper": HypernetworkSetting(
        TrainingSetting(
            FuzzyLogic(), width=128, heads=8, depth=2, steps=50_000, batch=128, rate=1e-3
        ),
        TrainingSetting(Raven(), width=128, heads=16, depth=4, steps=156_250, batch=128, rate=1e-3),
        tests=16_000,
        probed=4000,
    ),
}
