"""What verbs share: the arguments they are given, and how they print."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console
from torch import nn

from dualform.errors import ReadingError
from dualform.ledger.samples import SampleId
from dualform.read import Ranking, Run

run_argument = click.argument("run", type=click.Path(path_type=Path))
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def asked_of(run: Run, model: str, inputs: Path) -> tuple[nn.Module, torch.Tensor]:
    """The model with the run's weights, and what it is called with."""
    built = _build(model)
    built.load_state_dict(run.state_dict(), strict=False)
    try:
        return built.eval(), torch.from_numpy(np.load(inputs, allow_pickle=False))
    except (ValueError, TypeError) as error:
        raise ReadingError(f"--input {inputs}: {error}; expected an array as .npy.") from error


def known_id(run: Run, name: str) -> SampleId:
    """The id as the run knows it: an integer where its ids are integers."""
    is_number = name.removeprefix("-").isdecimal()
    return int(name) if is_number and run.ids and isinstance(run.ids[0], int) else name


def _build(model: str) -> nn.Module:
    try:
        built = imported("--model", model)()
    except TypeError as error:
        raise ReadingError(
            f"--model {model}: {error}; expected a function that takes no arguments and returns "
            "the model."
        ) from error
    assert isinstance(built, nn.Module)
    return built


def imported(what: str, name: str) -> Any:
    """The function that a user names as package.module:function."""
    module, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ReadingError(f"{what} {name}: {error}; expected package.module:function.") from error


def both_ways(best: Ranking, worst: Ranking) -> dict[str, Any]:
    rankings = {"for": best, "against": worst}
    return {name: [vars(row) for row in r.rows] for name, r in rankings.items()}


def print_results(*results: Any) -> None:
    console = Console()
    for result in results:
        console.print(result)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1, default=str))
