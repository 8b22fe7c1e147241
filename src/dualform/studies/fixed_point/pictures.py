"""The study in pictures: cumulants, kurtosis, where clouds go, and which clusters hold."""

from __future__ import annotations

import math
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor

from dualform.studies.drawing import FAINT, INK, clean_axes, pyplot
from dualform.studies.fixed_point.continuum import ATTRACTS_FROM
from dualform.studies.fixed_point.dynamics import (
    ATTRACT,
    CONTRACTIONS,
    REPEL,
    contraction,
    iterate,
)
from dualform.studies.fixed_point.results import SIGNS, Cloud, FixedPointResults
from dualform.studies.fixed_point.starts import STARTS
from dualform.studies.report import Picture

COLORS = {
    "gaussian": "#1b6ca8",
    "uniform": "#e07a1f",
    "student": "#a23b72",
    "mixture": "#3a8f5c",
    "tokens": "#444444",
    "two bumps": "#3a8f5c",
    "skewed": "#444444",
    "mixed scales": "#a23b72",
}
ORDERS = {3: ("skewness", "#e07a1f"), 4: ("kurtosis", "#1b6ca8")}
SHOWN = (0, 2, 6, 15, 60)
CLOUDS = ("sphere", "standardize", "mean and covariance")
PLANE = torch.tensor([[1.0, -1.0, 0.0], [1.0, 1.0, -2.0]]).T / torch.tensor([2.0, 6.0]).sqrt()
CAPTIONS = {
    "line.png": "Cumulants of a near Gaussian, kurtosis step by step, and where the mass ends.",
    "tokens.png": "Energy distance from a normal step by step, and how long a Gaussian lasts.",
    "clouds.png": "Tokens of width 3 at some steps, seen along (1, 1, 1).",
    "clusters.png": "How fast clusters on a sphere drift, and which hold on a standardized line.",
}


def draw(results: FixedPointResults, steps: int, out: FilePath) -> tuple[Picture, ...]:
    """Writes all pictures into a folder."""
    plt = pyplot()
    figures = {
        "line.png": _line(plt, results),
        "tokens.png": _tokens(plt, results),
        "clouds.png": _clouds(plt, [step for step in SHOWN if step <= steps]),
        "clusters.png": _clusters(plt, results),
    }
    for name, figure in figures.items():
        figure.savefig(out / name, dpi=110, facecolor="white")
        plt.close(figure)
    return tuple(Picture(name, CAPTIONS[name]) for name in figures)


def _line(plt: Any, results: FixedPointResults) -> Any:
    """The limit of many tokens, a row for each sign."""
    figure, grid = plt.subplots(2, 3, figsize=(12, 6.8), layout="constrained")
    _growth(grid[0, 0], results)
    _decay(grid[1, 0], results)
    for row, (gain, sign) in zip(grid, SIGNS.items(), strict=True):
        own = [path for path in results.paths if path.gain == gain]
        _, middle, right = row
        for path in own:
            middle.plot(path.kurtosis, color=COLORS[path.start], label=path.start, linewidth=1.6)
            x, mass = torch.tensor(path.points), torch.tensor(path.mass).cumsum(0)
            right.plot(x, mass, color=COLORS[path.start], linewidth=1.6)
        middle.set_yscale("symlog", linthresh=0.1 if gain == REPEL else 2)
        middle.axhline(0, color=INK, linewidth=0.6, linestyle=":")
        clean_axes(
            middle,
            f"Kurtosis, {sign}, T = {own[0].temperature:g}",
            "step",
            "excess kurtosis",
            grid=True,
        )
        right.set_xlim(-4.5, 4.5)
        clean_axes(right, f"Where the mass ends, {sign}", "x", "distribution function", grid=True)
    grid[0, 1].legend(frameon=False, fontsize=8, loc="center right", bbox_to_anchor=(1, 0.62))
    return figure


