"""The study in pictures: what kurtosis does, where clouds go, and how long a Gaussian lives."""

from __future__ import annotations

import math
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor

from dualform.studies.drawing import pyplot
from dualform.studies.fixed_point.dynamics import CONTRACTIONS, contraction, iterate
from dualform.studies.fixed_point.results import Cell, Study
from dualform.studies.fixed_point.starts import STARTS

COLORS = {
    "gaussian": "#1b6ca8",
    "uniform": "#e07a1f",
    "student": "#a23b72",
    "mixture": "#3a8f5c",
    "tokens": "#444444",
    "two bumps": "#3a8f5c",
    "mixed scales": "#a23b72",
}
INK, FAINT = "#222222", "#d9d9d9"
SHOWN = (0, 2, 6, 15, 60)
PLANE = torch.tensor([[1.0, -1.0, 0.0], [1.0, 1.0, -2.0]]).T / torch.tensor([2.0, 6.0]).sqrt()


def draw(study: Study, folder: FilePath) -> list[FilePath]:
    """Writes line.png, tokens.png and clouds.png; returns their paths."""
    plt = pyplot()
    pictures = {"line.png": _line, "tokens.png": _tokens, "clouds.png": _clouds}
    paths = []
    for name, picture in pictures.items():
        figure = picture(plt, study)
        figure.savefig(folder / name, dpi=150, facecolor="white")
        plt.close(figure)
        paths.append(folder / name)
    return paths


def _clean(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, color=FAINT)
    axes.grid(True, color=FAINT, linewidth=0.5, alpha=0.6)
    axes.set_axisbelow(True)


def _line(plt: Any, study: Study) -> Any:
    """The limit of many tokens: the predicted growth, kurtosis paths, and where the mass ends."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    _growth(left, study)
    for path in study.paths:
        middle.plot(path.kurtosis, color=COLORS[path.start], label=path.start, linewidth=1.8)
    middle.axhline(-2, color=INK, linewidth=0.6, linestyle=":")
    middle.set_yscale("symlog", linthresh=2)
    middle.legend(frameon=False, fontsize=8, loc="center right", bbox_to_anchor=(1, 0.62))
    _clean(middle, "Kurtosis runs from 0 to either side", "step", "excess kurtosis")
    for path in study.paths:
        x, mass = torch.tensor(path.points), torch.tensor(path.mass).cumsum(0)
        right.plot(x, mass, color=COLORS[path.start], label=path.start, linewidth=1.8)
    right.set_xlim(-4.5, 4.5)
    _clean(right, "Where the mass ends", "x", "distribution function")
    return figure


def _growth(axes: Any, study: Study) -> None:
    T = torch.linspace(0.9, 9, 200)
    for order, name, color in ((3, "skewness", COLORS["uniform"]), (4, "kurtosis", "#1b6ca8")):
        axes.plot(T, order / (T ** (order - 2) * (1 + T)), color=FAINT, linewidth=4)
        rates = [(g.temperature, g.measured - 1) for g in study.growths if g.order == order]
        axes.plot(*zip(*rates, strict=True), "o", color=color, label=f"{name}, measured")
    axes.plot([], [], color=FAINT, linewidth=4, label="k/(Tᵏ⁻²(1 + T))")
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8)
    _clean(axes, "A Gaussian repels at every temperature", "temperature T", "growth a step, − 1")


def _tokens(plt: Any, study: Study) -> Any:
    """Clouds of tokens: energy distance by step for each contraction, and lifetimes."""
    figure, grid = plt.subplots(1, 5, figsize=(15, 3.4), layout="constrained", width_ratios=[1] * 5)
    for axes, name in zip(grid, CONTRACTIONS, strict=False):
        for cell in (c for c in study.cells if c.contraction == name):
            _band(axes, cell, COLORS[cell.start])
        axes.axhline(study.null, color=INK, linewidth=0.8, linestyle=":")
        axes.set_yscale("log")
        axes.set_ylim(study.null / 3, 1)
        _clean(axes, f"distance from a normal: {name}", "step", "")
    grid[0].text(0.4, study.null / 1.1, "95 % of Gaussian samples lie below", fontsize=7, va="top")
    grid[3].legend(frameon=False, fontsize=8, loc="lower right")
    _lifetimes(grid[4], study)
    return figure


def _lifetimes(axes: Any, study: Study) -> None:
    for life in study.lifetimes:
        axes.plot(
            [life.size] * len(life.steps), life.steps, "o", color=COLORS["gaussian"], alpha=0.4
        )
    means = [(life.size, sum(life.steps) / len(life.steps)) for life in study.lifetimes]
    axes.plot(*zip(*means, strict=True), color=COLORS["gaussian"], linewidth=1.6)
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks([size for size, _ in means], [f"{size:,}" for size, _ in means], rotation=30)
    axes.set_ylim(bottom=0)
    _clean(axes, "steps a Gaussian sample lasts", "tokens", "")


def _band(axes: Any, cell: Cell, color: str) -> None:
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


def _clouds(plt: Any, study: Study) -> Any:
    """Tokens of width 3, seen along (1, 1, 1), at some steps; colors say the start."""
    shown = [step for step in SHOWN if step <= study.settings["steps"]]
    rows, columns = len(CONTRACTIONS), len(shown)
    figure, grid = plt.subplots(
        rows,
        columns,
        figsize=(2.1 * columns, 2.1 * rows + 0.4),
        layout="constrained",
        squeeze=False,
    )
    for row, name in zip(grid, CONTRACTIONS, strict=True):
        for start in ("gaussian", "uniform", "tokens"):
            clouds = _some(start, name, shown)
            for axes, step in zip(row, shown, strict=True):
                _scatter(axes, clouds[step], COLORS[start], start)
        row[0].set_ylabel(name, fontsize=10)
    for axes, step in zip(grid[0], shown, strict=True):
        axes.set_title(f"step {step}", fontsize=10, loc="left")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=3, frameon=False, markerscale=4
    )
    return figure


def _some(start: str, name: str, shown: list[int]) -> dict[int, Tensor]:
    x = STARTS[start](600, 3, torch.Generator().manual_seed(0))
    contract = contraction(name, 3, math.sqrt(3))
    x = x if name == "decay" else contract(x)
    clouds = [cloud for cloud, _ in iterate(x, contract, math.sqrt(3), max(shown))]
    return {step: clouds[min(step, len(clouds) - 1)] for step in shown}


def _scatter(axes: Any, cloud: Tensor, color: str, label: str) -> None:
    axes.scatter(*(cloud @ PLANE).T, s=4, color=color, alpha=0.5, linewidth=0, label=label)
    axes.set_xlim(-4, 4)
    axes.set_ylim(-4, 4)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_color(FAINT)
