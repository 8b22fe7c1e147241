"""The study as one call: it makes networks, measures them, draws, and says what was found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from dualform.studies.collapse.findings import findings
from dualform.studies.collapse.measure import CollapseMeasurement
from dualform.studies.collapse.pictures import draw
from dualform.studies.collapse.results import CollapseResults
from dualform.studies.collapse.setting import CollapseSetting
from dualform.studies.collapse.training import HiddenCharacters
from dualform.studies.data import fingerprint, read_text
from dualform.studies.parts import Found, run_parts
from dualform.studies.report import Report

QUESTION = "Which masks, norms and widths let the tokens of a transformer become alike?"
TEXT = "tinyshakespeare.txt"


def run_study(
    data: Path,
    setting: CollapseSetting,
    seeds: int | None,
    device: str,
    out: Path,
    workers: int = 0,
) -> Report:
    """Measures random networks and trained ones, and reports; what is done already is kept.

    Args:
        seeds: of random networks and of trained ones; by default as many as the setting has.
        workers: how many parts are run at a time, each in a process of its own; 0 for none.
    """
    text = read_text(data, TEXT)
    task = HiddenCharacters(text, setting)
    measure = CollapseMeasurement(setting, task, device)
    counts = (seeds or setting.seeds, seeds or setting.trained_seeds)
    kept = {**asdict(setting), "device": device, "data": fingerprint(text)}
    found = run_parts(out, kept, parts_of(measure, *counts), workers)
    results = CollapseResults(
        setting,
        [found[f"random seed {seed}"] for seed in range(counts[0])],
        {
            one: [found[f"trained seed {seed} {one.name}"] for seed in range(counts[1])]
            for one in setting.trained()
        },
        task.loss_of_frequencies,
    )
    own = asdict(setting) | {"seeds": counts[0], "trained_seeds": counts[1], "device": device}
    return Report(
        "collapse", QUESTION, own, findings(results), results.tables(), draw(results, out)
    )


def parts_of(
    measure: CollapseMeasurement, random_seeds: int, trained_seeds: int
) -> dict[str, Callable[[], Found]]:
    """What is to be measured, by name."""
    found: dict[str, Callable[[], Found]] = {
        f"random seed {seed}": partial(measure.random, seed) for seed in range(random_seeds)
    }
    return found | {
        f"trained seed {seed} {one.name}": partial(measure.trained, seed, one)
        for seed in range(trained_seeds)
        for one in measure.setting.trained()
    }