def _growth(axes: Any, results: FixedPointResults) -> None:
    """Values x: factors − 1, all positive."""
    T = torch.linspace(0.65, 9, 200)
    for order, (name, color) in ORDERS.items():
        axes.plot(T, order / (T ** (order - 2) * (1 + T)), color=FAINT, linewidth=4)
        axes.plot(*_measured(results, ATTRACT, order, 1), "o", color=color, label=name)
    axes.plot([], [], color=FAINT, linewidth=4, label="k/(τᵏ⁻²(1 + τ))")
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8)
    clean_axes(
        axes, "values x: a Gaussian repels", "τ = T/deviation²", "factor a step, − 1", grid=True
    )


def _decay(axes: Any, results: FixedPointResults) -> None:
    """Values −x: factors, between −1 and 1 where a Gaussian attracts."""
    T = torch.linspace(1.3, 9, 300)
    axes.axhspan(-1, 1, color="#eef4ee", zorder=0)
    for order, (name, color) in ORDERS.items():
        axes.plot(T, 1 - order / (T ** (order - 2) * (T - 1)), color=FAINT, linewidth=4)
        axes.plot(*_measured(results, REPEL, order, 0), "o", color=color, label=name)
    axes.plot([], [], color=FAINT, linewidth=4, label="1 − k/(τᵏ⁻²(τ − 1))")
    axes.axvline(ATTRACTS_FROM, color=INK, linewidth=0.8, linestyle=":")
    axes.set_ylim(-3.2, 1.3)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    clean_axes(
        axes,
        "values −x: a Gaussian attracts in the band",
        "τ = T/deviation²",
        "factor a step",
        grid=True,
    )


def _measured(
    results: FixedPointResults, gain: float, order: int, less: float
) -> tuple[list[float], list[float]]:
    found = [one for one in results.growths if (one.gain, one.order) == (gain, order)]
    own = [(one.temperature / one.deviation**2, one.measured - less) for one in found]
    return [x for x, _ in own if x <= 9], [y for x, y in own if x <= 9]


def _tokens(plt: Any, results: FixedPointResults) -> Any:
    """Clouds of tokens: a row for each sign, and lifetimes where a decay would be."""
    columns = CONTRACTIONS[ATTRACT]
    figure, grid = plt.subplots(
        2, len(columns), figsize=(2.6 * len(columns), 5.6), layout="constrained"
    )
    for row, sign in zip(grid, SIGNS.values(), strict=True):
        for axes, name in zip(row, columns, strict=True):
            cells = [c for c in results.cells if (c.contraction, c.sign) == (name, sign)]
            for cell in cells:
                _band(axes, cell, COLORS[cell.start])
            if cells:
                axes.axhline(results.null.energy, color=INK, linewidth=0.8, linestyle=":")
                axes.set_yscale("log")
                axes.set_ylim(results.null.energy / 4, 1)
                clean_axes(axes, f"{name},\n{sign}", "step", "", grid=True)
    grid[0, 0].set_ylabel("energy distance from a normal", fontsize=9)
    grid[1, 1].set_ylabel("energy distance from a normal", fontsize=9)
    _lifetimes(grid[1, 0], results)
    handles = grid[1, -1].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, fontsize=9, loc="outside lower center", ncols=5)
    return figure


def _lifetimes(axes: Any, results: FixedPointResults) -> None:
    sizes = [int(size) for size in results.sizes[0]]
    steps = [[one[str(size)]["steps"] for size in sizes] for one in results.sizes]
    for one in steps:
        axes.plot(sizes, one, "o", color=COLORS["gaussian"], alpha=0.4)
    means = [sum(each) / len(each) for each in zip(*steps, strict=True)]
    axes.plot(sizes, means, color=COLORS["gaussian"], linewidth=1.6)
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30)
    axes.set_ylim(bottom=0)
    clean_axes(
        axes, "standardize, values x:\nhow long a Gaussian lasts", "tokens", "steps", grid=True
    )


