"""The study as one call: it trains, reads, retrains, draws, and says what was found."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path

from torch import nn

from dualform.studies.controls.experiment import SETTINGS, ControlsSetting, load_experiment
from dualform.studies.controls.findings import findings
from dualform.studies.controls.measure import RANDOM, TRUE, UNTRAINED, ControlsMeasurement
from dualform.studies.controls.pictures import drawings
from dualform.studies.controls.removal import Removals, retrained
from dualform.studies.controls.results import ControlsResults
from dualform.studies.data import fingerprint
from dualform.studies.drawing import save_drawings
from dualform.studies.parts import run_parts
from dualform.studies.report import Report

QUESTION = "What does attention to training images tell that simpler things do not?"


def run_study(
    data: Path,
    setting: ControlsSetting,
    seeds: int | None,
    device: str,
    out: Path,
    model: str,
    workers: int = 0,
) -> Report:
    """Trains, reads and retrains, and reports; what is done already is kept.

    Args:
        seeds: of the networks that are read; by default as many as the setting has.
        model: package.module:function that builds the setting's network, for the explorer.
        workers: how many trainings run at a time, each in a process of its own; 0 for none.
    """
    seeds = seeds or setting.seeds
    experiment = load_experiment(data, setting, device)
    measure = ControlsMeasurement(experiment, out)
    kinds = {
        TRUE: measure.true_labels,
        RANDOM: measure.random_labels,
        UNTRAINED: measure.untrained,
    }
    parts = {
        f"seed {seed} {kind}": partial(one, seed)
        for seed in range(seeds)
        for kind, one in kinds.items()
    }
    digits, tests = experiment.images, experiment.test
    data_used = fingerprint(digits.pixels, digits.y, tests.pixels, tests.y)
    kept = {**asdict(setting), "device": device, "data": data_used}
    found = run_parts(out, kept, parts, workers)
    truth = retrained(experiment, out / "halves", workers)
    scores = [measure.load_scores(seed) for seed in range(seeds)]
    chosen = found[f"seed 0 {TRUE}"]["least sure"]
    removals = Removals(experiment, scores[0], chosen, workers)
    places = {f"removal {at}": partial(removals.of_query, at) for at in range(len(chosen))}
    lost = run_parts(out, kept, {"removal at random": removals.at_random, **places})
    results = ControlsResults(
        setting,
        {kind: [found[f"seed {seed} {kind}"] for seed in range(seeds)] for kind in kinds},
        truth,
        scores,
        lost["removal at random"],
        [lost[name] for name in places],
        chosen,
    )
    own = asdict(setting)
    settings = {**own.pop("training"), **own, "seeds": seeds, "device": device}
    del settings["steps"]  # a training has as many as its epochs need
    return Report(
        "controls",
        QUESTION,
        settings,
        findings(results),
        results.tables(),
        save_drawings(drawings(results), out),
        tuple(
            f"dualform view {out / name} --model {model} --input {out / f'{name}.npz'}"
            for name in ("run", "random-labels")
        ),
    )


def small_model() -> nn.Module:
    """The network of the small setting, for the explorer."""
    return SETTINGS["small"].training.make_model()


def middle_model() -> nn.Module:
    """The network of the middle setting, for the explorer."""
    return SETTINGS["middle"].training.make_model()


def paper_model() -> nn.Module:
    """The network of the paper's setting, for the explorer."""
    return SETTINGS["paper"].training.make_model()
