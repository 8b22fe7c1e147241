"""What the study found, as tables and sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dualform.studies.estimate import Estimate, estimate
from dualform.studies.fixed_point.continuum import ATTRACTS_FROM, Growth, Path
from dualform.studies.fixed_point.dynamics import ATTRACT, CONTRACTIONS, FAR, REPEL, STILL
from dualform.studies.fixed_point.normality import Normality, Null
from dualform.studies.parts import Found
from dualform.studies.report import Cell, NumberTable

FEW = 40
VISIBLE = 0.01
KEPT = ("steps", "radius")
"""What is kept of Gaussian samples, by their size."""
DIGITS = {"kurtosis": 4, "energy": 6, "spread": 4, "radius": 4}
SIGNS = {ATTRACT: "values x", REPEL: "values −x"}


@dataclass(frozen=True)
class Trace:
    """One cloud, one contraction, one seed: measurements at some steps."""

    steps: tuple[int, ...]
    measured: tuple[Normality, ...]
    moved: float
    """How far tokens still moved in the last step, on average."""

    @classmethod
    def from_part(cls, part: Found) -> Trace:
        """As it was kept."""
        measured = tuple(Normality(**one) for one in part["measured"])
        return cls(tuple(part["steps"]), measured, float(part["moved"]))

    @property
    def fate(self) -> str:
        """In a word, where the cloud went."""
        last = self.measured[-1]
        if not last.scale < FAR / 100:
            return "runs away"
        if last.scale < 1e-3:
            return "vanishes"
        if last.clusters <= FEW:
            return "1 point" if last.clusters == 1 else f"{last.clusters} clusters"
        return "stays spread"


@dataclass(frozen=True)
class Cloud:
    """One start under one contraction with one sign, over several seeds."""

    start: str
    contraction: str
    sign: str
    traces: tuple[Trace, ...]

    @property
    def fates(self) -> str:
        """The fates of the seeds; clusters as a range."""
        fates = [trace.fate for trace in self.traces]
        counts = sorted(int(fate.split()[0]) for fate in fates if fate[0].isdigit())
        if len(counts) == len(fates):
            low, high = counts[0], counts[-1]
            return f"{low} to {high} clusters" if low < high else fates[0]
        return ", ".join(sorted(set(fates)))

    @property
    def is_still(self) -> bool:
        """Whether the tokens came to rest, with every seed."""
        return all(trace.moved < STILL for trace in self.traces)

    def last(self, name: str) -> Estimate | None:
        """A measurement at the end, over the seeds in which there is one."""
        values = [float(getattr(trace.measured[-1], name)) for trace in self.traces]
        finite = [round(value, DIGITS[name]) for value in values if math.isfinite(value)]
        return estimate(finite) if finite else None


@dataclass(frozen=True)
class FixedPointResults:
    """Everything that was found."""

    size: int
    width: int
    temperature: float
    line: Found
    stability: Found
    null: Null
    """Where Gaussian samples of this size lie."""
    clouds: Mapping[str, Sequence[Found]]
    sizes: Sequence[Found]

    @cached_property
    def growths(self) -> list[Growth]:
        """Factors of small cumulants."""
        return [Growth(**one) for one in self.line["growths"]]

    @cached_property
    def paths(self) -> list[Path]:
        """Densities on the line."""
        return [Path(**one) for one in self.line["paths"]]

    @cached_property
    def cells(self) -> list[Cloud]:
        """Clouds of tokens: sign by sign, contraction by contraction."""
        return [
            Cloud(start, name, sign, tuple(Trace.from_part(s[f"{sign} {name}"]) for s in seeds))
            for gain, sign in SIGNS.items()
            for name in CONTRACTIONS[gain]
            for start, seeds in self.clouds.items()
        ]

    def is_gaussian(self, cell: Cloud) -> bool:
        """Whether a cloud is as near to a Gaussian as samples of one are."""
        energy, radius = cell.last("energy"), cell.last("radius")
        if cell.fates != "stays spread" or energy is None or radius is None:
            return False
        return energy.mean <= self.null.energy and self.null.low <= radius.mean <= self.null.high

    def tables(self) -> tuple[NumberTable, ...]:
        """All of them."""
        return (
            self._growth_table(),
            self._path_table(),
            *(self._cloud_table(sign) for sign in SIGNS.values()),
            self._size_table(),
            self._sphere_table(),
            self._masses_table(),
        )

    def _growth_table(self) -> NumberTable:
        """One temperature a row would be long: those with a mean and deviation stand for all."""
        rows: list[tuple[Cell, ...]] = [
            (
                SIGNS[one.gain],
                one.order,
                one.temperature,
                one.mean,
                one.deviation,
                round(one.predicted, 6),
                round(one.measured, 6),
            )
            for one in self.growths
            if (one.mean, one.deviation) == (0, 1) or one.temperature == 3
        ]
        return NumberTable(
            "what one step multiplies a small cumulant of a Gaussian by",
            ("values", "order k", "T", "mean", "deviation", "predicted", "measured"),
            tuple(rows),
            "Predicted: 1 + a k/(τᵏ⁻²(a + τ)) with τ = T/deviation², a = 1 for values x and −1 for "
            "values −x. Mean and deviation are those that are restored after the step.",
        )

    def _path_table(self) -> NumberTable:
        rows: list[tuple[Cell, ...]] = [
            (
                SIGNS[path.gain],
                path.temperature,
                path.start,
                *(round(each, 4) for each in (path.skewness[0], path.skewness[-1])),
                *(round(each, 4) for each in (path.kurtosis[0], path.kurtosis[-1])),
                path.energy[-1],
            )
            for path in self.paths
        ]
        steps = len(self.paths[0].kurtosis) - 1
        return NumberTable(
            f"densities on a line, standardized, after {steps} steps",
            (
                "values",
                "T",
                "start",
                "skewness at first",
                "at last",
                "kurtosis at first",
                "at last ",
                "energy distance at last",
            ),
            tuple(rows),
        )

    def _cloud_table(self, sign: str) -> NumberTable:
        rows: list[tuple[Cell, ...]] = []
        for cell in (one for one in self.cells if one.sign == sign):
            point = cell.fates == "1 point"
            shape = (None if point else cell.last(name) for name in DIGITS)
            gaussian = "yes" if self.is_gaussian(cell) else "no"
            rows.append((cell.contraction, cell.start, cell.fates, *shape, gaussian))
        return NumberTable(
            f"{self.size:,} tokens of width {self.width}, {sign}",
            (
                "contraction",
                "start",
                "ends as",
                "kurtosis",
                "energy distance",
                "spread",
                "radius",
                "Gaussian",
            ),
            tuple(rows),
            f"Gaussian: stays spread, the energy distance is at most {self.null.energy:.1e}, and "
            f"the radius is {self.null.low:.2f} to {self.null.high:.2f}, as of 95 % of Gaussian "
            f"samples of this size. Spread: 1 round, {1 / self.width:.2g} a line. Radius: the "
            "variance of squared lengths over a Gaussian's; 0 on a sphere. The coordinates of a "
            f"uniform distribution on the sphere have a kurtosis of {-6 / (self.width + 2):.2f}.",
        )

    def _size_table(self) -> NumberTable:
        rows: list[tuple[Cell, ...]] = [
            (int(size), *(estimate(one[size][what] for one in self.sizes) for what in KEPT))
            for size in self.sizes[0]
        ]
        return NumberTable(
            "Gaussian samples by their size, standardized",
            ("tokens", f"values x: steps until {VISIBLE:g} away", "values −x: radius at the end"),
            tuple(rows),
        )

    def _sphere_table(self) -> NumberTable:
        rows: list[tuple[Cell, ...]] = [
            (
                one["temperature"],
                one["clusters"],
                round(one["within"], 4),
                one["between"] - 1 if one["between"] > 1 + 1e-9 else 0,
                "stable" if math.isinf(one["lifetime"]) else round(one["lifetime"], 1),
            )
            for one in self.stability["sphere"]
            if one["temperature"] / self.temperature in (0.5, 1, 2)
        ]
        return NumberTable(
            f"equal clusters at the corners of a simplex, on a sphere of width {self.width}",
            ("T", "clusters", "factor within", "factor between − 1", "steps to grow e times"),
            tuple(rows),
            "Within: what a step multiplies a token's distance to its cluster by. Between: the "
            "largest factor of a displacement of the clusters.",
        )

    def _masses_table(self) -> NumberTable:
        rows: list[tuple[Cell, ...]] = [
            (one["temperature"], _spans(one["two"]), _spans(one["three"]))
            for one in self.stability["line"]
        ]
        return NumberTable(
            "which clusters are stable on a standardized line, values x",
            ("T", "two: mass of the smaller, %", "three: mass of each outer one, %"),
            tuple(rows),
            "Masses on a grid of 0.5 % and of 0.25 %.",
        )

    def findings(self) -> tuple[str, ...]:
        """Sentences that the numbers decide."""
        return (
            *self._cumulants(),
            *self._line_ends(),
            *self._cloud_ends(),
            *self._by_size(),
            *self._stable_counts(),
        )

    def _cumulants(self) -> Iterator[str]:
        attract = [one for one in self.growths if one.gain == ATTRACT]
        repels = all(one.measured > 1 for one in attract)
        word = "No: a Gaussian is a fixed point that repels" if repels else "A Gaussian attracts"
        yield f"With values x, is the fixed point Gaussian? {word}."
        own = [one for one in self.growths if one.gain == REPEL]
        cool = [o for o in own if o.temperature / o.deviation**2 > ATTRACTS_FROM]
        holds = all(abs(one.measured) < 1 for one in cool)
        outside = [one for one in own if one not in cool and abs(one.measured) > 1]
        yield (
            f"With values −x a Gaussian {'attracts' if holds else 'does not attract'} at orders 3 "
            f"and 4 in all {len(cool)} cases with T/deviation² above (1 + √7)/2; below it, "
            f"{len(outside)} of {len(own) - len(cool)} factors exceed 1 in size."
        )
        worst = max(abs(o.measured - o.predicted) / max(1, abs(o.predicted)) for o in self.growths)
        yield (
            f"All {len(self.growths)} measured factors agree with the derived ones within "
            f"{worst:.0e} (relative to them where they exceed 1 in size)."
        )

    def _line_ends(self) -> Iterator[str]:
        for gain, sign in SIGNS.items():
            own = [path for path in self.paths if path.gain == gain]
            told = ", ".join(
                f"{p.start} {_signed(p.kurtosis[0])} → {_signed(p.kurtosis[-1])}" for p in own
            )
            yield f"On a line with {sign} and T = {own[0].temperature:g}, kurtosis goes: {told}."

    def _cloud_ends(self) -> Iterator[str]:
        for sign in SIGNS.values():
            own = [cell for cell in self.cells if cell.sign == sign]
            gaussian = [cell for cell in own if self.is_gaussian(cell)]
            named = ", ".join(f"{one.start} under {one.contraction}" for one in gaussian)
            still = sum(cell.is_still for cell in own)
            spread = sum(cell.fates == "stays spread" for cell in own)
            yield (
                f"With {sign}, {len(gaussian)} of {len(own)} clouds end as near to a Gaussian as "
                f"samples of one are{f' ({named})' if named else ''}; {spread} stay spread, and "
                f"{still} came to rest within the steps given."
            )

    def _by_size(self) -> Iterator[str]:
        told = ", ".join(
            f"{estimate(one[size]['radius'] for one in self.sizes)} with {int(size):,} tokens"
            for size in self.sizes[0]
        )
        yield (
            "With values −x and standardized coordinates, the radius of a Gaussian sample (1 for a "
            f"Gaussian, 0 for a sphere) becomes {told}."
        )

    def _stable_counts(self) -> Iterator[str]:
        sphere = self.stability["sphere"]
        drifting = {one["clusters"] for one in sphere if math.isfinite(one["lifetime"])}
        stable = sorted({one["clusters"] for one in sphere} - drifting)
        others = [one for one in sphere if one["clusters"] not in stable]
        longest = max(others, key=lambda one: one["lifetime"])
        shortest = min(others, key=lambda one: one["lifetime"])
        yield (
            "On a sphere with values x, stable numbers of equal clusters are: "
            f"{', '.join(map(str, stable))}. Others drift, e times as far in "
            f"{shortest['lifetime']:.2g} steps ({shortest['clusters']} at T = "
            f"{shortest['temperature']:g}) to {longest['lifetime']:.2g} ({longest['clusters']} at "
            f"T = {longest['temperature']:g})."
        )
        line = self.stability["line"]
        equal = all(any(high >= 0.5 for _, high in one["two"]) for one in line)
        thin = max((high for one in line for _, high in one["three"]), default=0.0)
        yield (
            "On a standardized line with values x, two equal clusters are "
            f"{'stable at every temperature' if equal else 'not stable at every temperature'} that "
            f"was tried; three are stable only where each outer one has at most {100 * thin:.2g} % "
            "of the mass."
        )


def _spans(ranges: Sequence[Sequence[float]]) -> str:
    """Ranges in percent.

    >>> _spans([[0.005, 0.06], [0.45, 0.5]]), _spans([])
    ('0.5 to 6, 45 to 50', 'none')
    """
    return ", ".join(f"{100 * low:.3g} to {100 * high:.3g}" for low, high in ranges) or "none"


def _signed(value: float) -> str:
    """With a sign; rounding has none.

    >>> _signed(-1.2), _signed(3e-12)
    ('−1.2', '0')
    """
    return "0" if abs(value) < 1e-9 else f"{value:+.2g}".replace("-", "−")
