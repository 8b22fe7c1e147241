"""What the seeds found, as numbers with intervals and as tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from dualform.diagnose import MaskGraph, mask_graph
from dualform.studies.collapse.setting import MASKS, NORMS, Architecture, CollapseSetting, kind_name
from dualform.studies.estimate import Estimate, estimate
from dualform.studies.parts import Found
from dualform.studies.report import Cell, NumberTable

FLOOR = 1e-12
"""Shares below this are rounding, in float64."""
DIGITS = 4
"""So many digits after the point are good in what is averaged."""
KINDS = tuple((norm, residual) for residual in (False, True) for norm in NORMS)
"""Norm and residual, without residuals first."""


def factor(values: Sequence[float]) -> float:
    """By what a block multiplies a share, in the geometric mean until it is rounding.

    >>> factor([1.0, 0.5, 0.25, 1e-16]), factor([1.0, 0.0])
    (0.5, 0.0)
    """
    small = (at for at, value in enumerate(values) if value < FLOOR * values[0])
    last = max(1, next(small, len(values)) - 1)
    return float((values[last] / values[0]) ** (1 / last))


def size(value: float) -> float:
    """The logarithm to base 10, of rounding where the value is less.

    >>> size(0.01), size(0.0)
    (-2.0, -12.0)
    """
    return math.log10(max(value, FLOOR))


@dataclass(frozen=True)
class CollapseResults:
    """What was found with each seed."""

    setting: CollapseSetting
    random_found: Sequence[Mapping[str, Found]]
    trained_found: Mapping[Architecture, Sequence[Found]]
    loss_of_frequencies: float
    """Of who knows how often each character is, and does not look around."""

    @property
    def width_qk(self) -> int:
        """The d_qk of tables that have only one."""
        return Architecture().width_qk

    def each(self, architecture: Architecture) -> list[Found]:
        """What was found of random networks, by seed."""
        return [seed[architecture.name] for seed in self.random_found]

    def random(self, architecture: Architecture, what: Callable[[Found], float]) -> Estimate:
        """Something of random networks."""
        return estimate(round(what(one), DIGITS) for one in self.each(architecture))

    def gap(
        self, one: Architecture, other: Architecture, what: Callable[[Found], float]
    ) -> Estimate:
        """How much more the second has, with the same seeds."""
        pairs = zip(self.each(one), self.each(other), strict=True)
        return estimate(round(what(b) - what(a), DIGITS) for a, b in pairs)

    def trained(self, architecture: Architecture, what: Callable[[Found], float]) -> Estimate:
        """Something of trained networks, of what was found before and after."""
        return estimate(round(what(one), DIGITS) for one in self.trained_found[architecture])

    def graph(self, mask: str) -> MaskGraph:
        """The graph of a mask among the tokens of the study."""
        return mask_graph(MASKS[mask](self.setting.tokens))

    def bound(self, mask: str, found: Found, blocks: int) -> float:
        """What the graph and the least weight let the range of tokens be, at most, but for C."""
        return self.graph(mask).bound(min(found["least"]), blocks)

    def promise(self, mask: str) -> Callable[[Found], float]:
        """log₁₀ of how far the bound's factor a block is below 1: `(1 − ε^r)^(1/r) ≈ 1 − ε^r/r`."""
        radius = self.graph(mask).radius or 1
        return lambda found: radius * math.log10(min(found["least"])) - math.log10(radius)

    def tables(self) -> tuple[NumberTable, ...]:
        """All tables, in the order of the questions."""
        return (
            self._attention_alone(),
            *(self._by_kind(title, what) for title, what in BY_KIND.items()),
            self._widths(),
            self._sharpness(),
            *self._trained(),
        )

    def _attention_alone(self) -> NumberTable:
        rows = []
        for mask in MASKS:
            one = Architecture(mask)
            numbers: list[Cell] = [
                self.random(one, what)
                for what in (
                    lambda found: math.log10(min(found["least"])),
                    self.promise(mask),
                    lambda found: max(found["contraction"]),
                    together_factor,
                    distance_factor,
                    relative_factor,
                )
            ]
            rows.append((mask, self.graph(mask).radius, *numbers))
        return NumberTable(
            "attention alone: by what a block multiplies differences",
            (
                "mask",
                "radius",
                "log₁₀ ε",
                "log₁₀ (1 − bound)",
                "contraction, largest",
                "all attention",
                "μ",
                "μ/‖X‖",
            ),
            tuple(rows),
            "No norm, no residual. ε is the least weight; bound is the bound's factor a block. All "
            "attention: Dobrushin's coefficient of the product of all weights, also a block.",
        )

    def _by_kind(self, title: str, what: Callable[[Found], float]) -> NumberTable:
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (mask, *(self.random(Architecture(mask, *kind), what) for kind in KINDS))
            for mask in MASKS
        )
        names = tuple(kind_name(*kind) for kind in KINDS)
        return NumberTable(
            f"{title} after {self.setting.depth} blocks",
            ("mask", *names),
            rows,
            NOTES.get(title, ""),
        )

    def _widths(self) -> NumberTable:
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (
                mask,
                kind_name(*kind),
                *(
                    self.random(Architecture(mask, *kind, width), relative_factor)
                    for width in self.setting.widths_qk
                ),
            )
            for mask in MASKS
            for kind in (("none", False), ("pre", True))
        )
        widths = (f"d_qk {width}" for width in self.setting.widths_qk)
        return NumberTable("by what a block multiplies μ/‖X‖", ("mask", "kind", *widths), rows)

    def _sharpness(self) -> NumberTable:
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (
                mask,
                *(
                    self.random(Architecture(mask, "pre", sharpness=sharpness), relative_factor)
                    for sharpness in self.setting.sharpnesses
                ),
            )
            for mask in MASKS
        )
        names = (f"scores {sharpness:g}" for sharpness in self.setting.sharpnesses)
        return NumberTable(
            "by what a block multiplies μ/‖X‖, by the size of scores",
            ("mask", *names),
            rows,
            "Pre-norm, no residual: scores of random tokens have this standard deviation.",
        )

    def _trained(self) -> Iterator[NumberTable]:
        tokens = {"log₁₀ μ/‖X‖": last_share, "stable rank": last("stable_rank")}
        others = {"contraction, mean of blocks": all_contraction, "loss": loss}
        for title, columns, note in (
            (f"tokens after {self.setting.trained_depth} trained blocks", tokens, ""),
            ("attention and loss", others, "The loss is in nats for a hidden character."),
        ):
            rows: tuple[tuple[Cell, ...], ...] = tuple(
                (
                    one.name_in_words,
                    *(
                        self.trained(one, at(when, what))
                        for what in columns.values()
                        for when in ("before", "after")
                    ),
                )
                for one in self.setting.trained()
            )
            names = (f"{n}, {when}" for n in columns for when in ("untrained", "trained"))
            yield NumberTable(title, ("network", *names), rows, note)


