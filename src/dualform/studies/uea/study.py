"""The study as one call: it trains, draws, and says what was found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from dualform.studies.encoders import require_layers
from dualform.studies.parts import Found, run_parts
from dualform.studies.report import Report
from dualform.studies.uea.results import UeaResults, draw
from dualform.studies.uea.series import load
from dualform.studies.uea.training import WAYS, UeaSetting, layer_costs, measure_training

QUESTION = "Do attention layers that are derived from regressions classify time series better?"


def run_study(
    data: Path,
    setting: UeaSetting,
    seeds: int | None,
    device: str,
    out: Path,
    workers: int = 0,
) -> Report:
    """Trains every layer on every set with each seed; what is kept in `out` is not done again.

    Args:
        seeds: by default as many as the setting has.
        workers: how many parts run at a time, each in a process of its own; 0 for none.
    """
    require_layers(setting.layers)
    seeds = seeds or setting.seeds
    sets = {name: load(data, name) for name in setting.datasets}
    costs = {
        f"{name} costs": partial(layer_costs, train, setting, device)
        for name, (train, _) in sets.items()
    }
    parts: dict[str, Callable[[], Found]] = {
        f"{name} seed {seed} {layer} {way}": partial(
            measure_training, train, test, layer, way, seed, setting, device
        )
        for name, (train, test) in sets.items()
        for seed in range(seeds)
        for layer in setting.layers
        for way in WAYS
    }
    own = asdict(setting)
    for changing in ("datasets", "seeds"):  # others may be added to what is kept
        own.pop(changing)
    kept = {**own, "device": device}
    found = run_parts(out, kept, costs) | run_parts(out, kept, parts, workers)  # timed alone
    results = UeaResults(
        {name: (len(train), len(test)) for name, (train, test) in sets.items()},
        {
            name: [
                {
                    layer: {way: found[f"{name} seed {seed} {layer} {way}"] for way in WAYS}
                    for layer in setting.layers
                }
                for seed in range(seeds)
            ]
            for name in sets
        },
        {name: found[f"{name} costs"] for name in sets},
    )
    settings = {**own.pop("shape"), **own, "seeds": seeds, "device": device}
    settings["layers"] = ", ".join(setting.layers)
    settings["depth"] = setting.shape.layers
    pictures = draw(results, out)
    return Report("uea", QUESTION, settings, results.findings(), results.tables(), pictures)
