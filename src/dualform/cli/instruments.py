"""The verb about transformers: `diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import dualform
from dualform.cli.options import (
    INPUT,
    MODEL,
    as_json,
    model_and_input,
    print_json,
    print_results,
    read_targets,
    run_argument,
)
from dualform.diagnose import Diagnosis, OverTraining, over_training
from dualform.read import open_run


@click.command()
@run_argument
@click.option("--model", required=True, help=MODEL)
@click.option("--input", "inputs", type=click.Path(path_type=Path), required=True, help=INPUT)
@click.option("--layer", "layers", multiple=True, help="Names of blocks, or patterns.")
@click.option(
    "--targets",
    "numbers",
    type=click.Path(path_type=Path),
    help="One number a query as .npy, such as +1 and -1: heads are scored by paths to them.",
)
@click.option("--ablate", is_flag=True, help="Also run the model without each head.")
@click.option(
    "--over-training", "history", is_flag=True, help="At nine steps, from the first to the last."
)
@click.option("--step", "steps", type=int, multiple=True, help="At these steps of training.")
@as_json
def diagnose(
    run: Path,
    model: str,
    inputs: Path,
    layers: tuple[str, ...],
    numbers: Path | None,
    ablate: bool,
    history: bool,
    steps: tuple[int, ...],
    as_json: bool,
) -> None:
    """Do a transformer's tokens collapse, and which heads are needed?"""
    found: Diagnosis | OverTraining
    opened = open_run(run)
    built, x = model_and_input(opened, model, inputs)
    asked: dict[str, Any] = {"layers": list(layers) or None, "ablate": ablate}
    asked["targets"] = None if numbers is None else read_targets(numbers)
    if history or steps:
        found = over_training(opened, built, x, steps=steps or None, **asked)
        sentences, reports = (
            list(found.findings),
            dict(zip(found.steps, found.reports, strict=True)),
        )
    else:
        found = dualform.diagnose(built, x, **asked)
        sentences, reports = [one.sentence for one in found.findings], {opened.steps: found}
    if not as_json:
        return print_results(found)
    heads = [
        {"step": step, **vars(one)}
        for step, report in reports.items()
        for one in (() if report.heads is None else report.heads.heads)
    ]
    scores = [
        {"step": step, "head": name, "score": score}
        for step, report in reports.items()
        for score, name in (() if report.paths is None else report.paths.each)
    ]
    return print_json({"findings": sentences, "heads": heads, "paths": scores})
