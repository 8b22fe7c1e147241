"""The study as one call: closed forms, densities on a line, clouds of tokens, stable clusters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from dualform.studies.fixed_point.continuum import (
    AFFINE,
    DENSITIES,
    HERMITE,
    TEMPERATURES,
    follow,
    growth,
)
from dualform.studies.fixed_point.dynamics import ATTRACT, CONTRACTIONS, REPEL, contraction, iterate
from dualform.studies.fixed_point.normality import Normality, Null, measure, null_range
from dualform.studies.fixed_point.pictures import draw
from dualform.studies.fixed_point.results import SIGNS, VISIBLE, FixedPointResults
from dualform.studies.fixed_point.stability import escape, stable_masses
from dualform.studies.fixed_point.starts import STARTS
from dualform.studies.parts import Found, run_parts
from dualform.studies.report import Report

QUESTION = "Does iterated attention converge, and to a Gaussian?"
LINE_TEMPERATURES = {ATTRACT: 2.0, REPEL: 3.0}
"""Of densities on a line, by the sign of the values."""
CLUSTERS = (1, 2, 3, 4, 8, 16)
RATIOS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Temperatures of clusters on a sphere, by that of the tokens."""


@dataclass(frozen=True)
class FixedPointSetting:
    """How many tokens there are, and how long they are followed."""

    size: int
    steps: int
    line_steps: int
    seeds: int
    sizes: tuple[int, ...]
    """How many tokens the Gaussian samples have that are compared by their size."""
    width: int = 16
    temperature: float = 4.0


SETTINGS = {
    "small": FixedPointSetting(512, 120, 200, seeds=3, sizes=(64, 256, 1024, 4096)),
    "paper": FixedPointSetting(
        65_536, 150, 200, seeds=3, sizes=(64, 256, 1024, 4096, 16_384, 65_536)
    ),
}


def run_study(
    setting: FixedPointSetting,
    seeds: int | None,
    device: str,
    out: Path,
    workers: int = 0,
) -> Report:
    """Runs all of it; what is kept in `out` is not done again.

    Args:
        seeds: by default as many as the setting has.
        workers: how many parts run at a time, each in a process of its own; 0 for none.
    """
    seeds = seeds or setting.seeds
    parts: dict[str, Callable[[], Found]] = {
        "line": partial(_line, setting),
        "stability": partial(_stability, setting),
        "gaussian samples": partial(_null, setting),
    }
    for seed in range(seeds):
        for start in STARTS:
            parts[f"{start} seed {seed}"] = partial(_clouds, start, seed, setting, device)
        parts[f"sizes seed {seed}"] = partial(_sizes, seed, setting, device)
    own = asdict(setting)
    own.pop("seeds")  # more may be added to what is kept
    found = run_parts(out, {**own, "device": device}, parts, workers)
    results = FixedPointResults(
        setting.size,
        setting.width,
        setting.temperature,
        found["line"],
        found["stability"],
        Null(**found["gaussian samples"]),
        {start: [found[f"{start} seed {seed}"] for seed in range(seeds)] for start in STARTS},
        [found[f"sizes seed {seed}"] for seed in range(seeds)],
    )
    own["sizes"] = ", ".join(f"{size:,}" for size in setting.sizes)
    own |= {"seeds": seeds, "device": device}
    pictures = draw(results, setting.steps, out)
    return Report("fixed-point", QUESTION, own, results.findings(), results.tables(), pictures)


def _line(setting: FixedPointSetting) -> Found:
    """Growth of cumulants, and where densities go, for both signs."""
    growths = [
        growth(order, T, gain, mean, deviation)
        for gain in SIGNS
        for order in HERMITE
        for T in TEMPERATURES
        for mean, deviation in AFFINE
        if T / deviation**2 > -gain  # else the step turns the line around, or folds it
    ]
    paths = [
        follow(start, LINE_TEMPERATURES[gain], setting.line_steps, gain)
        for gain in SIGNS
        for start in DENSITIES
    ]
    return {"growths": [asdict(one) for one in growths], "paths": [asdict(one) for one in paths]}


def _stability(setting: FixedPointSetting) -> Found:
    """Which clusters hold on a sphere and on a standardized line."""
    sphere = [
        escape(clusters, setting.width, T)
        for T in (setting.temperature * ratio for ratio in RATIOS)
        for clusters in CLUSTERS
        if clusters <= setting.width + 1
    ]
    return {
        "sphere": [{**asdict(one), "lifetime": one.lifetime} for one in sphere],
        "line": [asdict(stable_masses(T)) for T in TEMPERATURES],
    }


def _null(setting: FixedPointSetting) -> Found:
    return asdict(null_range(setting.size, setting.width))


def _clouds(start: str, seed: int, setting: FixedPointSetting, device: str) -> Found:
    """What becomes of a start under each contraction, for both signs."""
    return {
        f"{sign} {name}": dict(_trace(start, name, gain, seed, setting, device))
        for gain, sign in SIGNS.items()
        for name in CONTRACTIONS[gain]
    }


def _trace(
    start: str, name: str, gain: float, seed: int, setting: FixedPointSetting, device: str
) -> Iterator[tuple[str, object]]:
    x = STARTS[start](setting.size, setting.width, torch.Generator().manual_seed(seed)).to(device)
    contract = contraction(name, setting.width, setting.temperature)
    x = x if name == "decay" else contract(x)
    at: list[int] = []
    found: list[Normality] = []
    every, step, moved = max(1, setting.steps // 30), 0, math.nan
    clouds = iterate(x, contract, setting.temperature, setting.steps, gain)
    for step, (cloud, far) in enumerate(clouds):
        x, moved = cloud, far
        if step % every == 0:
            at.append(step)
            found.append(measure(x))
    yield "steps", [*at, step]
    yield "measured", [asdict(one) for one in (*found, measure(x))]
    yield "moved", moved


def _sizes(seed: int, setting: FixedPointSetting, device: str) -> Found:
    """What becomes of Gaussian samples of growing size, standardized each time, for both signs.

    With values x, the steps until they are VISIBLE away from a Gaussian; with −x, their radius.
    """
    contract, found = contraction("standardize", setting.width, setting.temperature), {}
    for size in setting.sizes:
        x = STARTS["gaussian"](size, setting.width, torch.Generator().manual_seed(seed)).to(device)
        x = contract(x)
        clouds = iterate(x, contract, setting.temperature, setting.steps)
        outside = (step for step, (x, _) in enumerate(clouds) if not measure(x).energy <= VISIBLE)
        steps = next(outside, setting.steps)
        *_, (last, _) = iterate(x, contract, setting.temperature, setting.steps, REPEL)
        found[str(size)] = {"steps": steps, "radius": measure(last).radius}
    return found
