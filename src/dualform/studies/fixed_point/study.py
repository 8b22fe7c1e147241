"""The study: closed forms, densities on a line, and clouds of tokens, gathered and told."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path as FilePath

import torch

from dualform.studies.fixed_point.continuum import (
    DENSITIES,
    HERMITE,
    TEMPERATURES,
    Growth,
    Path,
    follow,
    growth,
)
from dualform.studies.fixed_point.dynamics import CONTRACTIONS, STILL, contraction, iterate
from dualform.studies.fixed_point.normality import Normality, measure, null_energy
from dualform.studies.fixed_point.pictures import draw
from dualform.studies.fixed_point.results import VISIBLE, Cell, Lifetime, Study, Trace
from dualform.studies.fixed_point.starts import STARTS

WIDTH = 16
TEMPERATURE = 4.0
LINE_TEMPERATURE = 2.0


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
    answer = _answer(growths, paths, cells, null)
    return Study(settings, growths, paths, cells, lifetimes, null, answer)


def save_study(study: Study, folder: FilePath) -> list[FilePath]:
    """Writes study.json and the pictures; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "study.json"
    page.write_text(json.dumps(study.to_dict(), indent=1, allow_nan=False), encoding="utf-8")
    return [page, *draw(study, folder)]


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
