"""Amounts summed up as a page shows them: the strongest, the sides, the groups."""

from __future__ import annotations

from typing import Any

import numpy as np

from dualform.read.scores import Array

SHOWN = 12
CURVE = 120
"""At how many points the sorted contributions of a group are given."""


def largest(outputs: Array) -> list[dict[str, Any]]:
    """The outputs with most, largest first."""
    order = np.argsort(-outputs, kind="stable")[:SHOWN]
    return [{"output": int(at), "value": float(outputs[at])} for at in order]


def numbered(outputs: Array) -> list[dict[str, Any]]:
    """All outputs, by number."""
    return [{"output": at, "value": float(value)} for at, value in enumerate(outputs)]


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


def group(label: Any, amounts: Array) -> dict[str, Any]:
    """The sums of one label's samples, and a curve of their amounts, the largest first.

    >>> group("cat", np.array([-1.0, 3.0]))["curve"]
    [3.0, -1.0]
    """
    curve = np.sort(amounts)[::-1]
    points = np.linspace(0, len(curve) - 1, min(CURVE, len(curve))).round().astype(int)
    return {
        "label": label,
        "count": len(curve),
        "sum": float(curve.sum()),
        "for": float(curve[curve > 0].sum()),
        "against": float(curve[curve < 0].sum()),
        "curve": [float(f"{value:.5g}") for value in curve[points]],  # drawn, not read
    }
