"""The study in pictures: random networks, bounds, widths of queries, and trained networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualform.studies.collapse.results import (
    FLOOR,
    KINDS,
    CollapseResults,
    relative_factor,
)
from dualform.studies.collapse.setting import MASKS, NORMS, Architecture, kind_name
from dualform.studies.drawing import FAINT, INK, Drawing, clean_axes, save_drawings
from dualform.studies.parts import Found
from dualform.studies.report import Picture

COLORS = dict(zip(MASKS, ("#1b6ca8", "#e07a1f", "#3a8f5c", "#8e5ea2", "#b8405e"), strict=True))
OF_NORMS = dict(zip(NORMS, ("#8c8c8c", "#1b6ca8", "#e07a1f"), strict=True))


def draw(results: CollapseResults, out: Path) -> tuple[Picture, ...]:
    """Writes all pictures into a folder."""
    drawings: tuple[Drawing, ...] = (
        (
            "random.png",
            "μ/‖X‖ in random networks by depth, for each norm, with and without residuals.",
            lambda plt: _random(plt, results),
        ),
        (
            "bounds.png",
            "What tokens do under attention alone, what all attention so far lets them do, and "
            "what the mask's graph lets them do.",
            lambda plt: _bounds(plt, results),
        ),
        (
            "widths.png",
            "By what a block multiplies μ/‖X‖, for each d_qk and for each size of scores.",
            lambda plt: _widths(plt, results),
        ),
        (
            "trained.png",
            "μ/‖X‖ by depth before training and after.",
            lambda plt: _trained(plt, results),
        ),
    )
    return save_drawings(drawings, out)


def _clean(axes: Any, title: str, x: str = "", y: str = "") -> None:
    clean_axes(axes, title, x, y)
    axes.grid(True, color=FAINT, linewidth=0.5, alpha=0.6)


def _curve(axes: Any, curves: Sequence[Sequence[float]], start: int = 0, **style: Any) -> None:
    """The geometric mean over seeds by depth, between the least and the largest."""
    values: NDArray[np.float64] = np.maximum(np.array(curves, dtype=float), FLOOR)
    depth = np.arange(start, start + values.shape[1])
    axes.fill_between(depth, values.min(0), values.max(0), color=style["color"], alpha=0.15, lw=0)
    axes.plot(depth, np.exp(np.log(values).mean(0)), lw=style.pop("lw", 1.6), **style)


def _random(plt: Any, results: CollapseResults) -> Any:
    figure, grid = plt.subplots(
        2, 3, figsize=(10, 5.8), layout="constrained", sharex=True, sharey="row"
    )
    for axes, kind in zip(grid.flat, KINDS, strict=True):
        for mask, color in COLORS.items():
            found = results.each(Architecture(mask, *kind))
            _curve(axes, [one["relative"] for one in found], color=color, label=mask)
        axes.set_yscale("log")
        axes.minorticks_off()
        low = axes in grid[1]
        _clean(
            axes, kind_name(*kind), "blocks" if low else "", "μ/‖X‖" if kind[0] == "none" else ""
        )
    handles = grid[0, 0].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, fontsize=9, loc="outside lower center", ncols=5)
    return figure


def _bounds(plt: Any, results: CollapseResults) -> Any:
    figure, row = plt.subplots(
        1, len(MASKS), figsize=(12, 3.4), layout="constrained", sharex=True, sharey=True
    )
    depth = results.setting.depth
    for axes, mask in zip(row, MASKS, strict=True):
        found = results.each(Architecture(mask))
        color = COLORS[mask]
        bounds = [[results.bound(mask, one, t) for t in range(depth + 1)] for one in found]
        _curve(axes, bounds, color=INK, linestyle=":", label="bound of the graph")
        together = [[1.0, *one["together"]] for one in found]
        _curve(axes, together, color=INK, lw=1.0, label="all attention so far")
        shares = [[d / one["distance"][0] for d in one["distance"]] for one in found]
        _curve(
            axes, shares, color=color, linestyle="--", label="μ / μ of the first tokens (in color)"
        )
        axes.set_yscale("log")
        radius = results.graph(mask).radius
        _clean(axes, f"{mask}, radius {radius}", "blocks")
    handles, labels = row[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=9, loc="outside lower center", ncols=3)
    return figure


def _widths(plt: Any, results: CollapseResults) -> Any:
    figure, row = plt.subplots(1, 3, figsize=(11, 3.8), layout="constrained")
    setting = results.setting
    panels: list[tuple[str, str, Sequence[float], Callable[[str, Any], Architecture]]] = [
        (
            "attention alone",
            "d_qk",
            setting.widths_qk,
            lambda mask, width: Architecture(mask, width_qk=width),
        ),
        (
            "pre-norm, residual",
            "d_qk",
            setting.widths_qk,
            lambda mask, width: Architecture(mask, "pre", residual=True, width_qk=width),
        ),
        (
            "pre-norm, no residual",
            "deviation of scores",
            setting.sharpnesses,
            lambda mask, sharpness: Architecture(mask, "pre", sharpness=sharpness),
        ),
    ]
    for axes, (title, label, values, make) in zip(row, panels, strict=True):
        for mask, color in COLORS.items():
            found = [results.random(make(mask, value), relative_factor) for value in values]
            axes.errorbar(
                values,
                [one.mean for one in found],
                np.nan_to_num([one.interval for one in found]),
                color=color,
                label=mask,
                marker="o",
                markersize=4,
                capsize=2,
                lw=1.4,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.minorticks_off()
        _clean(axes, title, label, "times μ/‖X‖ a block" if axes is row[0] else "")
    handles = row[0].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, fontsize=9, loc="outside lower center", ncols=5)
    return figure


def _trained(plt: Any, results: CollapseResults) -> Any:
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(12, 4), layout="constrained", sharex=True
    )
    usual = Architecture(norm="pre", residual=True)
    for mask, color in COLORS.items():
        found = results.trained_found[replace(usual, mask=mask)]
        _before_and_after(left, found, color, mask)
    left.set_ylim(0, 1.02)
    _clean(left, "pre-norm, residual: by mask", "blocks", "μ/‖X‖")
    for axes, residual in ((middle, True), (right, False)):
        for norm, color in OF_NORMS.items():
            found = results.trained_found[Architecture(norm=norm, residual=residual)]
            _before_and_after(axes, found, color, "no norm" if norm == "none" else f"{norm}-norm")
        words = "residual" if residual else "no residual"
        _clean(axes, f"complete mask, {words}: by norm", "blocks")
    middle.set_ylim(0, 1.02)
    right.set_yscale("log")
    for axes in (left, middle, right):
        axes.plot([], [], color=INK, linestyle="--", label="untrained")
        axes.plot([], [], color=INK, label="trained")
        axes.set_xticks(range(results.setting.trained_depth + 1))
        axes.legend(frameon=False, fontsize=8, loc="lower left")
    return figure


def _before_and_after(axes: Any, found: Sequence[Found], color: str, label: str) -> None:
    """Dashed before training, solid after."""
    for when, style in (("before", "--"), ("after", "-")):
        curves = [one[when]["relative"] for one in found]
        named = label if when == "after" else None
        _curve(axes, curves, color=color, linestyle=style, label=named)
