"""Attention layers against softmax, seed by seed: what two studies tell in the same words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dualform.studies.drawing import INK
from dualform.studies.encoders import REFERENCE
from dualform.studies.estimate import Estimate, estimate


@dataclass(frozen=True)
class LayerComparison:
    """What each layer reached with each seed, in percent, in one place.

    >>> values = {"softmax": [90.0, 92.0], "centered": [91.0, 93.0]}
    >>> comparison = LayerComparison("digits", values)
    >>> print(comparison.reached("centered"), "|", comparison.difference("centered"))
    92 ± 13 | 1 ± 0
    """

    name: str
    values: Mapping[str, Sequence[float]]

    def reached(self, layer: str) -> Estimate:
        """The mean over seeds."""
        return estimate(self.values[layer])

    def difference(self, layer: str) -> Estimate | None:
        """The mean difference to softmax with the same seed; None where there is no softmax."""
        if REFERENCE not in self.values or layer == REFERENCE:
            return None
        pairs = zip(self.values[layer], self.values[REFERENCE], strict=True)
        return estimate(round(one - other, 9) for one, other in pairs)

    @property
    def differences(self) -> dict[str, Estimate]:
        """Of every layer but softmax."""
        found = {layer: self.difference(layer) for layer in self.values}
        return {layer: one for layer, one in found.items() if one is not None}


def precisely(found: Estimate) -> str:
    """An estimate with two digits of its interval: enough to see whether it leaves zero out.

    >>> precisely(Estimate(-1.24, 1.13, 10)), precisely(Estimate(1.0, 0.0, 2))
    ('-1.2 ± 1.1', '1 ± 0')
    """
    if math.isnan(found.interval) or found.interval == 0:
        return str(found)
    digits = max(0, 1 - math.floor(math.log10(found.interval)))
    return f"{found.mean:.{digits}f} ± {found.interval:.{digits}f}"


def clear_differences(comparisons: Sequence[LayerComparison]) -> str:
    """Which differences to softmax have intervals that leave zero out, as a sentence.

    >>> found = LayerComparison("digits", {"softmax": [90, 92], "linear": [91, 93]})
    >>> clear_differences([found])
    'Of 1 difference to softmax, 1 has a 95 % interval without 0: linear on digits, 1 ± 0.'
    >>> clear_differences([LayerComparison("digits", {"linear": [91, 93]})])
    'Softmax was not trained, so that no layer has anything to be compared with.'
    """
    found = [(c.name, layer, one) for c in comparisons for layer, one in c.differences.items()]
    if not found:
        return "Softmax was not trained, so that no layer has anything to be compared with."
    clear = [
        f"{layer} on {name}, {precisely(one)}"
        for name, layer, one in found
        if abs(one.mean) > one.interval
    ]
    plural = "s" if len(found) > 1 else ""
    counted = f"Of {len(found)} difference{plural} to softmax"
    if any(math.isnan(one.interval) for _, _, one in found):
        return f"{counted}, none has an interval: that needs two seeds at least."
    if not clear:
        return f"{counted}, none has a 95 % interval without 0."
    verb = "have" if len(clear) > 1 else "has"
    return f"{counted}, {len(clear)} {verb} a 95 % interval without 0: {'; '.join(clear)}."


def cost_sentence(costs: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """What each layer costs, as multiples of softmax's; nothing where there is no other layer.

    >>> plain, other = ({"flops": 2, "kept": 4, "time": [n, n]} for n in (1.0, 1.5))
    >>> cost_sentence({"softmax": plain, "linear": other})[0].partition("softmax's: ")[2]
    'linear 1.00, 1.00 and 1.5 ± 0.'
    """
    plain = costs.get(REFERENCE)
    if plain is None or len(costs) < 2:
        return ()
    told = ", ".join(
        f"{layer} {cost['flops'] / plain['flops']:.2f}, {cost['kept'] / plain['kept']:.2f} "
        f"and {estimate(cost['time'])}"
        for layer, cost in costs.items()
        if layer != REFERENCE
    )
    return (
        "Operations, memory kept for the backward pass and time of a step, as multiples of "
        f"softmax's: {told}.",
    )


def draw_differences(
    axes: Any, comparison: LayerComparison, color: str, label: str, shift: float = 0.0
) -> None:
    """Differences to softmax as points with their intervals, a row for each layer."""
    found = comparison.differences
    rows = [at + shift for at in range(len(found))]
    means = [one.mean for one in found.values()]
    errors = [0.0 if math.isnan(one.interval) else one.interval for one in found.values()]
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.errorbar(means, rows, xerr=errors, fmt="o", color=color, markersize=5, label=label or None)
    axes.set_yticks(range(len(found)), list(found))
    axes.set_ylim(len(found) - 0.5, -0.5)
