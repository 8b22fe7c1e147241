"""The study as one call: it trains, reads, draws, and says what was found."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path

from dualform.studies.data import fingerprint
from dualform.studies.language.findings import findings
from dualform.studies.language.measure import LanguageMeasurement
from dualform.studies.language.pictures import draw
from dualform.studies.language.results import LanguageResults
from dualform.studies.language.tasks import LanguageSetting, load_task
from dualform.studies.parts import run_parts
from dualform.studies.report import Report

QUESTION = "Which training positions does a next-token prediction use?"


def run_study(
    data: Path,
    setting: LanguageSetting,
    seeds: int | None,
    device: str,
    out: Path,
    models: str,
    workers: int = 0,
) -> Report:
    """Trains every model with each seed, and reports; what is done already is kept.

    Args:
        seeds: by default as many as the setting has.
        models: what the functions that build the models are called, up to the model's name, for
            the explorer: "package.module:small".
        workers: how many parts run at a time, each in a process of its own; 0 for none.
    """
    seeds = seeds or setting.seeds
    texts = {
        name: load_task(data, task, setting.context).train for name, task in setting.trained.items()
    }
    parts = {
        f"{name} seed {seed}": partial(
            LanguageMeasurement(setting, name, data, device, out).measure, seed
        )
        for name in setting.trained
        for seed in range(seeds)
    }
    data_used = fingerprint(*(text.tokens for text in texts.values()))
    kept = {**asdict(setting), "device": device, "data": data_used}
    found = run_parts(out, kept, parts, workers)
    by_model = {
        name: [found[f"{name} seed {seed}"] for seed in range(seeds)] for name in setting.trained
    }
    results = LanguageResults(setting, by_model, texts)
    settings = {**asdict(setting), "seeds": seeds, "device": device}
    tasks = {name: settings["tasks"][name] for name in setting.trained}
    del settings["tasks"], settings["only"]
    look = tuple(
        f"DUALFORM_DATA={data} dualform view {out / name} --model {models}_{name} "
        f"--input {out / name}.npz"
        for name in setting.trained
    )
    return Report(
        "language",
        QUESTION,
        tasks | settings,
        findings(results),
        results.tables(),
        draw(results, out),
        look,
    )
