"""The study as one call: it trains, reads, draws, and says what was found."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from torch import nn

from dualform.studies.data import fingerprint
from dualform.studies.mnist.findings import findings
from dualform.studies.mnist.measure import MnistMeasurement
from dualform.studies.mnist.pictures import draw
from dualform.studies.mnist.results import MnistResults
from dualform.studies.mnist.setting import SETTINGS, MnistSetting, load_parts
from dualform.studies.parts import run_parts
from dualform.studies.report import Report

QUESTION = "Do the training images that a test image attends to have its class?"
COLORS = 3 * 32 * 32
"""How many numbers an image of CIFAR-10 has."""


def run_study(
    data: Path,
    setting: MnistSetting,
    seeds: int | None,
    device: str,
    out: Path,
    model: str,
    workers: int = 0,
) -> Report:
    """Trains with each seed, and reports; what is done already is kept.

    Args:
        seeds: by default as many as the setting has.
        model: package.module:function that builds the setting's network, for the explorer.
        workers: how many parts run at a time, each in a process of its own; 0 for none.
    """
    seeds = seeds or setting.seeds
    images, tests = load_parts(data, setting)
    setting = setting.fitted(images)
    measure = MnistMeasurement(setting, images, tests, device, out)
    parts = {f"seed {seed}": partial(measure.seed, seed) for seed in range(seeds)}
    data_used = fingerprint(images.pixels, images.y, tests.pixels, tests.y)
    kept = {**asdict(setting), "device": device, "data": data_used}
    found = run_parts(out, kept, parts, workers)
    results = MnistResults(setting, tests.classes, [found[name] for name in parts])
    own = asdict(setting)
    settings = {**own.pop("training"), **own, "seeds": seeds, "device": device}
    asked = f"--model {model} --input {out / 'queries.npz'}"
    return Report(
        "mnist",
        QUESTION,
        settings,
        findings(results),
        results.tables(),
        draw(results, images, tests, out),
        (f"dualform view {out / 'run'} {asked}",),
    )


def small_model() -> nn.Module:
    """The network of the small setting, for the explorer."""
    return SETTINGS["small"].training.make_model()


def paper_model() -> nn.Module:
    """The network of the paper's setting, for the explorer."""
    return SETTINGS["paper"].training.make_model()


def small_cifar10_model() -> nn.Module:
    """The same of the small setting for CIFAR-10."""
    return _for_colors("small")


def paper_cifar10_model() -> nn.Module:
    """The same of the paper's setting for CIFAR-10."""
    return _for_colors("paper")


def _for_colors(size: str) -> nn.Module:
    training = SETTINGS[size].training
    return replace(training, widths=(COLORS, *training.widths[1:])).make_model()
