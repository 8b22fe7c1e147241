"""Verbs about experiments: one for each study, `dualform study NAME`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

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
@study_options("uea")
@click.option("--dataset", "datasets", multiple=True, help="Default: the setting's.")
@click.option("--kind", "layers", multiple=True, help="Attention layers. Default: all six.")
@click.option("--epochs", type=click.IntRange(1), help="Default: the setting's.")
@click.option("--workers", type=click.IntRange(0), default=0, help="Processes; 0: only this one.")
def uea(
    data: Path | None,
    setting: str,
    seeds: int | None,
    device: str,
    out: Path,
    as_json: bool,
    workers: int,
    **chosen: Any,
) -> None:
    """Test accuracy of each attention layer on time series."""
    from dualform.studies.data import data_folder
    from dualform.studies.uea import SETTINGS, run_study

    given = {name: one for name, one in chosen.items() if one}
    report = run_study(
        data_folder(data), replace(SETTINGS[setting], **given), seeds, device, out, workers
    )
    show_report(report, out, as_json)


@study.command("image-attention")
@study_options("image-attention")
@click.option(
    "--dataset", type=click.Choice(["mnist", "fashion-mnist"]), help="Default: fashion-mnist."
)
@click.option("--kind", "layers", multiple=True, help="Attention layers. Default: five.")
@click.option("--epochs", type=click.IntRange(1), help="Default: the setting's.")
def image_attention(
    data: Path | None,
    setting: str,
    seeds: int | None,
    device: str,
    out: Path,
    as_json: bool,
    **chosen: Any,
) -> None:
    """A small vision transformer with each attention layer."""
    from dualform.studies.data import data_folder
    from dualform.studies.image_attention import SETTINGS, run_study

    given = {name: one for name, one in chosen.items() if one}
    report = run_study(data_folder(data), replace(SETTINGS[setting], **given), seeds, device, out)
    show_report(report, out, as_json)


@study.command()
@study_options("robust")
@click.option(
    "--dataset", type=click.Choice(["mnist", "fashion-mnist"]), help="Default: the setting's."
)
@click.option("--kind", "layers", multiple=True, help="Attention layers. Default: all six.")
@click.option("--epochs", type=click.IntRange(1), help="Default: the setting's.")
def robust(
    data: Path | None,
    setting: str,
    seeds: int | None,
    device: str,
    out: Path,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Robust attention on contaminated images."""
    from dualform.studies.data import data_folder
    from dualform.studies.robust import SETTINGS, run_study

    given = {name: one for name, one in chosen.items() if one}
    report = run_study(data_folder(data), replace(SETTINGS[setting], **given), seeds, device, out)
    show_report(report, out, as_json)


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
@study_options("fixed-point", needs_data=False)
def fixed_point(setting: str, seeds: int | None, device: str, out: Path, as_json: bool) -> None:
    """Does iterated attention converge, and to a Gaussian?"""
    from dualform.studies.fixed_point import SETTINGS, run_study

    show_report(run_study(SETTINGS[setting], seeds, device, out), out, as_json)


@study.command("hypernetwork")
@study_options("hypernetwork", needs_data=False, sizes=("small", "tiny", "middle", "paper"))
def hypernetwork(setting: str, seeds: int | None, device: str, out: Path, as_json: bool) -> None:
    """Does hypernetwork attention combine known rules anew?"""
    from dualform.studies.hypernetwork import SETTINGS, run_study

    show_report(run_study(SETTINGS[setting], seeds, device, out), out, as_json)


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
    """What attention tells beyond simpler things."""
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
