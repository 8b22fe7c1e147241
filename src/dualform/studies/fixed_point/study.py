"""The study: closed forms, densities on a line, and clouds of tokens, gathered and told."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path as FilePath
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dualform.read.shown import Shown, framed
from dualform.studies.fixed_point.continuum import (
    DENSITIES,
    HERMITE,
    TEMPERATURES,
    Growth,
    Path,
    follow,
    growth,
)
from dualform.studies.fixed_point.dynamics import CONTRACTIONS, FAR, STILL, contraction, iterate
from dualform.studies.fixed_point.normality import Normality, measure, null_energy
from dualform.studies.fixed_point.starts import STARTS

WIDTH = 16
TEMPERATURE = 4.0
LINE_TEMPERATURE = 2.0
FEW = 40
VISIBLE = 0.01


@dataclass(frozen=True)
class Trace:
    """One cloud, one contraction, one seed: measurements at some steps."""

    steps: tuple[int, ...]
    measured: tuple[Normality, ...]
    moved: float
    """How far tokens still moved in the last step, on average."""

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
class Cell:
    """One start under one contraction, over several seeds."""

    start: str
    contraction: str
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

    def last(self, name: str) -> tuple[float, float]:
        """The mean of the seeds' last measurements, and two standard errors."""
        values = [float(getattr(trace.measured[-1], name)) for trace in self.traces]
        values = [value for value in values if math.isfinite(value)]
        if not values:
            return math.nan, math.nan
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return statistics.fmean(values), 2 * error


@dataclass(frozen=True)
class Lifetime:
    """Steps until samples of a Gaussian, standardized each time, were VISIBLE away from it."""

    size: int
    steps: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Study(Shown):
    """Everything that was found; prints as tables, plots, and saves itself."""

    settings: dict[str, Any]
    growths: tuple[Growth, ...]
    paths: tuple[Path, ...]
    cells: tuple[Cell, ...]
    lifetimes: tuple[Lifetime, ...]
    null: float
    """95 % of Gaussian samples of this size have a smaller energy distance."""
    answer: tuple[str, ...] = field(default=())

    def __rich__(self) -> Group:
        parts: list[RenderableType] = [
            framed("a small cumulant of a Gaussian after one step, ×", self._growth_table()),
            framed("densities on a line, standardized", self._path_table()),
            framed(
                f"{self.settings['size']:,} tokens of width {WIDTH}",
                self._cell_table(),
                f"95 % of Gaussian samples have an energy distance below {self.null:.1e}; "
                "± two standard errors over seeds",
            ),
            framed(f"steps until a Gaussian sample is {VISIBLE:g} away", self._life_table()),
            Text("\n".join(self.answer)),
        ]
        return Group(*parts)

    def to_dict(self) -> dict[str, Any]:
        """The study as plain values."""
        return {
            **asdict(self),
            "fates": {f"{c.start}, {c.contraction}": c.fates for c in self.cells},
        }

    def save(self, folder: FilePath) -> list[FilePath]:
        """Writes study.json and the pictures; returns the paths."""
        from dualform.studies.fixed_point.pictures import draw

        folder.mkdir(parents=True, exist_ok=True)
        page = folder / "study.json"
        page.write_text(json.dumps(self.to_dict(), indent=1), encoding="utf-8")
        return [page, *draw(self, folder)]

    def _growth_table(self) -> Table:
        table = _table("order k", "temperature T", "1 + k/(Tᵏ⁻²(1 + T))", "measured")
        for one in self.growths:
            numbers = (f"{one.temperature:g}", f"{one.predicted:.4f}", f"{one.measured:.4f}")
            table.add_row(str(one.order), *numbers)
        return table

    def _path_table(self) -> Table:
        table = _table("start", "kurtosis at first", "at last", "energy distance at last")
        for path in self.paths:
            first, last = path.kurtosis[0], path.kurtosis[-1]
            table.add_row(path.start, f"{first:+.2f}", f"{last:+.2f}", f"{path.energy[-1]:.1e}")
        return table

    def _cell_table(self) -> Table:
        table = _table("start", "contraction", "ends as", "kurtosis", "energy distance", "spread")
        for cell in self.cells:
            shape = ("kurtosis", "energy", "spread")
            numbers = ["–" if cell.fates == "1 point" else _pm(*cell.last(n)) for n in shape]
            table.add_row(cell.start, cell.contraction, cell.fates, *numbers)
        return table

    def _life_table(self) -> Table:
        table = _table("tokens", "steps")
        for life in self.lifetimes:
            table.add_row(f"{life.size:,}", " ".join(map(str, life.steps)))
        return table


