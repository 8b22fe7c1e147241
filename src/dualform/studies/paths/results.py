"""What the seeds found, as tables and as sentences that the numbers decide."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dualform.evaluate.ranks import spearman
from dualform.studies.estimate import Estimate, differs, estimate
from dualform.studies.parts import Found
from dualform.studies.paths.pruning import METHODS
from dualform.studies.paths.setting import PathsSetting
from dualform.studies.report import Cell, NumberTable

PROCESS = "Gaussian process"
NEEDED = "paths, N = head"
"""The method whose scores are compared with the others'."""


@dataclass(frozen=True)
class PathsResults:
    """What was found with each seed."""

    setting: PathsSetting
    chains: Sequence[Found]
    pruning: Sequence[Found]

    @property
    def kernels(self) -> tuple[str, ...]:
        """What predicted chains."""
        return (PROCESS, *(f"N = {n}" for n in self.setting.widths))

    def chain(self, noise: float, kernel: str, what: str = "accuracy") -> Estimate:
        """Something of a kernel at a noise."""
        return estimate(one[f"{noise:g}"][kernel][what] for one in self.chains)

    def gain(self, noise: float, kernel: str) -> Estimate:
        """How much more accurate a kernel is than the Gaussian process, with the same seeds."""
        return estimate(
            one[f"{noise:g}"][kernel]["accuracy"] - one[f"{noise:g}"][PROCESS]["accuracy"]
            for one in self.chains
        )

    def agreement(self, method: str, truth: str = "ablation") -> Estimate:
        """The rank correlation of scores and of what is lost without each head."""
        return estimate(_ranks(one, method, truth) for one in self.pruning)

    def better(self, method: str, other: str) -> Estimate:
        """How much more a method's scores agree with ablation than another's."""
        return estimate(
            _ranks(one, method, "ablation") - _ranks(one, other, "ablation") for one in self.pruning
        )

    def pruned(self, method: str, count: int) -> Estimate:
        """The accuracy without the heads of the lowest scores."""
        return estimate(one["pruned"][method][count] for one in self.pruning)

    def of_networks(self, what: Callable[[Found], float]) -> Estimate:
        """Something of the trained networks."""
        return estimate(map(what, self.pruning))

    def tables(self) -> tuple[NumberTable, ...]:
        """All tables."""
        return self._chains(), self._gains(), self._agreement(), self._pruned()

    def _chains(self) -> NumberTable:
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (noise, *(self.chain(noise, kernel) for kernel in self.kernels))
            for noise in self.setting.noises
        )
        return NumberTable("hidden chains: test accuracy", ("noise", *self.kernels), rows)

    def _gains(self) -> NumberTable:
        narrow = self.kernels[1]
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (noise, self.gain(noise, narrow), self.chain(noise, narrow, "cosine"))
            for noise in self.setting.noises
        )
        return NumberTable(
            f"hidden chains: {narrow} against the Gaussian process",
            ("noise", "accuracy, difference", "U₁₂ / √(U₁₁ U₂₂)"),
            rows,
            "A negative correlation of both paths takes the noise of one from that of the other.",
        )

    def _agreement(self) -> NumberTable:
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (method, self.agreement(method), self.agreement(method, "fall")) for method in METHODS
        )
        names = ("score", "rank correlation with loss", "rank correlation with accuracy")
        return NumberTable(
            "head scores against what is lost without each head",
            names,
            rows,
            f"Spearman over the {self.setting.layers * self.setting.heads} heads of each network.",
        )

    def _pruned(self) -> NumberTable:
        count = self.setting.layers * self.setting.heads
        shown = sorted({0, count // 4, count // 2, 3 * count // 4, count})
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (method, *(self.pruned(method, n) for n in shown)) for method in METHODS
        )
        return NumberTable(
            "test accuracy without the heads of the lowest scores",
            ("score", *(f"{n} left out" for n in shown)),
            rows,
        )

    def findings(self) -> tuple[str, ...]:
        """All sentences."""
        return (*self._of_chains(), *self._of_pruning())

    def _of_chains(self) -> Iterator[str]:
        narrow = self.kernels[1]
        gains = {noise: self.gain(noise, narrow) for noise in self.setting.noises}
        wins = [f"{n:g} ({g})" for n, g in gains.items() if differs(g) and g.mean > 0]
        loses = [f"{n:g} ({g})" for n, g in gains.items() if differs(g) and g.mean < 0]
        yield (
            f"Renormalized kernels ({narrow}) are more accurate than the Gaussian process beyond "
            f"chance at noise {', '.join(wins) or 'none'}; less at {', '.join(loses) or 'none'}."
        )
        last = self.setting.noises[-1]
        each = ", ".join(f"{name} {self.chain(last, name)}" for name in self.kernels)
        yield f"At noise {last:g} accuracies are: {each}."

    def _of_pruning(self) -> Iterator[str]:
        accuracy = self.of_networks(lambda one: float(one["accuracy"]))
        each = ", ".join(f"{method} {self.agreement(method)}" for method in METHODS)
        yield (
            f"Of trained networks (test accuracy {accuracy}), scores have this rank correlation "
            f"with the loss that each head's absence costs: {each}."
        )
        for other in METHODS[2:]:
            gap = self.better(NEEDED, other)
            than = "more than" if gap.mean > 0 else "less than"
            said = f"{than} {other}" if differs(gap) else f"as {other} does, within chance"
            yield f"Scores by paths (N = head) agree with ablation {said}: {gap}."


def _ranks(found: Found, method: str, truth: str) -> float:
    columns = (np.array(values)[:, None] for values in (found["scores"][method], found[truth]))
    return float(spearman(*columns)[0])
