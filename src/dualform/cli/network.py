"""Verbs about the whole network: `explain`, `influence`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np

from dualform.cli.options import (
    INPUT,
    MODEL,
    Opened,
    as_json,
    count,
    model_and_input,
    print_answer,
    reading,
    run_argument,
)
from dualform.read.ask import Question, ask


def whole_network(command: Any) -> Any:
    """What explain and influence are told."""
    options: list[Any] = [
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
        reading,
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
    run: Path, model: str, inputs: Path, targets: tuple[int, ...], tolerance: float, **printed: Any
) -> None:
    """What did each sample add to the whole network's output?

    A complete account: what every training sample added to it, through all layers.
    """
    asked = Question("network", output=_outputs(targets), tolerance=tolerance)
    _ask(run, asked, model, inputs, ["completeness"], **printed)


@click.command()
@run_argument
@whole_network
@click.option(
    "--method",
    default="ridge",
    show_default=True,
    help="For comparison: accounting, tracin, fisher.",
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
    **printed: Any,
) -> None:
    """What would leaving a sample out of training do?

    An estimate of how much the output would fall without each sample.
    """
    output = _outputs(targets)
    asked = Question("removed", output=output, method=method, damping=damping, rank=rank)
    _ask(run, asked, model, inputs, ["method", "damping", "kept"], **printed)


def _outputs(targets: tuple[int, ...]) -> int | tuple[int, ...] | None:
    return (targets[0] if len(targets) == 1 else targets) if targets else None


def _ask(
    run: Path,
    asked: Question,
    model: str,
    inputs: Path,
    facts: list[str],
    opened: Opened,
    count: int,
    save: Path | None,
    as_json: bool,
) -> None:
    """Asks the run, prints the samples for and against, and saves all scores if told where.

    Args:
        facts: what JSON also says of the scores, by the name of their attribute.
    """
    asked_run = opened(run)
    answer = ask(asked_run, asked, *model_and_input(asked_run, model, inputs))
    scores = answer.scores
    if save is not None:
        np.savez(save, values=scores.values, ids=np.array(scores.ids))
    print_answer(answer, {name: getattr(scores, name) for name in facts}, count, as_json)