def relative_factor(found: Found) -> float:
    """By what a block multiplies μ/‖X‖.

    >>> relative_factor({"relative": [0.8, 0.4]})
    0.5
    """
    return factor(found["relative"])


def distance_factor(found: Found) -> float:
    """By what a block multiplies μ.

    >>> distance_factor({"distance": [4.0, 8.0]})
    2.0
    """
    return factor(found["distance"])


def together_factor(found: Found) -> float:
    """By what a block multiplies Dobrushin's coefficient of all attention so far.

    >>> together_factor({"together": [0.5, 0.25]})
    0.5
    """
    return factor([1.0, *found["together"]])


def all_contraction(found: Found) -> float:
    """The contraction of a block's attention, mean over blocks.

    >>> all_contraction({"contraction": [0.5, 1.0]})
    0.75
    """
    return fmean(found["contraction"])


def loss(found: Found) -> float:
    """How well hidden characters are told.

    >>> loss({"loss": 2.5})
    2.5
    """
    return float(found["loss"])


def last(name: str) -> Callable[[Found], float]:
    """A measure after the last block.

    >>> last("cosine")({"cosine": [0.1, 0.9]})
    0.9
    """
    return lambda found: float(found[name][-1])


def last_share(found: Found) -> float:
    """log₁₀ μ/‖X‖ after the last block.

    >>> last_share({"relative": [1.0, 0.01]})
    -2.0
    """
    return size(found["relative"][-1])


def at(when: str, what: Callable[[Found], float]) -> Callable[[Found], float]:
    """Something of a network before it was trained, or after.

    >>> at("after", loss)({"after": {"loss": 2.0}})
    2.0
    """
    return lambda found: what(found[when])


BY_KIND: dict[str, Callable[[Found], float]] = {
    "log₁₀ μ": lambda found: size(found["distance"][-1]),
    "log₁₀ μ/‖X‖": last_share,
    "stable rank": last("stable_rank"),
    "mean |cos|": last("cosine"),
}
NOTES = {"log₁₀ μ/‖X‖": f"{math.log10(FLOOR):g} is rounding: all tokens are one."}
