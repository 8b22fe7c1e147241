"""Verbs that show: `demo`, `view`, `report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dualform.cli.options import (
    MODEL,
    Opened,
    as_json,
    make_exhibit,
    print_json,
    reading,
    run_argument,
)
from dualform.demo import EPOCHS, run_demo
from dualform.explore import Exhibit, Explorer, write_report
from dualform.explore.show import missing
from dualform.ledger import run_path


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs/digits"), show_default=True
)
@click.option("--epochs", type=click.IntRange(1), default=EPOCHS, show_default=True)
@click.option("--view", "opens", is_flag=True, help="Open the explorer in the end.")
@as_json
def demo(out: Path, epochs: int, opens: bool, as_json: bool) -> None:
    """Train on digits, recording; audit, read, and write a report."""
    shown = run_demo(out, Console(quiet=as_json), epochs)
    audit = shown.exhibit.run.audit()
    if as_json:
        print_json({"run": str(out), "report": str(shown.report), "audit": audit.to_dict()})
        return
    click.echo(f"The run is in {out}; the report is {shown.report}: open it in a browser.")
    if opens:
        _serve([shown.exhibit], "127.0.0.1", 0, True)
        return
    asked = f"--model dualform.demo:make_model --input {shown.queries}"
    click.echo(f"Explore it with: dualform view {out} {asked}")
    click.echo(f"Or go on with: dualform top {out} --sample 0, dualform audit {out}")


def queries(command: Any) -> Any:
    """The options that give a model and what it is asked."""
    options = [
        click.option("--model", help=MODEL),
        click.option(
            "--input",
            "inputs",
            type=click.Path(path_type=Path),
            help="Queries for --model: .npy, or .npz with x; labels, titles and texts of each, and "
            "the names of the model's outputs, if known.",
        ),
        click.option(
            "--encode", help="package.module:function from a preview to the model's input."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@click.argument("runs", nargs=-1, required=True, type=run_path)
@queries
@reading
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Default: any that is free.")
@click.option("--browser/--no-browser", default=True, help="Open the page in a browser.")
def view(
    runs: tuple[Path, ...],
    opened: Opened,
    model: str | None,
    inputs: Path | None,
    encode: str | None,
    host: str,
    port: int,
    browser: bool,
) -> None:
    """Open the explorer on a run, or on two to compare.

    It is a local server, and stops with Ctrl+C.
    """
    exhibits = [make_exhibit(opened(run), model, inputs, encode) for run in runs]
    _serve(exhibits, host, port, browser)


@click.command()
@run_argument
@queries
@click.option(
    "--query", "numbers", multiple=True, type=int, help="Which of --input, by its number from 0."
)
@click.option("--sample", "samples", multiple=True, help="A training sample, by its id.")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="The page.")
@reading
@as_json
def report(
    run: Path,
    opened: Opened,
    model: str | None,
    inputs: Path | None,
    encode: str | None,
    numbers: tuple[int, ...],
    samples: tuple[str, ...],
    out: Path,
    as_json: bool,
) -> None:
    """Write the explorer as one file that works offline.

    It holds the chosen queries; by default the first of --input, or a sample of each label.
    """
    exhibit = make_exhibit(opened(run), model, inputs, encode)
    chosen = [*map(str, numbers), *(f"sample:{name}" for name in samples)]
    page = write_report(exhibit, out, chosen or None)
    print_json({"report": str(page)}) if as_json else click.echo(f"Wrote {page}")


def _serve(exhibits: Sequence[Exhibit], host: str, port: int, browser: bool) -> None:
    try:
        from dualform.explore.server import serve
    except ImportError as error:
        raise missing(error) from error
    serve([Explorer(exhibit) for exhibit in exhibits], host, port, browser)
