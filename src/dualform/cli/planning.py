"""The verb before training: `plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

from dualform.cli.options import INPUT, as_json, imported, print_json, print_results, read_input
from dualform.errors import ReadingError
from dualform.recording.keep import policies
from dualform.recording.planning import plan as make_plan

MAKER = (
    "package.module:function that builds the model. Without --input it returns a model and a "
    "batch, or a dict of what dualform.plan takes: model, batch, and if needed optimizer and loss."
)


@click.command()
@click.option("--model", required=True, help=MAKER)
@click.option("--input", "inputs", type=click.Path(path_type=Path), help=INPUT)
@click.option("--optimizer", help="Its name in torch.optim. Default: AdamW, or the dict's.")
@click.option("--steps", type=click.IntRange(1), help="How many the run will have.")
@click.option("--keep", type=click.Choice(policies()), help="What the run will be recorded with.")
@click.option(
    "--path",
    type=click.Path(path_type=Path),
    help="Where the run will be. It is an error if the disk there is too small for --steps.",
)
@as_json
def plan(
    model: str,
    inputs: Path | None,
    optimizer: str | None,
    steps: int | None,
    keep: str | None,
    path: Path | None,
    as_json: bool,
) -> None:
    """What will a recording take, and how much of it to keep?

    A few steps are recorded under each policy, on copies, in a temporary folder.
    """
    made = _made(model, inputs)
    if optimizer is not None:
        made["optimizer"] = _optimizer(optimizer, made["model"])
    found = make_plan(**made, steps=steps, keep=keep, path=path)
    print_json(found.to_dict()) if as_json else print_results(found)


def _made(model: str, inputs: Path | None) -> dict[str, Any]:
    """What `dualform.plan` is called with: as the user's function, and --input, give it."""
    given = imported("--model", model)()
    if inputs is not None:
        given = (given, None)
    made = dict(given) if isinstance(given, dict) else {}
    if isinstance(given, tuple) and len(given) == 2:
        made = dict(zip(("model", "batch"), given, strict=True))
    known = {"model", "batch", "optimizer", "loss"}
    if (
        not isinstance(made.get("model"), nn.Module)
        or not {"model", "batch"} <= made.keys() <= known
    ):
        said = f"a dict with {sorted(made)}" if made else f"a {type(given).__name__}"
        raise ReadingError(
            f"--model {model} returned {said}; expected a torch.nn.Module with --input x.npy, or a "
            "model and a batch, or a dict with model, batch, and if needed optimizer and loss."
        )
    if inputs is not None:
        made["batch"] = read_input(inputs, made["model"])
    return made


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    kinds: dict[str, Any] = {k: v for k, v in vars(torch.optim).items() if isinstance(v, type)}
    del kinds["Optimizer"]
    if name not in kinds:
        raise ReadingError(
            f"--optimizer {name} is not in torch.optim; it has {', '.join(sorted(kinds))}."
        )
    made: torch.optim.Optimizer = kinds[name](model.parameters())
    return made
