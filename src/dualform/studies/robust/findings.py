"""Sentences that the numbers decide."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dualform.studies.comparison import precisely
from dualform.studies.estimate import Estimate
from dualform.studies.robust.results import RobustResults
from dualform.studies.robust.setting import ATTACKS, TRAININGS


def findings(results: RobustResults) -> tuple[str, ...]:
    """Whole sentences."""
    pairs = (_of_pair(results, *pair) for pair in results.setting.pairs())
    return (*pairs, *_strongest(results), *_sparse(results))


def _of_pair(results: RobustResults, layer: str, other: str) -> str:
    """How many differences are clear, and which way."""
    found = {
        f"{condition} after {training} training": results.gain(training, layer, other, condition)
        for training in TRAININGS
        for condition in results.setting.conditions()
    }
    if any(math.isnan(one.interval) for one in found.values()):
        return f"{layer} against {other}: no intervals, which need two seeds at least."
    better, worse = (
        {name: one for name, one in found.items() if sign * one.mean > one.interval}
        for sign in (1, -1)
    )
    said = f"{layer} against {other}: of {len(found)} differences, {len(better)} clearly gain"
    said += f" and {len(worse)} clearly lose"
    for kind, some in (("largest gain", better), ("largest loss", worse)):
        if some:
            name, one = max(some.items(), key=lambda item: abs(item[1].mean))
            said += f"; {kind}: {name}, {precisely(one)} points"
    return f"{said}."


def _strongest(results: RobustResults) -> Iterator[str]:
    """Whether an attack that knows the network still works, as it must unless gradients mislead."""
    for attack in ATTACKS[2:]:
        condition = f"{attack} {results.setting.strengths(attack)[-1]:g}"
        told = ", ".join(
            f"{layer} {precisely(results.right('clean', layer, condition))} %"
            for layer in results.setting.layers
        )
        yield f"Right answers under {condition} after clean training: {told}."


def _sparse(results: RobustResults) -> Iterator[str]:
    for layer in results.setting.layers:
        found = results.share("clean", layer, "S")
        keys = results.share("clean", layer, "K")
        if found is None or keys is None:
            continue
        yield (
            f"After clean training, {precisely(found)} % of what {layer} takes for corruption lies "
            f"in the quarter of tokens that is corrupted, and {precisely(keys)} % of the keys' "
            f"size{_against_chance(found)}."
        )


def _against_chance(found: Estimate) -> str:
    if math.isnan(found.interval):
        return ""
    if abs(found.mean - 25) <= found.interval:
        return "; by chance it would be 25 % as well"
    return f": {'more' if found.mean > 25 else 'less'} than the 25 % of chance"
