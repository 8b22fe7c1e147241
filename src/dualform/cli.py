"""The command line: `dualform demo`, `info`, `audit`, `top`, `explain`, `influence`, and more."""

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
from dualform.evaluate import GroundTruth, Retraining, lds, load_scores, suspicion
from dualform.explore import Query, write_report
from dualform.ledger.samples import SampleId
from dualform.read import Ranking, Reading, Run, Scores, Spotlight, open_run

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
        facts = {"layer": reading.layer, "queries": reading.names, "check": lines}
        _print_json({**facts, **_both_ways(best, worst)})
    else:
        _print(reading, best, worst)


def whole_network(command: Any) -> Any:
    """What explain and influence are told."""
    options = [
        click.argument("model"),
        click.option("--input", "inputs", type=click.Path(path_type=Path), required=True),
        click.option("--target", "targets", type=int, multiple=True, help="A class, or one each."),
        click.option("-k", "--count", type=click.IntRange(1), default=10, show_default=True),
        click.option("--save", type=click.Path(path_type=Path), help="All scores, as .npz."),
        as_json,
    ]
    for option in reversed(options):
        command = option(command)
    return command


@cli.command()
@run_argument
@whole_network
@click.option("--tolerance", type=float, default=1e-3, show_default=True)
def explain(
    run: Path, model: str, inputs: Path, targets: tuple[int, ...], tolerance: float, **shown: Any
) -> None:
    """Account for the whole network's output: what every training sample added to it.

    MODEL is package.module:function that builds it; without --target, the class with most output.
    """
    opened = open_run(run)
    found = opened.explain(*_asked(opened, model, inputs), _target(targets), tolerance)
    lines = [found.check.lines(at) for at in range(len(found.queries))] if found.check else []
    facts = {"check": lines, "completeness": found.completeness.tolist()}
    _show_scores(found, facts, **shown)


@cli.command()
@run_argument
@whole_network
@click.option("--method", default="ridge", show_default=True)
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
    """Estimate what leaving samples out of training would do to the output.

    MODEL is package.module:function that builds it; without --target, the class with most output.
    """
    opened = open_run(run)
    asked = _asked(opened, model, inputs)
    found = opened.influence(*asked, _target(targets), method, damping, rank)
    facts = {"method": found.method, "damping": found.damping, "kept": found.kept}
    _show_scores(found, facts, **shown)


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
def evaluate() -> None:
    """Are scores right? Retrain, compare, and find suspicious labels."""


@evaluate.command()
@click.argument("task")
@click.option("--samples", type=int, required=True, help="How many training samples there are.")
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="For results.")
@click.option("--subsets", type=int, default=50, show_default=True)
@click.option("--seeds", type=int, default=3, show_default=True)
@click.option("--fraction", type=float, default=0.5, show_default=True)
@click.option("--workers", type=int, help="Processes. Default: one for each core.")
@as_json
def retrain(task: str, as_json: bool, folder: Path, **settings: Any) -> None:
    """Make the ground truth: train on random subsets, again and again.

    TASK is package.module:function; it is called with the positions of the samples to train on
    and a seed, and returns one number for each query. An interrupted retraining goes on.
    """
    truth = Retraining(_imported("TASK", task), folder=folder, **settings).run()
    path = folder / "truth.npz"
    if as_json:
        _print_json({"truth": str(path), **truth.to_dict()})
    else:
        _print(truth)
        click.echo(f"Wrote {path}")


@evaluate.command("lds")
@click.argument("scores", type=click.Path(path_type=Path))
@click.argument("truth", type=click.Path(path_type=Path))
@as_json
def evaluate_lds(scores: Path, truth: Path, as_json: bool) -> None:
    """Say how well scores foretell what retraining gives.

    SCORES is a .npy file, samples × queries, or a .npz file with such `values` (and `ids`); TRUTH
    is what `dualform evaluate retrain` wrote.
    """
    result = lds(load_scores(scores), GroundTruth.load(truth))
    _print_json(result.to_dict()) if as_json else _print(result)


@evaluate.command()
@run_argument
@click.option("-k", "--count", type=click.IntRange(1), default=10, show_default=True)
@click.option("--layer", help="Default: the last one.")
@as_json
def suspects(run: Path, count: int, layer: str | None, as_json: bool) -> None:
    """Rank the samples whose labels are most likely wrong: their errors stayed large."""
    ranking = suspicion(open_run(run), layer).top(count)
    if as_json:
        _print_json([{"id": r.id, "label": r.label, "suspicion": r.value} for r in ranking.rows])
    else:
        _print(ranking)


@cli.group()
def study() -> None:
    """The papers' experiments, one command each."""


@study.command()
@click.option("--data", type=click.Path(path_type=Path), help="Default: $DUALFORM_DATA.")
@click.option("--setting", type=click.Choice(["small", "paper"]), default="small")
@click.option("--dataset", "datasets", multiple=True, help="Default: all four.")
@click.option("--kind", "kinds", multiple=True, help="Default: all five.")
@click.option("--seeds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--epochs", type=click.IntRange(1), help="Default: the setting's.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write every training as JSON.")
@as_json
def uea(data: Path | None, out: Path | None, as_json: bool, **chosen: Any) -> None:
    """Classify time series with each attention layer; test accuracy with intervals."""
    from dualform.studies import uea
    from dualform.studies.series import data_folder

    results = uea.study(data_folder(data), console=Console(quiet=as_json), **chosen)
    if out is not None:
        uea.save(results, out)
    _print_json(uea.summary(results)) if as_json else _print(uea.table(results))


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
    return run.spotlight(*_asked(run, model, inputs), output)


def _asked(run: Run, model: str, inputs: Path) -> tuple[nn.Module, torch.Tensor]:
    """The model with the run's weights, and what it is called with."""
    built = _build(model)
    built.load_state_dict(run.state_dict(), strict=False)
    try:
        return built.eval(), torch.from_numpy(np.load(inputs, allow_pickle=False))
    except (ValueError, TypeError) as error:
        raise ReadingError(f"--input {inputs}: {error}; expected an array as .npy.") from error


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
        _print_json({"queries": scores.queries, **facts, **_both_ways(best, worst)})
    else:
        _print(best, worst)
        click.echo(scores.note)


def _both_ways(best: Ranking, worst: Ranking) -> dict[str, Any]:
    rankings = {"for": best, "against": worst}
    return {name: [vars(row) for row in r.rows] for name, r in rankings.items()}


def _known_id(run: Run, name: str) -> SampleId:
    """The id as the run knows it: an integer where its ids are integers."""
    is_number = name.removeprefix("-").isdecimal()
    return int(name) if is_number and run.ids and isinstance(run.ids[0], int) else name


def _build(model: str) -> nn.Module:
    try:
        built = _imported("--model", model)()
    except TypeError as error:
        raise ReadingError(
            f"--model {model}: {error}; expected a function that takes no arguments and returns "
            "the model."
        ) from error
    assert isinstance(built, nn.Module)
    return built


def _imported(what: str, name: str) -> Any:
    """The function that a user names as package.module:function."""
    module, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ReadingError(f"{what} {name}: {error}; expected package.module:function.") from error


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
