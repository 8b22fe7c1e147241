"""The study as one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from dualform.studies.data import fingerprint, load_images
from dualform.studies.parts import Found, run_parts
from dualform.studies.paths.chains import measure_chains
from dualform.studies.paths.pictures import draw
from dualform.studies.paths.pruning import measure_pruning
from dualform.studies.paths.results import PathsResults
from dualform.studies.paths.setting import PathsSetting
from dualform.studies.report import Report

QUESTION = "What do attention paths tell of tasks and of heads?"
DATASET = "mnist"


def run_study(
    data: Path, setting: PathsSetting, seeds: int | None, device: str, out: Path, workers: int = 0
) -> Report:
    """Measures chains and trained transformers, and reports; what is done already is kept.

    Args:
        seeds: of chains and of transformers; by default as many as the setting has.
        workers: how many parts are run at a time, each in a process of its own; 0 for none.
    """
    images = load_images(data, DATASET)
    counts = (seeds or setting.seeds, seeds or setting.trained_seeds)
    marks = fingerprint(*(part for one in images for part in (one.pixels, one.y)))
    kept = {**asdict(setting), "device": device, "data": marks}
    chains = {f"chains {seed}": partial(measure_chains, setting, seed) for seed in range(counts[0])}
    pruning = {
        f"pruning {seed}": partial(measure_pruning, setting, images, device, seed)
        for seed in range(counts[1])
    }
    parts: dict[str, Callable[[], Found]] = {**chains, **pruning}
    found = run_parts(out, kept, parts, workers)
    results = PathsResults(setting, [found[n] for n in chains], [found[n] for n in pruning])
    own = asdict(setting) | {"seeds": counts[0], "trained_seeds": counts[1], "device": device}
    return Report("paths", QUESTION, own, results.findings(), results.tables(), draw(results, out))
