"""Verbs about a run: `demo`, `info`, `audit`, `top`, `report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dualform.cli.given import (
    as_json,
    asked_of,
    both_ways,
    known_id,
    print_json,
    print_results,
    run_argument,
)
from dualform.demo import EPOCHS, run_demo
from dualform.errors import DualformError, ReadingError
from dualform.explore import Query, write_report
from dualform.read import Reading, Run, Spotlight, open_run


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/digits"))
@click.option("--epochs", type=click.IntRange(1), default=EPOCHS, show_default=True)
@as_json
def demo(out: Path, epochs: int, as_json: bool) -> None:
    """Train on digits with recording, audit, read test digits, and write a report."""
    page = run_demo(out, Console(quiet=as_json), epochs)
    if as_json:
        print_json({"run": str(out), "report": str(page), "audit": open_run(out).audit().to_dict()})
    else:
        click.echo(f"The run is in {out}; the report is {page}: open it in a browser.")
        click.echo(f"Go on with: dualform top {out} --sample 0, or dualform audit {out}")


@click.command()
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
        print_json(facts)
    else:
        print_results(opened)
        if check and not problems:
            click.echo("Every committed byte is as it was written.")
    if problems:
        raise DualformError(f"{len(problems)} damaged: {problems[0]}")


@click.command()
@run_argument
@as_json
def audit(run: Path, as_json: bool) -> None:
    """Do the books balance? Remainder, coverage and bytes of every parameter."""
    result = open_run(run).audit()
    print_json(result.to_dict()) if as_json else print_results(result)


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


@click.command()
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
        facts = {"layer": reading.layer, "queries": reading.names, "check": lines}
        print_json({**facts, **both_ways(best, worst)})
    else:
        print_results(reading, best, worst)


@click.command()
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
    print_json({"report": str(page)}) if as_json else click.echo(f"Wrote {page}")


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
        return run.revisit([known_id(run, name) for name in samples], output)
    if inputs is None:
        raise ReadingError("--model needs --input x.npy: what to call the model with.")
    return run.spotlight(*asked_of(run, model, inputs), output)


def _one_of_each(run: Run) -> list[str]:
    """The first sample of each label, or the first eight samples."""
    labels = run.samples.labels
    first = {labels[name]: name for name in reversed(run.ids) if name in labels}
    chosen = [first[label] for label in sorted(first, key=str)] or run.ids[:8]
    return [str(name) for name in chosen[:12]]


def _shown(run: Run, reading: Reading, samples: Sequence[str]) -> list[Query]:
    """What the report shows of training samples; nothing but names for other queries."""
    ids = [known_id(run, name) for name in samples]
    if len(ids) != len(reading.names):
        return []
    labels = run.samples.labels
    return [Query(f"sample {name}", labels.get(name), run.samples.preview(name)) for name in ids]
