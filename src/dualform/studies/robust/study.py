"""The study as one call: it trains, attacks, draws, and says what was found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from dualform.studies.data import fingerprint
from dualform.studies.parts import Found, run_parts
from dualform.studies.report import Report
from dualform.studies.robust.findings import findings
from dualform.studies.robust.pictures import draw
from dualform.studies.robust.results import RobustResults
from dualform.studies.robust.setting import TRAININGS, RobustSetting, require_known_layers
from dualform.studies.robust.training import layer_costs, load_pixels, measure_training

QUESTION = "Does attention to robust principal components stand contamination better?"


def run_study(
    data: Path, setting: RobustSetting, seeds: int | None, device: str, out: Path, workers: int = 0
) -> Report:
    """Trains every layer on clean and contaminated images; what is kept in `out` is not redone.

    Args:
        seeds: by default as many as the setting has.
        workers: how many parts are run at a time, each in a process of its own; 0 for none.
    """
    require_known_layers(setting.layers)
    seeds = seeds or setting.seeds
    train, test = load_pixels(data, setting)
    costs = {"costs": partial(layer_costs, train, setting, device)}
    parts = dict[str, Callable[[], Found]]()
    for seed in range(seeds):
        for training in TRAININGS:
            for layer in setting.layers:
                parts[f"{training} {layer} seed {seed}"] = partial(
                    measure_training,
                    train,
                    test,
                    layer,
                    training == "contaminated",
                    seed,
                    setting,
                    device,
                )
    own = asdict(setting)
    own.pop("seeds")  # more may be added to what is kept
    used = fingerprint(train.x, train.y, test.x, test.y)
    kept = {**own, "device": device, "data": used}
    found = run_parts(out, kept, costs) | run_parts(out, kept, parts, workers)  # timed alone
    results = RobustResults(
        setting,
        {
            (training, layer): [found[f"{training} {layer} seed {seed}"] for seed in range(seeds)]
            for training in TRAININGS
            for layer in setting.layers
        },
        found["costs"],
    )
    settings = {**own.pop("shape"), **own, "seeds": seeds, "device": device}
    settings |= {"layers": ", ".join(setting.layers), "depth": setting.shape.layers}
    return Report(
        "robust", QUESTION, settings, findings(results), results.tables(), draw(results, out)
    )
