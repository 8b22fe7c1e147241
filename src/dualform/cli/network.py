"""Verbs about the whole network: `explain`, `influence`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np

from dualform.cli.options import (
    INPUT,
    MODEL,
    as_json,
    asked_of,
    both_ways,
    count,
    print_json,
    print_results,
    run_argument,
)
from dualform.read import Scores, open_run


def whole_network(command: Any) -> Any:
    """What explain and influence are told."""
    options = [
        click.option("--model", required=True, help=MODEL),
        click.option(
            "--input", "inputs", type=click.Path(path_type=Path), required=True, help=INPUT
        ),
        click.option(
            "--target",
            "targets",
            type=int,
            multiple=True,
            help="A class; once for all queries, or once for each. Default: the one with most "
            "output.",
        ),
        count,
        click.option("--save", type=click.Path(path_type=Path), help="All scores, as .npz."),
        as_json,
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@run_argument
@whole_network
@click.option(
    "--tolerance",
    type=float,
    default=1e-3,
    show_default=True,
    help="How much of the output's change may be missed.",
)
def explain(
    run: Path, model: str, inputs: Path, targets: tuple[int, ...], tolerance: float, **shown: Any
) -> None:
    """What did each sample add to the whole network's output?

    A complete account: what every training sample added to it, through all layers.
    """
    opened = open_run(run)
    found = opened.explain(*asked_of(opened, model, inputs), _target(targets), tolerance)
    lines = [found.check.lines(at) for at in range(len(found.queries))] if found.check else []
    facts = {"check": lines, "completeness": found.completeness.tolist()}
    _show_scores(found, facts, **shown)


@click.command()
@run_argument
@whole_network
@click.option(
    "--method",
    default="ridge",
    show_default=True,
    help="For comparison: accounting, tracin, fisher, ekfac.",
)
@click.option("--damping", type=float, help="In units of the mean diagonal. Default: 3 for ridge.")
@click.option("--rank", type=int, help="How many leading directions are kept.")
def influence(
    run: Path,
    model: str,
    inputs: Path,
    targets: tuple[int, ...],
    method: str,
    damping: float | None,
    rank: int | None,
    **shown: Any,
) -> None:
    """What would leaving a sample out of training do?

    An estimate of how much the output would fall without each sample.
    """
    opened = open_run(run)
    asked = asked_of(opened, model, inputs)
    found = opened.influence(*asked, _target(targets), method, damping, rank)
    facts = {"method": found.method, "damping": found.damping, "kept": found.kept}
    _show_scores(found, facts, **shown)


def _target(targets: tuple[int, ...]) -> int | list[int] | None:
    return (targets[0] if len(targets) == 1 else list(targets)) if targets else None


def _show_scores(
    scores: Scores, facts: dict[str, Any], count: int, save: Path | None, as_json: bool
) -> None:
    """Prints the samples for and against, and keeps all scores if a file is named."""
    if save is not None:
        np.savez(save, values=scores.values, ids=np.array(scores.ids))
    best, worst = scores.top(count), scores.bottom(count)
    if as_json:
        print_json({"queries": scores.queries, **facts, **both_ways(best, worst)})
    else:
        print_results(best, worst)
        click.echo(scores.note)