def run_study(
    *,
    size: int = 1024,
    steps: int = 120,
    seeds: int = 3,
    sizes: Sequence[int] = (),
    device: str = "cpu",
) -> Study:
    """Runs all of it; a minute with the defaults on a processor."""
    paths = tuple(follow(start, LINE_TEMPERATURE, steps) for start in DENSITIES)
    cells = tuple(
        Cell(start, name, tuple(_trace(start, name, size, steps, s, device) for s in range(seeds)))
        for start in STARTS
        for name in CONTRACTIONS
    )
    lifetimes = tuple(_lifetime(n, steps, seeds, device) for n in sizes or _fractions(size))
    settings = {
        "size": size,
        "steps": steps,
        "seeds": seeds,
        "width": WIDTH,
        "temperature": TEMPERATURE,
        "line temperature": LINE_TEMPERATURE,
    }
    growths = tuple(growth(order, T) for order in HERMITE for T in TEMPERATURES)
    null = null_energy(size, WIDTH)
    answer = _answer(growths, paths, cells, lifetimes, null)
    return Study(settings, growths, paths, cells, lifetimes, null, answer)


def _trace(start: str, name: str, size: int, steps: int, seed: int, device: str) -> Trace:
    x = STARTS[start](size, WIDTH, torch.Generator().manual_seed(seed)).to(device)
    contract = contraction(name, WIDTH, TEMPERATURE)
    x = x if name == "decay" else contract(x)
    at: list[int] = []
    found: list[Normality] = []
    every, step, moved = max(1, steps // 30), 0, math.nan
    for step, (cloud, far) in enumerate(iterate(x, contract, TEMPERATURE, steps)):
        x, moved = cloud, far
        if step % every == 0:
            at.append(step)
            found.append(measure(x))
    return Trace((*at, step), (*found, measure(x)), moved)


def _fractions(size: int) -> list[int]:
    """The size, a quarter, a sixteenth … down to 64."""
    return sorted(size // 4**power for power in range(8) if size // 4**power >= 64)


def _lifetime(size: int, steps: int, seeds: int, device: str) -> Lifetime:
    contract = contraction("standardize", WIDTH, TEMPERATURE)
    lives = []
    for seed in range(seeds):
        x = STARTS["gaussian"](size, WIDTH, torch.Generator().manual_seed(seed)).to(device)
        clouds = iterate(contract(x), contract, TEMPERATURE, steps)
        outside = (step for step, (x, _) in enumerate(clouds) if not measure(x).energy <= VISIBLE)
        lives.append(next(outside, steps))
    return Lifetime(size, tuple(lives))


def _answer(
    growths: Sequence[Growth],
    paths: Sequence[Path],
    cells: Sequence[Cell],
    lifetimes: Sequence[Lifetime],
    null: float,
) -> tuple[str, ...]:
    """What was found, in sentences that the numbers decide."""
    repels = all(one.measured > 1 for one in growths)
    gaussian = [cell for cell in cells if _is_gaussian(cell, null)]
    still = [cell for cell in cells if all(t.moved < STILL for t in cell.traces)]
    away = sorted({cell.contraction for cell in cells if "runs away" in cell.fates})
    worst = max(abs(one.measured / one.predicted - 1) for one in growths)
    ends = ", ".join(f"{p.start} {p.kurtosis[-1]:+.2f}" for p in paths)
    return (
        "Is the fixed point Gaussian? "
        + ("No: a Gaussian is a fixed point" if repels else "A Gaussian is a fixed point")
        + (" that repels." if repels else "."),
        f"A small k-th cumulant grows by 1 + k/(Tᵏ⁻²(1 + T)) a step (measured within {worst:.0e}).",
        f"On a line, kurtosis ends at: {ends}. (−2 is two points; a Gaussian leaves by rounding.)",
        f"Of {len(cells)} starts and contractions, {len(gaussian)} end Gaussian; {len(still)} came "
        f"to rest within the steps given. Runs away: {', '.join(away) or 'none'}.",
    )


def _is_gaussian(cell: Cell, null: float) -> bool:
    energy, _ = cell.last("energy")
    return energy <= null and cell.fates == "stays spread"


def _pm(value: float, error: float) -> str:
    if not math.isfinite(value):
        return "–"
    shown = f"{value:+.2g}" if abs(value) >= 0.01 else f"{value:.1e}"
    return f"{shown} ± {error:.1g}" if math.isfinite(error) else shown


def _table(*columns: str) -> Table:
    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column in ("start", "contraction") else "right")
    return table
