"""What the seeds found, as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dualform.evaluate import LDS, GroundTruth, lds
from dualform.read.scores import Array
from dualform.studies.balance import balance_table
from dualform.studies.controls.experiment import CLASSES, ControlsSetting
from dualform.studies.controls.left_out import EXACT, TOP, VARIANTS
from dualform.studies.controls.measure import RANDOM, TRUE, UNTRAINED
from dualform.studies.controls.removal import ALL, CHANCE, CLASS
from dualform.studies.estimate import Estimate, estimate
from dualform.studies.parts import Found
from dualform.studies.report import Cell, NumberTable

SELF = "the network itself"
COLUMNS = {
    TRUE: (TRUE, "by label"),
    "random labels, by label": (RANDOM, "by label"),
    "random labels, by true class": (RANDOM, "by class"),
    UNTRAINED: (UNTRAINED, "by class"),
}
"""Networks, and what their training images are summed by."""
ASKED = {TRUE: TRUE, RANDOM: "random labels, by label"}
"""The columns of the networks that have exact reads, summed by the labels they were given."""


@dataclass(frozen=True)
class ControlsResults:
    """What was found with each seed, and by retraining."""

    setting: ControlsSetting
    networks: dict[str, list[Found]]
    """What was read of the networks of each kind."""
    truth: GroundTruth
    scores: Sequence[dict[str, Array]]
    """(samples, queries) for each read, of each seed's network on true labels."""
    at_random: Found
    removed: Sequence[Found]
    """What was lost of each query."""
    chosen: Sequence[int]
    """Which queries these are."""

    def tables(self) -> tuple[NumberTable, ...]:
        """All of them, in the order of the questions."""
        return (
            self._networks(),
            self._rates("target", "test digits whose class has the largest total, %"),
            self._rates("output", "test digits whose answer has the largest total, %"),
            self._asked(),
            self._errors(),
            self._agreements(),
            self._lds(),
            self._removals(),
            balance_table(
                {kind: [one["audit"] for one in self.networks[kind]] for kind in (TRUE, RANDOM)}
            ),
        )

    @cached_property
    def layers(self) -> list[str]:
        """The layers by name, in the order of the network."""
        return list(self.networks[TRUE][0]["left out"]["agreements"])

    @property
    def reads(self) -> list[str]:
        """Whose answers are compared: those of the layers, of the network, and of input space."""
        return list(self.networks[TRUE][0]["by label"])

    def rate(self, column: str, read: str, kind: str) -> Estimate | None:
        """How often a read's answer is the "target", or the network's "output", in percent."""
        which, labels = COLUMNS[column]
        if read == SELF:
            part = "tested" if kind == "target" else None
            return estimate(
                (one["accuracy"][part] if part else 1.0 for one in self.networks[which]), 100
            )
        found = [one[labels].get(read) for one in self.networks[which]]
        return None if None in found else estimate((one[kind] for one in found), 100)

    def asked(self, column: str, read: str, kind: str) -> Estimate:
        """How often the answer is the other class "asked for", or still the "output", in %."""
        return estimate((one["asked"][read][kind] for one in self.networks[column]), 100)

    @property
    def exact_reads(self) -> list[str]:
        """Those that are asked about an output."""
        return list(self.networks[TRUE][0]["asked"])

    def error(self, variant: str, layer: str) -> Estimate:
        """By how much the rebuilt weights of a layer miss, in percent of their change."""
        return self._left_out(lambda found: 100 * found["errors"][variant][layer])

    def agreement(self, variant: str, layer: str, kind: str) -> Estimate:
        """How well contributions agree with the exact ones: their "ranks", "signs" or "top"."""
        scale = 1 if kind == "ranks" else 100
        return self._left_out(lambda found: scale * found["agreements"][layer][variant][kind])

    def clipped(self, kind: str) -> Estimate:
        """The "share" of the steps that were clipped, in %, or what was "left" of gradients."""
        scale = 100 if kind == "share" else 1
        return self._left_out(lambda found: scale * found["clipped"][kind])

    def _left_out(self, part: Callable[[dict[str, Any]], float]) -> Estimate:
        return estimate(part(one["left out"]) for one in self.networks[TRUE])

    @cached_property
    def lds(self) -> dict[str, list[LDS]]:
        """The LDS of each read, of each seed's network."""
        return {
            name: [lds(one[name], self.truth) for one in self.scores] for name in self.scores[0]
        }

    @property
    def removers(self) -> list[str]:
        """What ranks the samples that are removed: reads, chance, and chance within the class."""
        return [*self.scores[0], CHANCE, CLASS]

    @cached_property
    def before(self) -> Array:
        """(queries, seeds, 2): margin and lead with all samples."""
        return np.array([self._of_query(self.at_random[ALL], query) for query in self.chosen])

    def after(self, remover: str, count: int) -> Array:
        """(queries, seeds, sets, 2): margin and lead without so many samples."""
        if remover == CHANCE:
            found = self.at_random[CHANCE][str(count)]
            return np.array(
                [[self._of_query(draws, query) for draws in found] for query in self.chosen]
            )
        return np.array([one[remover][str(count)] for one in self.removed])[:, :, None]

    def falls(self, remover: str, count: int) -> Array:
        """(queries,): by how much each margin falls, mean over seeds and sets."""
        found: Array = (self.before[:, :, None] - self.after(remover, count))[..., 0].mean((1, 2))
        return found

    def flips(self, remover: str, count: int) -> Array:
        """(queries,): how often a right answer turns wrong, of those that are right with all."""
        right, wrong = self.before[:, :, None, 1] >= 0, self.after(remover, count)[..., 1] < 0
        right = np.broadcast_to(right, wrong.shape)
        some = right.any((1, 2))
        found: Array = (right & wrong).sum((1, 2))[some] / right.sum((1, 2))[some]
        return found

    @staticmethod
    def _of_query(rows: Sequence[Sequence[float]], query: int) -> Array:
        """(rows, 2): margin and lead of one query, of outputs of all queries."""
        found: Array = np.array(rows).reshape(len(rows), 2, -1)[:, :, query]
        return found

    def _networks(self) -> NumberTable:
        epochs = {TRUE: self.setting.epochs, RANDOM: self.setting.memorizing, UNTRAINED: 0}
        rows: list[tuple[Cell, ...]] = [
            (
                kind,
                epochs[kind],
                *(
                    estimate((one["accuracy"][part] for one in found), 100)
                    for part in ("training", "test")
                ),
            )
            for kind, found in self.networks.items()
        ]
        columns = ("network", "epochs", "training labels right, %", "test digits right, %")
        return NumberTable("what the networks learned", columns, tuple(rows))

    def _rates(self, kind: str, title: str) -> NumberTable:
        rows: list[tuple[Cell, ...]] = [
            (read, *(self.rate(column, read, kind) for column in COLUMNS))
            for read in (SELF, *self.reads)
        ]
        return NumberTable(
            title,
            ("read", *COLUMNS),
            tuple(rows),
            f"Chance: 10. {CLASSES * self.setting.tested} test digits; the whole network is asked "
            f"about {CLASSES * self.setting.explained} of them. Exact reads are asked about the "
            "network's answer. An untrained network has no rows, so no exact read; its keys are "
            "compared once each. Sums and nearest in input space know no network.",
        )

    def _asked(self) -> NumberTable:
        rows: list[tuple[Cell, ...]] = [
            (
                column,
                read,
                self.rate(labels, read, "output"),
                self.asked(column, read, "asked for"),
                self.asked(column, read, "output"),
            )
            for column, labels in ASKED.items()
            for read in self.exact_reads
        ]
        columns = (
            "network",
            "read",
            "asked about its answer: that answer",
            "asked about another class: that class",
            "asked about another class: its answer",
        )
        return NumberTable(
            "which class has the largest total, by what a read is asked about, % of test digits",
            columns,
            tuple(rows),
            "The other class is drawn at random for each test digit.",
        )

    def _errors(self) -> NumberTable:
        rows: list[tuple[Cell, ...]] = [
            (name, *(self.error(name, layer) for layer in self.layers)) for name in VARIANTS
        ]
        return NumberTable(
            "weights rebuilt from rows: ‖W_rebuilt − W_T‖ / ‖W_T − W_0‖, %",
            ("coefficients", *(f"layer {layer}" for layer in self.layers)),
            tuple(rows),
            f"{self.clipped('share')} % of the steps were clipped, and {self.clipped('left')} of a "
            "gradient was left on average.",
        )

    def _agreements(self) -> NumberTable:
        rows: list[tuple[Cell, ...]] = [
            (
                name,
                layer,
                *(self.agreement(name, layer, kind) for kind in ("ranks", "signs", "top")),
            )
            for name in VARIANTS
            if name != EXACT
            for layer in self.layers
        ]
        columns = (
            "coefficients",
            "layer",
            "rank correlation",
            "same sign, %",
            f"same top {TOP}, %",
        )
        return NumberTable(
            "contributions of training images, against the exact ones", columns, tuple(rows)
        )

    def _lds(self) -> NumberTable:
        rows: list[tuple[Cell, ...]] = [
            (name, *_rounded(own[0].mean, *own[0].interval), estimate(one.mean for one in own))
            for name, own in self.lds.items()
        ]
        halves, repeats = self.truth.runs.shape[:2]
        return NumberTable(
            "does a read foretell retraining? LDS",
            ("read", "first network", "95 % from", "to", "all networks"),
            tuple(rows),
            f"{halves} halves, {repeats} networks on each, {self.truth.runs.shape[2]} test digits. "
            "The first interval is over halves and digits, the last over the networks that are "
            f"read. A perfect prediction would get {self.truth.ceiling:.2f}.",
        )

    def _removals(self) -> NumberTable:
        rows: list[tuple[Cell, ...]] = [
            (
                name,
                *(
                    cell
                    for count in self.setting.removed
                    for cell in (
                        estimate(self.falls(name, count)),
                        estimate(self.flips(name, count), 100),
                    )
                ),
            )
            for name in self.removers
        ]
        columns = tuple(
            name
            for count in self.setting.removed
            for name in (f"without {count}: margin falls by", f"without {count}: turns wrong, %")
        )
        return NumberTable(
            "what a prediction loses without the training images that a read ranks first",
            ("ranked by", *columns),
            tuple(rows),
            f"Means over {len(self.chosen)} test digits, one of each class: of its first "
            f"{self.setting.explained}, the one that is right with the least lead. With all images "
            f"their margin is {estimate(self.before[..., 0].mean(1))}.",
        )


def _rounded(*numbers: float) -> tuple[float, ...]:
    return tuple(round(number, 3) for number in numbers)
