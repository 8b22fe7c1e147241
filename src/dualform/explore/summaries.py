"""Amounts summed up as a page shows them: the strongest, the sides, the groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualform.explore.cards import sample_cards
from dualform.explore.contract import CheckParts, GroupView, OutputValue, SideName, SideView
from dualform.read import Check, Run
from dualform.read.scores import Array

SHOWN = 12
CURVE = 120
"""At how many points the sorted contributions of a group are given."""


def largest(outputs: Array) -> list[OutputValue]:
    """The outputs with most, largest first."""
    order = np.argsort(-outputs, kind="stable")[:SHOWN]
    return [{"output": int(at), "value": float(outputs[at])} for at in order]


def ranked(amounts: Array, side: str) -> list[int]:
    """The samples of one side, the strongest first."""
    order = np.argsort(-amounts if side == "for" else amounts, kind="stable")
    chosen = amounts[order] > 0 if side == "for" else amounts[order] < 0
    found: list[int] = order[chosen].tolist()
    return found


def strongest(amounts: Array, side: str) -> list[int]:
    """The first few of those, without ranking all."""
    if len(amounts) <= SHOWN:
        return ranked(amounts, side)
    sizes = amounts if side == "for" else -amounts
    least = np.partition(sizes, -SHOWN)[-SHOWN]
    some = np.flatnonzero(sizes >= least)
    found: list[int] = some[ranked(amounts[some], side)][:SHOWN].tolist()
    return found


def sides(run: Run, amounts: Array) -> dict[SideName, SideView]:
    """The evidence for and against: its sum, and the strongest samples."""
    found: dict[SideName, SideView] = {}
    members: dict[SideName, NDArray[np.bool_]] = {"for": amounts > 0, "against": amounts < 0}
    for side, own in members.items():
        found[side] = {
            "sum": float(amounts[own].sum()),
            "count": int(own.sum()),
            "samples": sample_cards(run, strongest(amounts, side), amounts),
        }
    return found


def check_parts(check: Check | None) -> CheckParts | None:
    """How the parts of a single query add up."""
    if check is None:
        return None
    return {
        "initial": float(check.initial[0]),
        "evidence": float(check.evidence[0]),
        "by_step": float(check.steps[0]),
        "remainder": float(check.remainder[0]),
        "total": float(check.total[0]),
    }


def groups(amounts: Array, members: Mapping[Any, NDArray[np.int64]]) -> list[GroupView]:
    """The sums of each label's samples, and a curve of their amounts, the largest first.

    >>> groups(np.array([-1.0, 3.0]), {"cat": np.array([0, 1])})[0]["curve"]
    [3.0, -1.0]
    """
    found: list[GroupView] = []
    for label, places in members.items():
        curve = np.sort(amounts[places])[::-1]
        points = np.linspace(0, len(curve) - 1, min(CURVE, len(curve))).round().astype(int)
        found.append(
            {
                "label": label,
                "count": len(curve),
                "sum": float(curve.sum()),
                "for": float(curve[curve > 0].sum()),
                "against": float(curve[curve < 0].sum()),
                "curve": [float(f"{value:.5g}") for value in curve[points]],  # drawn, not read
            }
        )
    return found
