"""Queries: what each recorded layer sees and gives when a model is asked something."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dualform.errors import ModelMismatchError, ReadingError
from dualform.ledger import Ledger
from dualform.ledger.samples import SampleId
from dualform.read.scan import RowColumns, widen

Outputs: TypeAlias = int | Sequence[int] | Tensor | None


@dataclass(frozen=True)
class LayerQueries:
    """The inputs one layer saw, as rows, and the outputs it gave."""

    names: Sequence[str]
    inputs: Tensor
    """(queries, width of the keys)."""
    outputs: Tensor
    """(queries, width of the values)."""


def ask(model: nn.Module, x: Any, ledger: Ledger) -> dict[str, LayerQueries]:
    """Runs the model on `x` in evaluation mode; keeps what each recorded layer saw and gave."""
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}
    handles = []
    modules = dict(model.named_modules())
    for stream in ledger.info.streams:
        module = modules.get(stream.name, model)  # a model that is one layer has another name

        def keep(
            module: nn.Module, args: Any, kwargs: Any, output: Tensor, name: str = stream.name
        ) -> None:
            given = args[0] if args else kwargs["input"]
            seen.setdefault(name, []).append((given.detach(), output.detach()))

        handles.append(module.register_forward_hook(keep, with_kwargs=True))
    training = [module for module in model.modules() if module.training]
    try:
        with torch.no_grad():
            _call(model.eval(), x)  # asking must neither be random nor change the model
    finally:
        for handle in handles:
            handle.remove()
        for module in training:
            module.training = True
    return {name: _queries(calls) for name, calls in seen.items()}


def _call(model: nn.Module, x: Any) -> Any:
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def _queries(calls: list[tuple[Tensor, Tensor]]) -> LayerQueries:
    """All rows of all calls; named by sample, and by position and call where there are several."""
    names: list[str] = []
    for call, (given, _) in enumerate(calls):
        leading = given.shape[:-1]
        suffix = f" (call {call + 1})" if len(calls) > 1 else ""
        positions = math.prod(leading[1:]) if len(leading) > 1 else 1
        count = leading[0] if leading else 1
        names += [
            (f"{sample}[{at}]" if positions > 1 else f"{sample}") + suffix
            for sample in range(count)
            for at in range(positions)
        ]
    inputs = torch.cat([given.reshape(-1, given.shape[-1]) for given, _ in calls])
    outputs = torch.cat([output.reshape(-1, output.shape[-1]) for _, output in calls])
    return LayerQueries(names, inputs.cpu(), outputs.cpu())


def last_seen(
    ledger: Ledger,
    numbers: Tensor,
    names: Sequence[SampleId],
    weights: Mapping[str, Tensor],
    until: int,
) -> dict[str, LayerQueries]:
    """What each layer saw of some samples the last time it saw them, and what it would give now."""
    found = {}
    for stream in ledger.info.streams:
        rows = [_latest(ledger, stream.name, int(number), until) for number in numbers]
        inputs = torch.cat(rows) if rows else torch.zeros(0, stream.keys)
        labels = [
            f"{name}[{at}]" if len(keys) > 1 else f"{name}"
            for name, keys in zip(names, rows, strict=True)
            for at in range(len(keys))
        ]
        books = [book for book in ledger.info.books if stream.name in book.terms]
        weight = next(book.name for book in books if book.terms[stream.name] == "outer")
        outputs = inputs.double() @ weights[weight].double().T
        for book in books:
            if book.terms[stream.name] == "sum":
                outputs = outputs + weights[book.name].double()
        found[stream.name] = LayerQueries(labels, inputs, outputs)
    return found


def _latest(ledger: Ledger, stream: str, number: int, until: int) -> Tensor:
    """(positions, width): the keys of a sample's last visit."""
    for shard in reversed(ledger.shards):
        if f"{stream}/keys" not in shard.file or shard.record["first"] > until:
            continue
        columns = RowColumns(shard, stream)
        steps, samples = columns.steps, columns.samples
        mine = torch.nonzero((samples == number) & (steps <= until)).flatten()
        if len(mine):
            rows = mine[steps[mine] == steps[mine].max()].tolist()
            return widen(torch.cat([shard.file.read(f"{stream}/keys", r, r + 1) for r in rows]))
    return torch.zeros(0, next(s.keys for s in ledger.info.streams if s.name == stream))


def directions(queries: LayerQueries, output: Outputs) -> tuple[Tensor, list[str]]:
    """Which output is asked about, for each query: (queries, width), and in words.

    A unit (one for all queries, or one each), a direction for each query, or by default the unit
    with the largest output.
    """
    count, width = queries.outputs.shape
    if output is None:
        units = queries.outputs.argmax(1)
    elif isinstance(output, int):
        units = torch.full((count,), output)
    else:
        units = torch.as_tensor(output) if not isinstance(output, str) else torch.empty(0)
        if units.shape == (count, width):
            return units.double(), ["a direction"] * count
    if units.shape != (count,) or bool((units < 0).any() or (units >= width).any()):
        raise ReadingError(
            f"output={output!r} does not fit {count} queries of a layer with {width} outputs; "
            f"give a unit from 0 to {width - 1}, one unit for each query, or a direction for each "
            f"as a ({count}, {width}) tensor."
        )
    one_hot = nn.functional.one_hot(units.long(), width).double()
    return one_hot, [f"output {unit}" for unit in units.tolist()]


def check_model(
    model: nn.Module, recorded: Mapping[str, Tensor], ledger: Ledger, step: int
) -> None:
    """Makes sure that the model is the recorded one, as it was after `step`."""
    given = dict(model.named_parameters())
    for book in ledger.info.books:
        shape = tuple(given[book.name].shape) if book.name in given else None
        if shape != book.shape:
            has = f"has shape {shape}" if shape is not None else "does not exist"
            raise ModelMismatchError(
                f"the model is not the recorded one: its '{book.name}' {has}, the run's has shape "
                f"{book.shape}."
            )
    for book in ledger.info.books:
        weight, known = given[book.name].detach().cpu().double(), recorded[book.name].double()
        gap = float((weight - known).norm() / known.norm().clamp_min(1e-12))
        if gap > 1e-4:
            raise ModelMismatchError(
                f"the model's '{book.name}' differs from the run's at step {step} by {gap:.1e} "
                "(relative); load them: model.load_state_dict(run.state_dict(), strict=False)."
            )
