"""Queries: what each recorded layer sees and gives when a model is asked something."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from dualform.errors import ModelMismatchError, ReadingError
from dualform.ledger import Declaration, Ledger, Stream
from dualform.ledger.samples import SampleId
from dualform.read.questions import layer_output
from dualform.read.scan import RowColumns, widen
from dualform.record.layers import (
    Finder,
    Rows,
    Seen,
    Site,
    Watching,
    arrangement,
    expand,
    first_tensor,
    kinds,
    packing_order,
    sample_major,
    shared_labels,
    stream_name,
    usual_axis,
)

Outputs: TypeAlias = int | Sequence[int] | Tensor | None


@dataclass(frozen=True)
class LayerQueries:
    """The inputs one layer saw, as rows, and what its parameters make of them."""

    names: Sequence[str]
    inputs: Tensor
    """(queries, width of the keys)."""
    outputs: Tensor
    """(queries, width of the values)."""


def ask(
    model: nn.Module, x: Any, ledger: Ledger, weights: Mapping[str, Tensor]
) -> dict[str, LayerQueries]:
    """Runs the model on `x` in evaluation mode; keeps what each recorded layer sees."""
    uses: list[Seen] = []
    find = Finder(dict(model.named_parameters()), frozen=True)
    training = [module for module in model.modules() if module.training]
    hooks = [*shared_labels(model, find), *packing_order(model, find)]
    try:
        with torch.no_grad(), Watching(find, kinds(), uses.append):
            args, kwargs = arguments(x)
            model.eval()(*args, **kwargs)  # asking must neither be random nor change the model
    finally:
        for hook in hooks:
            hook.remove()
        for module in training:
            module.training = True
    given, usual = first_tensor(x), usual_axis(model)
    samples = 0 if given is None else given.shape[min(usual, given.ndim - 1)]
    seen: dict[str, list[tuple[int, Tensor]]] = {}
    with torch.no_grad():
        for rows in (rows for use in uses for rows in use.rows(None)):
            stream = _stream_of(rows, ledger)
            if stream is not None:
                count, records = _records(rows, stream, samples, usual)
                seen.setdefault(stream.name, []).append((count, expand(stream, records, None)[0]))
    return {name: _queries(ledger, name, calls, weights) for name, calls in seen.items()}


def _stream_of(rows: Rows, ledger: Ledger) -> Stream | None:
    """The recorded stream of the same parameters, used in the same way.

    A convolution may see an input of another size today.
    """
    site, found = rows.site, None
    base = stream_name(site.label)
    shape = tuple(rows.keys.shape[rows.keys.ndim - site.key_dims :]) or (1,)
    for declared in ledger.info.declarations:
        stream = declared.stream
        same = stream.name == base or stream.name.startswith((f"{base}[", f"{base}@"))
        if same and _fits(declared, site):
            if stream.keys == shape or not stream.layout:
                return stream
            found = found or replace(stream, keys=shape)
    return found


def _fits(declared: Declaration, site: Site) -> bool:
    """Whether the recorded terms are among those of today (a bias may have been frozen then)."""
    return declared.terms.items() <= dict(site.terms).items() and (
        declared.stream.layout == dict(site.layout)
    )


def _records(rows: Rows, stream: Stream, samples: int, usual: int) -> tuple[int, Tensor]:
    """How many samples there are, and the records, sample by sample."""
    keys, dims = rows.keys.detach().cpu(), rows.site.key_dims
    lead = keys.shape[: keys.ndim - dims]
    axis = arrangement(lead, samples, rows.site.axis, dims > 0, usual)
    if axis is None:  # no dimension counts samples: each entry of the first stands for itself
        samples, axis = lead[0] if lead else 1, 0
    if not math.prod(stream.keys):  # recorded as an offset: the weight was frozen then
        return samples, keys.new_zeros(math.prod(lead), 0)
    return samples, sample_major(keys[None], samples, axis, dims)


def arguments(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model is called with: a tuple of arguments, a mapping of keywords, or one argument.

    >>> arguments((1, 2)), arguments({"x": 1}), arguments(1)
    (((1, 2), {}), ((), {'x': 1}), ((1,), {}))
    """
    if isinstance(x, np.ndarray):
        as_tensor = "torch.as_tensor(x)" + (".float()" if x.dtype.kind == "f" else "")
        raise ReadingError(
            f"x is an array of numpy, {x.dtype} of shape {x.shape}; give a tensor: {as_tensor}."
        )
    if isinstance(x, Mapping):
        return (), dict(x)
    return (x if isinstance(x, tuple) else (x,)), {}


def _queries(
    ledger: Ledger,
    name: str,
    calls: list[tuple[int, Tensor]],
    weights: Mapping[str, Tensor],
) -> LayerQueries:
    """All rows of all calls; named by sample, and by position and call where there are several."""
    names: list[str] = []
    for call, (count, rows) in enumerate(calls):
        suffix = f" (call {call + 1})" if len(calls) > 1 else ""
        places = len(rows) // max(1, count)
        names += [
            (f"{sample}[{at}]" if places > 1 else f"{sample}") + suffix
            for sample in range(count)
            for at in range(places)
        ]
    inputs = torch.cat([rows for _, rows in calls])
    info = ledger.info
    outputs = layer_output(info.stream(name), info.terms_of(name), weights, inputs)
    return LayerQueries(names, inputs, outputs)


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
        rows = [_latest(ledger, stream, int(number), until) for number in numbers]
        inputs = torch.cat(rows) if rows else torch.zeros(0, math.prod(stream.keys))
        labels = [
            f"{name}[{at}]" if len(keys) > 1 else f"{name}"
            for name, keys in zip(names, rows, strict=True)
            for at in range(len(keys))
        ]
        outputs = layer_output(stream, ledger.info.terms_of(stream.name), weights, inputs)
        found[stream.name] = LayerQueries(labels, inputs, outputs)
    return found


def _latest(ledger: Ledger, stream: Stream, number: int, until: int) -> Tensor:
    """(positions, width): the keys of a sample's last visit."""
    name = f"{stream.name}/keys"
    for shard in reversed(ledger.shards):
        if name not in shard.file or shard.record["first"] > until:
            continue
        columns = RowColumns(shard, stream.name)
        steps, samples = columns.steps, columns.samples
        mine = torch.nonzero((samples == number) & (steps <= until)).flatten()
        if len(mine):
            records = mine[steps[mine] == steps[mine].max()].tolist()
            kept = widen(torch.cat([shard.file.read(name, r, r + 1) for r in records]))
            return expand(stream, kept, None)[0]
    return expand(stream, torch.zeros(0, math.prod(stream.keys)), None)[0]


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
    if not isinstance(model, nn.Module):
        raise ModelMismatchError(
            f"the model is of type {type(model).__name__}; give the trained torch.nn.Module."
        )
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
            run = "run" if step == ledger.last_step else f"run.at({step})"
            raise ModelMismatchError(
                f"the model's '{book.name}' differs from the run's at step {step} by {gap:.1e} "
                f"(relative); load them: model.load_state_dict({run}.state_dict(), strict=False)."
                f"{_while_recording(ledger, step)}"
            )


def _while_recording(ledger: Ledger, step: int) -> str:
    """What to do where training may be ahead of what is committed."""
    if step != ledger.last_step or ledger.marks.get(step) == "final":
        return ""
    return (
        " This recording has not ended: to read the model as it is now, call "
        "recorder.checkpoint(), then open the run again."
    )
