"""Verbs about experiments: `study uea`, `fixed-point`, `two-tasks`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from dualform.cli.options import as_json, print_json, print_results

if TYPE_CHECKING:
    from dualform.studies.report import Report

SIZES = ("small", "paper")


def study_options(verb: str, needs_data: bool = True) -> Callable[[Any], Any]:
    """What studies are given: where data are, where results go, what size, how many seeds."""
    options = [
        click.option("--setting", type=click.Choice(SIZES), default="small", show_default=True),
        click.option("--seeds", type=click.IntRange(1), help="Default: the setting's."),
        click.option("--device", default="cpu", show_default=True),
        click.option(
            "--out",
            type=click.Path(path_type=Path),
            default=Path("runs") / verb,
            show_default=True,
            help="Results and runs; an interrupted study goes on there.",
        ),
        as_json,
    ]
    if needs_data:
        options.append(
            click.option("--data", type=click.Path(path_type=Path), help="Default: $DUALFORM_DATA.")
        )

    def decorated(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorated


def show_report(report: Report, out: Path, as_json: bool) -> None:
    """Saves what a study found, and prints it."""
    paths = report.save(out)
    print_json(report.to_dict()) if as_json else print_results(report)
    if not as_json:
        click.echo(f"Wrote {', '.join(map(str, paths))}")


@click.group()
def study() -> None:
    """The papers' experiments, one command each."""


@study.command()
@click.option("--data", type=click.Path(path_type=Path), help="Default: $DUALFORM_DATA.")
@click.option(
    "--setting", type=click.Choice(["small", "paper"]), default="small", show_default=True
)
@click.option("--dataset", "datasets", multiple=True, help="Default: all four.")
@click.option("--kind", "kinds", multiple=True, help="Default: all five.")
@click.option("--seeds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--epochs", type=click.IntRange(1), help="Default: the setting's.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--workers", type=click.IntRange(0), default=0, help="Processes; 0: only this one.")
@click.option("--out", type=click.Path(path_type=Path), help="Write every training as JSON.")
@as_json
def uea(data: Path | None, out: Path | None, as_json: bool, **chosen: Any) -> None:
    """Test accuracy of each attention layer on time series."""
    from dualform.studies import uea
    from dualform.studies.data import data_folder

    results = uea.study(data_folder(data), console=Console(quiet=as_json), **chosen)
    if out is not None:
        uea.save(results, out)
    print_json(uea.summary(results)) if as_json else print_results(uea.table(results))


@study.command()
@study_options("collapse")
def collapse(
    data: Path | None, setting: str, seeds: int | None, device: str, out: Path, as_json: bool
) -> None:
    """Which masks, norms and widths let tokens become alike?"""
    from dualform.studies.collapse import SETTINGS, run_study
    from dualform.studies.data import data_folder

    report = run_study(data_folder(data), SETTINGS[setting], seeds, device, out)
    show_report(report, out, as_json)


@study.command("fixed-point")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs/fixed-point"), show_default=True
)
@click.option("--size", type=click.IntRange(16), default=1024, show_default=True, help="Tokens.")
@click.option("--steps", type=click.IntRange(2), default=120, show_default=True)
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--device", default="cpu", show_default=True)
@as_json
def fixed_point(out: Path, size: int, steps: int, seeds: int, device: str, as_json: bool) -> None:
    """Does iterated attention converge, and to a Gaussian?"""
    from dualform.studies.fixed_point import run_study, save_study

    found = run_study(size=size, steps=steps, seeds=seeds, device=device)
    paths = save_study(found, out)
    print_json(found.to_dict()) if as_json else print_results(found)
    if not as_json:
        click.echo(f"Wrote {', '.join(map(str, paths))}")


@study.command("two-tasks")
@study_options("two-tasks")
def two_tasks(
    data: Path | None, setting: str, seeds: int | None, device: str, out: Path, as_json: bool
) -> None:
    """Digits, then garments: where does attention go?"""
    from dualform.studies.data import data_folder
    from dualform.studies.two_tasks import SETTINGS, run_study

    model = f"dualform.studies.two_tasks:{setting}_model"
    report = run_study(data_folder(data), SETTINGS[setting], seeds, device, out, model)
    show_report(report, out, as_json)
