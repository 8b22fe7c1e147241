"""Verbs about experiments: one for each study, `dualform study NAME`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from dualform.cli.options import as_json, print_json, print_results

if TYPE_CHECKING:
    from dualform.studies.report import Report

SIZES = ("small", "paper")


def study_options(
    verb: str, needs_data: bool = True, sizes: Sequence[str] = SIZES
) -> Callable[[Any], Any]:
    """What studies are given: where data are, where results go, what size, how many seeds."""
    options = [
        click.option("--setting", type=click.Choice(sizes), default=sizes[0], show_default=True),
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


@study.command()
@study_options("mnist")
@click.option(
    "--dataset",
    type=click.Choice(["mnist", "fashion-mnist", "cifar10"]),
    default="mnist",
    show_default=True,
)
def mnist(
    data: Path | None,
    setting: str,
    dataset: str,
    seeds: int | None,
    device: str,
    out: Path,
    as_json: bool,
) -> None:
    """Do images that a test image attends to have its class?"""
    from dualform.studies.data import data_folder
    from dualform.studies.mnist import SETTINGS, run_study

    chosen = replace(SETTINGS[setting], dataset=dataset)
    colors = "_cifar10" if dataset == "cifar10" else ""
    model = f"dualform.studies.mnist:{setting}{colors}_model"
    report = run_study(data_folder(data), chosen, seeds, device, out, model)
    show_report(report, out, as_json)


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


@study.command()
@study_options("controls", sizes=("small", "middle", "paper"))
@click.option("--workers", type=click.IntRange(0), default=0, help="Processes that retrain.")
def controls(
    data: Path | None,
    setting: str,
    seeds: int | None,
    device: str,
    out: Path,
    as_json: bool,
    workers: int,
) -> None:
    """What attention tells that simpler things do not: controls."""
    from dualform.studies.controls import SETTINGS, run_study
    from dualform.studies.data import data_folder

    model = f"dualform.studies.controls:{setting}_model"
    report = run_study(data_folder(data), SETTINGS[setting], seeds, device, out, model, workers)
    show_report(report, out, as_json)


@study.command("language")
@study_options("language")
def language(
    data: Path | None, setting: str, seeds: int | None, device: str, out: Path, as_json: bool
) -> None:
    """Which training positions language models use."""
    from dualform.studies.data import data_folder
    from dualform.studies.language import SETTINGS, run_study

    models = f"dualform.studies.language.explored:{setting}"
    report = run_study(data_folder(data), SETTINGS[setting], seeds, device, out, models)
    show_report(report, out, as_json)
