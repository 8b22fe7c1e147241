"""The study as one call: it trains, probes, draws, and says what was found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from dualform.studies.hypernetwork.findings import findings
from dualform.studies.hypernetwork.measure import count_answers, measure_network
from dualform.studies.hypernetwork.network import require_layer
from dualform.studies.hypernetwork.pictures import draw
from dualform.studies.hypernetwork.results import HypernetworkResults, TaskResults
from dualform.studies.hypernetwork.setting import HypernetworkSetting
from dualform.studies.hypernetwork.together import TrainedTogether
from dualform.studies.parts import Found, run_parts
from dualform.studies.report import Report

QUESTION = "Does attention as a hypernetwork generalize to combinations of rules that it never saw?"


def run_study(
    setting: HypernetworkSetting, seeds: int | None, device: str, out: Path, workers: int = 0
) -> Report:
    """Trains every layer on both tasks with each seed; what is kept in `out` is not done again.

    Args:
        seeds: by default as many as the setting has.
        workers: how many networks are trained at a time, each in a process of its own; 0 for none.
    """
    for training in setting.trainings:
        for layer in training.layers:
            require_layer(layer)
    seeds = seeds or setting.seeds
    own = asdict(setting)
    for changing in ("seeds", "tasks", "layers"):  # others may be added to what is kept
        own.pop(changing)
    parts = parts_of(setting, seeds, device, out / "networks")
    found = run_parts(out, {**own, "device": device}, parts, workers)
    results = HypernetworkResults(
        setting,
        tuple(
            TaskResults(
                training,
                {
                    layer: [found[_name(training.task.name, layer, seed)] for seed in range(seeds)]
                    for layer in training.layers
                },
            )
            for training in setting.trainings
        ),
        found["answers"],
    )
    settings = {
        f"{training.task.name} {name}": getattr(training, name)
        for training in setting.trainings
        for name in ("width", "heads", "depth", "steps", "batch", "rate")
    }
    settings |= {"seeds": seeds, "tests": setting.tests, "probed": setting.probed}
    return Report(
        "hypernetwork",
        QUESTION,
        settings | {"device": device},
        findings(results),
        results.tables(),
        draw(results, out),
    )


def parts_of(
    setting: HypernetworkSetting, seeds: int, device: str, networks: Path
) -> dict[str, Callable[[], Found]]:
    """What is to be measured, by name: seed by seed, so that all layers have the first ones.

    Args:
        networks: where trained ones are kept, if the device is a GPU, which trains all at once.
    """
    parts: dict[str, Callable[[], Found]] = {"answers": partial(count_answers, setting.raven.task)}
    at_once = torch.device(device).type == "cuda"
    for seed in range(seeds):
        for training in setting.trainings:
            together = TrainedTogether(networks, training, seeds, device) if at_once else None
            for layer in training.layers:
                parts[_name(training.task.name, layer, seed)] = partial(
                    measure_network, setting, training, layer, seed, device, together
                )
    return parts


def _name(task: str, layer: str, seed: int) -> str:
    return f"{task} {layer} seed {seed}"
