"""Verbs about a run: `info`, `repair`, `audit`, `top`."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import click

from dualform.cli.options import (
    INPUT,
    MODEL,
    Opened,
    as_json,
    count,
    model_and_input,
    print_answer,
    print_json,
    print_results,
    reading,
    run_argument,
)
from dualform.errors import CorruptError, DualformError, ReadingError
from dualform.ledger import Ledger
from dualform.ledger.repair import repair as repair_run
from dualform.read import Run
from dualform.read.ask import Question, ask


@click.command()
@run_argument
@click.option("--check", is_flag=True, help="Read every committed byte and verify its checksum.")
@as_json
def info(run: Path, check: bool, as_json: bool) -> None:
    """Say what a run is: steps, samples, layers, size."""
    ledger = Ledger(run, damaged=True)
    opened = Run(ledger)
    problems = opened.check() if check else [problem for _, problem in ledger.damage]
    facts: dict[str, Any] = {"problems": problems} if check or problems else {}
    with suppress(CorruptError) if problems else nullcontext():  # they are said below
        facts = {
            "steps": opened.steps,
            "unfinished": ledger.unfinished,
            "kept_steps": opened.kept_steps,
            "samples": len(opened.ids),
            "layers": opened.layers,
            "bytes": opened.nbytes,
            **opened.info.metadata,
            **facts,
        }
        if not as_json:
            print_results(opened)
            if ledger.unfinished:
                click.echo("Recording did not note its end: it was killed, or is under way.")
    if as_json:
        print_json(facts)
    elif check and not problems:
        click.echo("Every committed byte is as it was written.")
    if problems:
        raise DualformError(f"{len(problems)} damaged: {' '.join(problems)}")


@click.command()
@run_argument
@click.option("--to", type=click.Path(path_type=Path), help="Where; RUN.repaired if not said.")
@as_json
def repair(run: Path, to: Path | None, as_json: bool) -> None:
    """Copy the sound steps of a damaged run into one of their own.

    These are the steps before the first damaged one. The run itself is left as it is.
    """
    found = repair_run(run, to)
    if as_json:
        print_json(found.to_dict())
    else:
        click.echo(str(found))


@click.command()
@run_argument
@reading
@as_json
def audit(run: Path, opened: Opened, as_json: bool) -> None:
    """Do the books balance? Every parameter, added up."""
    result = opened(run).audit()
    print_json(result.to_dict()) if as_json else print_results(result)


def question(command: Any) -> Any:
    """The options that say what is asked: which queries, which layer, which output."""
    options = [
        click.option("--sample", "samples", multiple=True, help="A training sample, by its id."),
        click.option("--model", help=MODEL),
        click.option("--input", "inputs", type=click.Path(path_type=Path), help=INPUT),
        click.option("--layer", help="Default: the last one."),
        click.option("--output", type=int, help="Which unit. Default: the one with most output."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@run_argument
@question
@count
@reading
@as_json
def top(
    run: Path,
    opened: Opened,
    samples: tuple[str, ...],
    model: str | None,
    inputs: Path | None,
    layer: str | None,
    output: int | None,
    count: int,
    as_json: bool,
) -> None:
    """Which samples is a layer's output made of?

    The query is a training sample as each layer last saw it, or what --model is called with.
    """
    asked_run = opened(run)
    if bool(samples) == bool(model):
        raise ReadingError(
            "say what to ask: --sample ID (a training sample, as each layer last saw it), or "
            "--model package.module:function with --input x.npy."
        )
    ids = tuple(asked_run.sample_id(name) for name in samples)
    asked = Question("layer", layer, output, ids)
    if model is None:
        answer = ask(asked_run, asked)
    elif inputs is None:
        raise ReadingError("--model needs --input x.npy: what to call the model with.")
    else:
        answer = ask(asked_run, asked, *model_and_input(asked_run, model, inputs))
    print_answer(answer, {"layer": answer.question.layer}, count, as_json)
