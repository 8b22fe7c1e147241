"""The study as one call: it trains, draws, and says what was found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from dualform.studies.data import fingerprint
from dualform.studies.encoders import require_layers
from dualform.studies.image_attention.results import ImageResults, draw
from dualform.studies.image_attention.training import (
    ImageSetting,
    layer_costs,
    load_pictures,
    measure_training,
)
from dualform.studies.parts import Found, run_parts
from dualform.studies.report import Report

QUESTION = "Do attention layers that are derived from regressions make a better vision transformer?"


def run_study(
    data: Path,
    setting: ImageSetting,
    seeds: int | None,
    device: str,
    out: Path,
    workers: int = 0,
) -> Report:
    """Trains with every layer and each seed; what is kept in `out` is not done again.

    Args:
        seeds: by default as many as the setting has.
        workers: how many parts run at a time, each in a process of its own; 0 for none.
    """
    require_layers(setting.layers)
    seeds = seeds or setting.seeds
    train, test = load_pictures(data, setting)
    costs = {"costs": partial(layer_costs, train, setting, device)}
    parts = dict[str, Callable[[], Found]]()
    for seed in range(seeds):
        for layer in setting.layers:
            parts[f"{layer} seed {seed}"] = partial(
                measure_training, train, test, layer, seed, setting, device
            )
    own = asdict(setting)
    own.pop("seeds")  # more may be added to what is kept
    data_used = fingerprint(train.x, train.y, test.x, test.y)
    kept = {**own, "device": device, "data": data_used}
    found = run_parts(out, kept, costs) | run_parts(out, kept, parts, workers)  # timed alone
    results = ImageResults(
        setting.dataset,
        {
            layer: [found[f"{layer} seed {seed}"] for seed in range(seeds)]
            for layer in setting.layers
        },
        found["costs"],
    )
    settings = {**own.pop("shape"), **own, "seeds": seeds, "device": device}
    settings |= {"layers": ", ".join(setting.layers), "depth": setting.shape.layers}
    pictures = draw(results, out)
    return Report(
        "image-attention", QUESTION, settings, results.findings(), results.tables(), pictures
    )