def _band(axes: Any, cell: Cloud, color: str) -> None:
    """The mean over seeds, and the range of all of them; a cloud that is one point has none."""
    count = min(len(trace.steps) for trace in cell.traces)
    steps = cell.traces[0].steps[:count]
    values = torch.tensor([[m.energy for m in trace.measured[:count]] for trace in cell.traces])
    values = values.clamp(min=4e-6)
    axes.plot(steps, values.nanmean(0), color=color, label=cell.start, linewidth=1.6)
    axes.fill_between(steps, values.amin(0), values.amax(0), color=color, alpha=0.15, linewidth=0)
    gone = torch.nonzero(values.isnan().any(0)).flatten()
    if len(gone) and int(gone[0]):
        at = int(gone[0]) - 1
        axes.plot(steps[at], values.nanmean(0)[at], "x", color=color, markersize=5)


def _clouds(plt: Any, shown: list[int]) -> Any:
    """Tokens of width 3, at some steps; colors say the start."""
    rows = [(gain, name) for gain in SIGNS for name in CLOUDS]
    figure, grid = plt.subplots(
        len(rows),
        len(shown),
        figsize=(1.9 * len(shown), 1.9 * len(rows) + 0.4),
        layout="constrained",
        squeeze=False,
    )
    for row, (gain, name) in zip(grid, rows, strict=True):
        for start in ("gaussian", "uniform", "tokens"):
            clouds = _some(start, name, gain, shown)
            for axes, step in zip(row, shown, strict=True):
                _scatter(axes, clouds[step], COLORS[start], start)
        row[0].set_ylabel(f"{name}\n{SIGNS[gain]}", fontsize=9)
    for axes, step in zip(grid[0], shown, strict=True):
        axes.set_title(f"step {step}", fontsize=10, loc="left")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=3, frameon=False, markerscale=4
    )
    return figure


def _some(start: str, name: str, gain: float, shown: list[int]) -> dict[int, Tensor]:
    temperature = 3.0 if gain == REPEL else math.sqrt(3)
    contract = contraction(name, 3, temperature)
    x = contract(STARTS[start](300, 3, torch.Generator().manual_seed(0)))
    clouds = [cloud for cloud, _ in iterate(x, contract, temperature, max(shown), gain)]
    return {step: clouds[min(step, len(clouds) - 1)] for step in shown}


def _scatter(axes: Any, cloud: Tensor, color: str, label: str) -> None:
    axes.scatter(*(cloud @ PLANE).T, s=4, color=color, alpha=0.5, linewidth=0, label=label)
    axes.set_xlim(-4, 4)
    axes.set_ylim(-4, 4)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_color(FAINT)


def _clusters(plt: Any, results: FixedPointResults) -> Any:
    """Escape from simplices on the sphere; masses that hold on the line."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    counts = sorted({one["clusters"] for one in results.stability["sphere"]} - {1})
    shades = ("#08519c", "#4292c6", "#3a8f5c", "#e07a1f", "#a23b72")
    for count, color in zip(counts, shades, strict=False):
        own = [one for one in results.stability["sphere"] if one["clusters"] == count]
        T, drift = ([o["temperature"] for o in own], [o["between"] - 1 for o in own])
        left.plot(T, drift, "o-", color=color, markersize=4, label=f"{count} clusters")
    left.set_yscale("log")
    left.set_ylim(1e-9, 2)
    left.legend(frameon=False, fontsize=8)
    clean_axes(
        left,
        f"On a sphere of width {results.width}, values x",
        "T",
        "largest factor − 1",
        grid=True,
    )
    line = results.stability["line"]
    for name, shift, color in (("two", -0.12, "#1b6ca8"), ("three", 0.12, "#e07a1f")):
        for at, one in enumerate(line):
            for low, high in one[name]:  # a single mass of the grid has a height too
                right.bar(at + shift, 100 * (high - low) + 0.5, 0.2, 100 * low - 0.25, color=color)
    right.plot([], [], color="#1b6ca8", linewidth=6, label="two: the smaller one")
    right.plot([], [], color="#e07a1f", linewidth=6, label="three: each outer one")
    right.set_xticks(range(len(line)), [f"{one['temperature']:g}" for one in line])
    right.legend(frameon=False, fontsize=8)
    clean_axes(
        right, "On a standardized line, values x: masses that hold", "T", "mass, %", grid=True
    )
    return figure
