"""What verbs share: their options, how models and inputs are loaded, how results are printed."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import click
import numpy as np
import torch
from rich.console import Console
from torch import nn

from dualform.errors import ModelMismatchError, ReadingError
from dualform.explore import Exhibit, Query
from dualform.ledger import run_path
from dualform.ledger.samples import Preview
from dualform.read import Run, open_run
from dualform.read.ask import Answer
from dualform.read.engine.names import ENGINES
from dualform.read.engine.names import engine as make_engine

run_argument = click.argument("run", type=run_path)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
count = click.option(
    "-k",
    "--count",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="How many samples for each query.",
)
Opened: TypeAlias = Callable[[Path], Run]
"""Opens a run, to be read by whom the command line says."""
MODEL = "package.module:function that builds the model; the run brings the weights."
INPUT = "What --model is called with: .npy, or .npz with an array called x."


def reading(command: Any) -> Any:
    """Options that say who reads; the verb is given `opened`, which opens a run for reading so."""

    @click.option(
        "--engine",
        type=click.Choice(list(ENGINES)),
        default="threads",
        show_default=True,
        help="Who reads: threads of this process, one that reads files ahead of computing, or a "
        "Ray cluster whose machines see the run.",
    )
    @click.option(
        "--device",
        default="cpu",
        show_default=True,
        help="Where rows are multiplied: cpu, or a GPU such as cuda.",
    )
    @click.option("--address", help="HOST:PORT of the Ray cluster. Default: one on this machine.")
    @functools.wraps(command)
    def verb(*given: Any, engine: str, device: str, address: str | None, **options: Any) -> None:
        if address is not None and engine != "ray":
            raise ReadingError("--address is that of a Ray cluster: give it with --engine ray.")
        chosen = make_engine(engine, **({} if address is None else {"address": address}))
        command(*given, opened=lambda path: open_run(path, device, engine=chosen), **options)

    return verb


def model_and_input(run: Run, model: str, inputs: Path) -> tuple[nn.Module, torch.Tensor]:
    """The model with the run's weights, and what it is called with."""
    built = _trained(run, model)
    return built, read_input(inputs, built)


def read_input(inputs: Path, model: nn.Module) -> torch.Tensor:
    """What a model is called with, from a file."""
    return _tensor(_arrays(inputs), model)


def read_targets(file: Path) -> torch.Tensor:
    """One number a query, from a .npy file."""
    try:
        loaded = np.load(file, allow_pickle=False)
        if not isinstance(loaded, np.ndarray) or loaded.ndim != 1:
            raise ValueError(f"it holds {getattr(loaded, 'shape', 'several arrays')}")
        return torch.from_numpy(loaded.astype(np.float64))
    except (ValueError, TypeError) as error:
        raise ReadingError(
            f"--targets {file}: {error}; expected one number a query, as .npy."
        ) from error


def make_exhibit(run: Run, model: str | None, inputs: Path | None, encode: str | None) -> Exhibit:
    """What there is to look at: the run alone, or with the model and its queries."""
    if model is None or inputs is None:
        if model is not None or inputs is not None:
            raise ReadingError("--model and --input go together: the model, and what it is asked.")
        return Exhibit(run)
    arrays = _arrays(inputs)
    encoder = None if encode is None else imported("--encode", encode)
    built, count = _trained(run, model), len(arrays["x"])
    numbered = np.array([f"{inputs.stem} {at}" for at in range(count)])
    titles = arrays.get("titles", numbered).tolist()
    labels = arrays["labels"].tolist() if "labels" in arrays else [None] * count
    texts = arrays["texts"].tolist() if "texts" in arrays else [None] * count
    if not len(titles) == len(labels) == len(texts) == count:
        raise ReadingError(
            f"--input {inputs}: {count} queries, {len(labels)} labels, {len(titles)} titles and "
            f"{len(texts)} texts; give one each."
        )
    queries = [
        Query(str(title), label, None if text is None else Preview("text", str(text)))
        for title, label, text in zip(titles, labels, texts, strict=True)
    ]
    names = list(map(str, arrays.get("outputs", np.array([])).tolist()))
    return Exhibit(run, built, _tensor(arrays, built), queries, encoder, names)


def _arrays(inputs: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a file: one, called x, or several by their names."""
    try:
        loaded = np.load(inputs, allow_pickle=False)
        arrays = {"x": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
        if "x" not in arrays:
            raise ValueError(f"it holds {', '.join(map(repr, arrays)) or 'nothing'}")
        torch.from_numpy(arrays["x"])
    except (ValueError, TypeError) as error:
        raise ReadingError(
            f"--input {inputs}: {error}; expected an array as .npy, or .npz with one called x."
        ) from error
    return arrays


def _tensor(arrays: Mapping[str, np.ndarray[Any, Any]], model: nn.Module) -> torch.Tensor:
    """The queries; numbers with a point in the model's precision, since numpy's own is double."""
    x, weight = torch.from_numpy(arrays["x"]), next(model.parameters(), None)
    return x.to(weight.dtype) if x.is_floating_point() and weight is not None else x


def _trained(run: Run, model: str) -> nn.Module:
    """The model as a function of the user's builds it, with the weights of the run."""
    try:
        built = imported("--model", model)()
    except TypeError as error:
        raise ReadingError(
            f"--model {model}: {error}; expected a function that takes no arguments and returns "
            "the model."
        ) from error
    if not isinstance(built, nn.Module):
        raise ReadingError(
            f"--model {model} returned a {type(built).__name__}; expected a torch.nn.Module."
        )
    try:
        built.load_state_dict(run.state_dict(), strict=False)
    except RuntimeError as error:
        first = str(error).partition("\n")[2].partition("\n")[0].strip()
        raise ModelMismatchError(f"--model {model} is not the recorded model: {first}") from error
    return built.eval()


def imported(what: str, name: str) -> Any:
    """The function that a user names as package.module:function."""
    module, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ReadingError(f"{what} {name}: {error}; expected package.module:function.") from error


def print_answer(answer: Answer, facts: dict[str, Any], count: int, as_json: bool) -> None:
    """Prints the samples that count most for and against, of each query; as JSON also facts."""
    scores = answer.scores
    best, worst = scores.top(count), scores.bottom(count)
    if as_json:
        queries = range(len(scores.queries))
        if scores.check is not None:
            facts["check"] = [scores.check.lines(at) for at in queries]
        sides = {"for": best, "against": worst}
        rows = {side: [row._asdict() for row in ranking.rows] for side, ranking in sides.items()}
        print_json({"queries": scores.queries, **facts, **rows})
    elif answer.reading is not None:
        print_results(answer.reading, best, worst)
    else:
        print_results(best, worst)
        click.echo(answer.note)


def print_results(*results: Any) -> None:
    console = Console()
    for result in results:
        console.print(result)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1, default=_plain))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else str(value)
