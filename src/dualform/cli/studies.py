"""Verbs about experiments: one for each study, `dualform study NAME`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
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
            "--workers",
            type=click.IntRange(0),
            default=0,
            show_default=True,
            help="How many processes train at a time; 0: only this one.",
        ),
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


def add_study(
    name: str,
    summary: str,
    *choices: Any,
    sizes: Sequence[str] = SIZES,
    needs_data: bool = True,
    model: str = "",
) -> None:
    """Adds `dualform study NAME`, which calls `run_study` of the package of that name.

    Args:
        choices: options of this study. Where they are given, they replace what the setting has.
        model: what makes the model for the explorer; {setting} in it is filled in. `run_study`
            takes it after the folder of the results.
    """

    def command(
        setting: str,
        seeds: int | None,
        device: str,
        out: Path,
        workers: int,
        as_json: bool,
        data: Path | None = None,
        **chosen: Any,
    ) -> None:
        from dualform.studies.data import data_folder

        package = import_module(f"dualform.studies.{name.replace('-', '_')}")
        given = {field: one for field, one in chosen.items() if one}
        asked = replace(package.SETTINGS[setting], **given)
        parts: list[Any] = [data_folder(data)] if needs_data else []
        parts += [asked, seeds, device, out]
        if model:
            kind = setting + ("_cifar10" if given.get("dataset") == "cifar10" else "")
            parts.append(model.format(setting=kind))
        show_report(package.run_study(*parts, workers), out, as_json)

    for option in (*reversed(choices), study_options(name, needs_data, sizes)):
        command = option(command)
    study.command(name, help=summary)(command)


def choose_images(*names: str, default: str = "the setting's") -> Any:
    """The option that says which pictures a study is about."""
    return click.option("--dataset", type=click.Choice(names), help=f"Default: {default}.")


def choose_layers(count: str) -> Any:
    """The option that says which attention layers are trained."""
    return click.option(
        "--kind", "layers", multiple=True, help=f"Attention layers. Default: {count}."
    )


DIGITS, GARMENTS = "mnist", "fashion-mnist"
EPOCHS = click.option("--epochs", type=click.IntRange(1), help="Default: the setting's.")

add_study(
    "uea",
    "Test accuracy of each attention layer on time series.",
    click.option("--dataset", "datasets", multiple=True, help="Default: the setting's."),
    choose_layers("all six"),
    EPOCHS,
)
add_study(
    "image-attention",
    "A small vision transformer with each attention layer.",
    choose_images(DIGITS, GARMENTS, default=GARMENTS),
    choose_layers("five"),
    EPOCHS,
    sizes=("small", "middle", "paper"),
)
add_study(
    "robust",
    "Robust attention on contaminated images.",
    choose_images(DIGITS, GARMENTS),
    choose_layers("all six"),
    EPOCHS,
)
add_study("collapse", "Which masks, norms and widths let tokens become alike?")
add_study(
    "paths",
    "What do attention paths tell of tasks and heads?",
    sizes=("small", "tiny", "paper"),
)
add_study("fixed-point", "Does iterated attention converge, and to a Gaussian?", needs_data=False)
add_study(
    "hypernetwork",
    "Does hypernetwork attention combine known rules anew?",
    click.option(
        "--task",
        "tasks",
        multiple=True,
        type=click.Choice(("fuzzy_logic", "raven")),
        help="Default: both.",
    ),
    choose_layers("those of the setting"),
    click.option("--shorter", type=click.IntRange(1), help="So many times fewer steps."),
    sizes=("small", "tiny", "middle", "paper"),
    needs_data=False,
)
add_study(
    "mnist",
    "Do images that a test image attends to have its class?",
    choose_images(DIGITS, GARMENTS, "cifar10", default=DIGITS),
    model="dualform.studies.mnist:{setting}_model",
)
add_study(
    "two-tasks",
    "Digits, then garments: where does attention go?",
    model="dualform.studies.two_tasks:{setting}_model",
)
add_study(
    "controls",
    "What attention tells beyond simpler things.",
    sizes=("small", "middle", "paper"),
    model="dualform.studies.controls:{setting}_model",
)
add_study(
    "language",
    "Which training positions language models use.",
    click.option(
        "--only",
        multiple=True,
        type=click.Choice(("fables", "wikitext", "shakespeare")),
        help="Which models. Default: all three.",
    ),
    model="dualform.studies.language.explored:{setting}",
)
