"""Verbs about scores and labels: `evaluate retrain`, `lds`, `suspects`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dualform.cli.options import (
    Opened,
    as_json,
    count,
    imported,
    print_json,
    print_results,
    reading,
    run_argument,
)
from dualform.evaluate import GroundTruth, Retraining, lds, load_scores


@click.group()
def evaluate() -> None:
    """Are scores right? Retrain, compare, and find suspicious labels."""


@evaluate.command()
@click.argument("task")
@click.option("--samples", type=int, required=True, help="How many training samples there are.")
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="For results.")
@click.option("--subsets", type=int, default=50, show_default=True, help="How many.")
@click.option("--seeds", type=int, default=3, show_default=True, help="For each subset.")
@click.option("--fraction", type=float, default=0.5, show_default=True, help="Of the samples.")
@click.option("--workers", type=int, help="Processes. Default: one for each core.")
@as_json
def retrain(task: str, as_json: bool, folder: Path, **settings: Any) -> None:
    """Make the ground truth: train on random subsets, again and again.

    TASK is package.module:function; it is called with the positions of the samples to train on
    and a seed, and returns one number for each query. An interrupted retraining goes on.
    """
    truth = Retraining(imported("TASK", task), folder=folder, **settings).run()
    path = folder / "truth.npz"
    if as_json:
        print_json({"truth": str(path), **truth.to_dict()})
    else:
        print_results(truth)
        click.echo(f"Wrote {path}")


@evaluate.command("lds")
@click.argument("scores", type=click.Path(path_type=Path))
@click.argument("truth", type=click.Path(path_type=Path))
@as_json
def evaluate_lds(scores: Path, truth: Path, as_json: bool) -> None:
    """Say how well scores foretell what retraining gives.

    SCORES is a .npy file, samples × queries, or a .npz file with such `values` (and `ids`); TRUTH
    is what `dualform evaluate retrain` wrote.
    """
    result = lds(load_scores(scores), GroundTruth.load(truth))
    print_json(result.to_dict()) if as_json else print_results(result)


@evaluate.command()
@run_argument
@count
@click.option("--layer", help="Default: the last one.")
@reading
@as_json
def suspects(run: Path, opened: Opened, count: int, layer: str | None, as_json: bool) -> None:
    """Rank the samples whose labels may be wrong.

    They are those whose errors stayed large throughout training.
    """
    ranking = opened(run).suspicion(layer).top(count)
    if as_json:
        print_json([{"id": r.id, "label": r.label, "suspicion": r.value} for r in ranking.rows])
    else:
        print_results(ranking)
