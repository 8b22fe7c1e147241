"""The command line: `dualform demo`, `info`, `audit`, `top`, `report`, `study`."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console
from torch import nn

from dualform.demo import EPOCHS, run_demo
from dualform.errors import DualformError, ReadingError
from dualform.explore import Query, write_report
from dualform.ledger.samples import SampleId
from dualform.read import Reading, Run, Spotlight, open_run

run_argument = click.argument("run", type=click.Path(path_type=Path))
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dualform")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def cli(debug: bool) -> None:
    """Every prediction, traced to the training that made it."""


@cli.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/digits"))
@click.option("--epochs", type=click.IntRange(1), default=EPOCHS, show_default=True)
@as_json
def demo(out: Path, epochs: int, as_json: bool) -> None:
    """Train on digits with recording, audit, read test digits, and write a report."""
    page = run_demo(out, Console(quiet=as_json), epochs)
    if as_json:
        _print_json(
            {"run": str(out), "report": str(page), "audit": open_run(out).audit().to_dict()}
        )
    else:
        click.echo(f"The run is in {out}; the report is {page}: open it in a browser.")
        click.echo(f"Go on with: dualform top {out} --sample 0, or dualform audit {out}")


@cli.command()
@run_argument
@click.option("--check", is_flag=True, help="Read every committed byte and verify its checksum.")
@as_json
def info(run: Path, check: bool, as_json: bool) -> None:
    """Say what a run is: steps, samples, layers, optimizer, versions, size."""
    opened = open_run(run)
    problems = opened.check() if check else []
    facts = {
        "steps": opened.steps,
        "kept_steps": opened.kept_steps,
        "samples": len(opened.ids),
        "layers": opened.layers,
        "bytes": opened.nbytes,
        **opened.info.metadata,
        **({"problems": problems} if check else {}),
    }
    if as_json:
        _print_json(facts)
    else:
        _print(opened)
        if check and not problems:
            click.echo("Every committed byte is as it was written.")
    if problems:
        raise DualformError(f"{len(problems)} damaged: {problems[0]}")


@cli.command()
@run_argument
@as_json
def audit(run: Path, as_json: bool) -> None:
    """Do the books balance? Remainder, coverage and bytes of every parameter."""
    result = open_run(run).audit()
    _print_json(result.to_dict()) if as_json else _print(result)


def question(command: Any) -> Any:
    """The options that say what is asked: which queries, which layer, which output."""
    options = [
        click.option("--sample", "samples", multiple=True, help="A training sample, by its id."),
        click.option("--model", help="package.module:function that builds the model."),
        click.option(
            "--input", "inputs", type=click.Path(path_type=Path), help=".npy for --model."
        ),
        click.option("--layer", help="Default: the last one."),
        click.option("--output", type=int, help="Which unit. Default: the one with most output."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@cli.command()
@run_argument
@question
@click.option("-k", "--count", type=click.IntRange(1), default=10, show_default=True)
@as_json
def top(run: Path, count: int, as_json: bool, **asked: Any) -> None:
    """Show which training samples a layer's output is made of, for and against."""
    reading = _reading(open_run(run), **asked)
    best, worst = reading.top(count), reading.bottom(count)
    if as_json:
        lines = [reading.check.lines(at) for at in range(len(reading.names))]
        rankings = {"for": best, "against": worst}
        ranked = {name: [vars(row) for row in r.rows] for name, r in rankings.items()}
        _print_json({"layer": reading.layer, "queries": reading.names, "check": lines, **ranked})
    else:
        _print(reading, best, worst)


@cli.command()
@run_argument
@question
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True)
@as_json
def report(run: Path, out: Path, as_json: bool, **asked: Any) -> None:
    """Write a self-contained page about some queries (default: a sample of each label)."""
    opened = open_run(run)
    if not asked["samples"] and not asked["model"]:
        asked["samples"] = _one_of_each(opened)
    reading = _reading(opened, **asked)
    page = write_report(opened, reading, out, _shown(opened, reading, asked["samples"]))
    _print_json({"report": str(page)}) if as_json else click.echo(f"Wrote {page}")


@cli.group()
def study() -> None:
    """Experiments: what the mathematics leaves open, answered by measurement."""


@study.command("fixed-point")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/fixed-point"))
@click.option("--size", type=click.IntRange(16), default=1024, show_default=True, help="Tokens.")
@click.option("--steps", type=click.IntRange(2), default=120, show_default=True)
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--device", default="cpu", show_default=True)
@as_json
def fixed_point(out: Path, size: int, steps: int, seeds: int, device: str, as_json: bool) -> None:
    """Does iterated attention converge, and is what it converges to Gaussian?"""
    from dualform.studies.fixed_point import run_study, save_study

    found = run_study(size=size, steps=steps, seeds=seeds, device=device)
    paths = save_study(found, out)
    _print_json(found.to_dict()) if as_json else _print(found)
    if not as_json:
        click.echo(f"Wrote {', '.join(map(str, paths))}")


def main() -> None:
    """Runs the command line; an error is one line, unless --debug asks for more."""
    try:
        cli(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except (DualformError, OSError) as error:
        if "--debug" in sys.argv:
            raise
        click.echo(f"dualform: {error}", err=True)
        sys.exit(1)


def _reading(
    run: Run,
    samples: Sequence[str],
    model: str | None,
    inputs: Path | None,
    layer: str | None,
    output: int | None,
) -> Reading:
    if bool(samples) == bool(model):
        raise ReadingError(
            "say what to ask: --sample ID (a training sample, as each layer last saw it), or "
            "--model package.module:function with --input x.npy."
        )
    spotlight = _spotlight(run, samples, model, inputs, output)
    return spotlight.last if layer is None else spotlight[layer]


def _spotlight(
    run: Run, samples: Sequence[str], model: str | None, inputs: Path | None, output: int | None
) -> Spotlight:
    if model is None:
        return run.revisit([_known_id(run, name) for name in samples], output)
    if inputs is None:
        raise ReadingError("--model needs --input x.npy: what to call the model with.")
    built = _build(model)
    built.load_state_dict(run.state_dict(), strict=False)
    return run.spotlight(
        built.eval(), torch.from_numpy(np.load(inputs, allow_pickle=False)), output
    )


def _known_id(run: Run, name: str) -> SampleId:
    """The id as the run knows it: an integer where its ids are integers."""
    is_number = name.removeprefix("-").isdecimal()
    return int(name) if is_number and run.ids and isinstance(run.ids[0], int) else name


def _build(model: str) -> nn.Module:
    module, _, function = model.partition(":")
    sys.path.insert(0, "")
    try:
        built = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ReadingError(
            f"--model {model}: {error}; expected package.module:function, a function that takes "
            "no arguments and returns the model."
        ) from error
    assert isinstance(built, nn.Module)
    return built


def _one_of_each(run: Run) -> list[str]:
    """The first sample of each label, or the first eight samples."""
    labels = run.samples.labels
    first = {labels[name]: name for name in reversed(run.ids) if name in labels}
    chosen = [first[label] for label in sorted(first, key=str)] or run.ids[:8]
    return [str(name) for name in chosen[:12]]


def _shown(run: Run, reading: Reading, samples: Sequence[str]) -> list[Query]:
    """What the report shows of training samples; nothing but names for other queries."""
    ids = [_known_id(run, name) for name in samples]
    if len(ids) != len(reading.names):
        return []
    labels = run.samples.labels
    return [Query(f"sample {name}", labels.get(name), run.samples.preview(name)) for name in ids]


def _print(*results: Any) -> None:
    console = Console()
    for result in results:
        console.print(result)


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1, default=str))
