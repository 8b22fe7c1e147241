"""The verb about transformers: `diagnose`."""

from __future__ import annotations

from pathlib import Path

import click

import dualform
from dualform.cli.options import (
    INPUT,
    MODEL,
    as_json,
    model_and_input,
    print_json,
    print_results,
    run_argument,
)
from dualform.diagnose import Diagnosis, OverTraining, over_training
from dualform.read import open_run


@click.command()
@run_argument
@click.option("--model", required=True, help=MODEL)
@click.option("--input", "inputs", type=click.Path(path_type=Path), required=True, help=INPUT)
@click.option("--layer", "layers", multiple=True, help="Names of blocks, or patterns.")
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
    ablate: bool,
    history: bool,
    steps: tuple[int, ...],
    as_json: bool,
) -> None:
    """Do a transformer's tokens collapse, and which heads are needed?"""
    found: Diagnosis | OverTraining
    opened = open_run(run)
    built, x = model_and_input(opened, model, inputs)
    chosen = list(layers) or None
    if history or steps:
        found = over_training(opened, built, x, steps=steps or None, layers=chosen, ablate=ablate)
        sentences, reports = (
            list(found.findings),
            dict(zip(found.steps, found.reports, strict=True)),
        )
    else:
        found = dualform.diagnose(built, x, layers=chosen, ablate=ablate)
        sentences, reports = [one.sentence for one in found.findings], {opened.steps: found}
    if not as_json:
        return print_results(found)
    heads = [
        {"step": step, **vars(one)}
        for step, report in reports.items()
        for one in (() if report.heads is None else report.heads.heads)
    ]
    return print_json({"findings": sentences, "heads": heads})
