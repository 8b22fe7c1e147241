"""The study as one call: it trains, reads, draws, and says what was found."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path

from torch import nn

from dualform.studies.data import fingerprint
from dualform.studies.parts import run_parts
from dualform.studies.report import Report
from dualform.studies.two_tasks.findings import findings
from dualform.studies.two_tasks.measure import TwoTasksMeasurement
from dualform.studies.two_tasks.pictures import draw
from dualform.studies.two_tasks.results import TwoTasksResults
from dualform.studies.two_tasks.tasks import SETTINGS, TwoTasksSetting, load_tasks

QUESTION = "Where does the attention go when a network learns digits and garments?"


def run_study(
    data: Path,
    setting: TwoTasksSetting,
    seeds: int | None,
    device: str,
    out: Path,
    model: str,
    workers: int = 0,
) -> Report:
    """Trains with each seed, together and in sequence, and reports; what is done already is kept.

    Args:
        seeds: by default as many as the setting has.
        model: package.module:function that builds the setting's network, for the explorer.
        workers: how many parts run at a time, each in a process of its own; 0 for none.
    """
    seeds = seeds or setting.seeds
    tasks, tests = load_tasks(data, setting)
    measure = TwoTasksMeasurement(setting, tasks, tests, device, out)
    parts = {
        f"seed {seed} {how}": partial(one, seed)
        for seed in range(seeds)
        for how, one in (("together", measure.together), ("in sequence", measure.in_sequence))
    }
    pictures = [part for one in (tasks, tests) for part in (one.images.pixels, one.images.y)]
    kept = {**asdict(setting), "device": device, "data": fingerprint(*pictures)}
    found = run_parts(out, kept, parts, workers)
    together, sequences = (
        [found[f"seed {seed} {how}"] for seed in range(seeds)]
        for how in ("together", "in sequence")
    )
    results = TwoTasksResults(setting, together, sequences)
    own = asdict(setting)
    settings = {**own.pop("training"), **own, "seeds": seeds, "device": device}
    del settings["steps"]  # a training has as many as the run it is for
    asked = f"--model {model} --input {out / 'queries.npz'}"
    return Report(
        "two-tasks",
        QUESTION,
        settings,
        findings(results),
        results.tables(),
        draw(results, tasks, tests, out),
        (f"dualform view {out / 'run'} {asked}",),
    )


def small_model() -> nn.Module:
    """The network of the small setting, for the explorer."""
    return SETTINGS["small"].training.make_model()


def paper_model() -> nn.Module:
    """The network of the paper's setting, for the explorer."""
    return SETTINGS["paper"].training.make_model()
