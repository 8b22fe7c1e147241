"""Queries: what each recorded layer sees and gives when a model is asked something."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from dualform.errors import ModelMismatchError, ReadingError
from dualform.layers import (
    Finder,
    Rows,
    Seen,
    Site,
    expand,
    first_tensor,
    kinds,
    packing_order,
    sample_major,
    shared_labels,
    stream_name,
    tensors_in,
)
from dualform.ledger import Declaration, Ledger, Stream
from dualform.ledger.samples import SampleId
from dualform.memory.forms import form_named
from dualform.owners import Sighting, Trial
from dualform.read.engine import Fold, RowReader, ShardRange
from dualform.read.query_axis import query_axis
from dualform.read.questions import layer_output
from dualform.read.row_columns import RowColumns
from dualform.read.scan import StoredRecords
from dualform.read.unrecorded import OutputWatching, Unrecorded, unrecorded_part

Outputs: TypeAlias = int | Sequence[int] | Tensor | None


@dataclass(frozen=True)
class LayerQueries:
    """The inputs one layer saw, as rows, and what its parameters make of them."""

    names: Sequence[str]
    inputs: Tensor
    """(queries, width of the keys)."""
    outputs: Tensor
    """(queries, width of the values)."""
    unrecorded: Unrecorded
    """What of them is due to parameters that left no rows."""
    complete: bool = True
    """Whether that is known: of a training sample, an offset's input was not recorded."""

    def only(self, chosen: Sequence[int]) -> LayerQueries:
        """Some of them."""
        at, names = torch.tensor(chosen, dtype=torch.long), [self.names[q] for q in chosen]
        kept = (self.inputs[at], self.outputs[at], self.unrecorded[at])
        return LayerQueries(names, *kept, self.complete)


@dataclass(frozen=True)
class LayerCall:
    """One use of a layer: how many samples it saw, its rows, and what it gave beside them."""

    samples: int
    inputs: Tensor
    unrecorded: Unrecorded


def ask(
    model: nn.Module, x: Any, ledger: Ledger, weights: Mapping[str, Tensor]
) -> dict[str, LayerQueries]:
    """Runs the model on `x` in evaluation mode; keeps what each recorded layer sees."""
    uses: list[tuple[Seen, Tensor | None, list[Sighting]]] = []
    parameters = dict(model.named_parameters())
    find = Finder(parameters, frozen=True)
    training = [module for module in model.modules() if module.training]
    hooks = [*shared_labels(model, find), *packing_order(model, find)]
    try:
        model.eval()  # asking must neither be random nor change the model
        usual, given = query_axis(model, x), first_tensor(x)
        samples = 0 if given is None else given.shape[min(usual, given.ndim - 1)]
        trial = Trial.of(samples, tensors_in(x), usual)

        def take(use: Seen, output: Tensor | None) -> None:
            uses.append((use, output, [] if trial is None else trial.observe(use)))

        with torch.no_grad(), OutputWatching(find, kinds(), take):
            args, kwargs = arguments(x)
            with nullcontext() if trial is None else trial.twins:
                model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
        for module in training:
            module.training = True
    if trial is not None:
        trial.close()
    seen: dict[str, list[LayerCall]] = {}
    with torch.no_grad():
        for use, output, sightings in uses:
            for at, rows in enumerate(use.rows(None)):
                stream = None if rows.site.aside else stream_of(rows.site, rows.record, ledger)
                if stream is not None:
                    stretch = _stretch(rows, sightings[at] if sightings else None, samples)
                    made = _call(rows, output, stream, samples, stretch, parameters, ledger)
                    seen.setdefault(stream.name, []).append(made)
    return {name: _queries(ledger, name, calls, weights) for name, calls in seen.items()}


def stream_of(site: Site, shape: tuple[int, ...], ledger: Ledger) -> Stream | None:
    """The recorded stream of the same parameters, used in the same way on keys of this shape.

    A convolution may see an input of another size today.
    """
    base, found = stream_name(site.label), None
    for declared in ledger.info.declarations:
        stream = declared.stream
        same = stream.name == base or stream.name.startswith((f"{base}[", f"{base}@"))
        if same and not stream.layer and _fits(declared, site):
            if stream.keys == shape:
                return stream
            if stream.layout:
                found = found or replace(stream, keys=shape)
            elif not math.prod(stream.keys):  # an offset: its keys do not matter
                found = found or stream
    return found


def _fits(declared: Declaration, site: Site) -> bool:
    """Whether the recorded terms are among those of today (a bias may have been frozen then)."""
    return declared.terms.items() <= dict(site.terms).items() and (
        declared.stream.layout == dict(site.layout)
    )


def _stretch(rows: Rows, sighting: Sighting | None, samples: int) -> int | None:
    """How many neighboring rows belong to one sample; None where they belong to none, or anyhow."""
    lead = tuple(rows.keys.shape[: rows.keys.ndim - rows.site.key_dims])
    if samples == 1:
        return math.prod(lead)
    pattern = None if sighting is None else sighting.finding.pattern
    return None if pattern is None else pattern.stretch(lead, samples)


def _call(
    rows: Rows,
    output: Tensor | None,
    stream: Stream,
    samples: int,
    stretch: int | None,
    parameters: Mapping[str, Tensor],
    ledger: Ledger,
) -> LayerCall:
    """A use as queries, sample by sample."""
    site, keys = rows.site, rows.keys.detach().cpu()
    lead = keys.shape[: keys.ndim - site.key_dims]
    if stretch is None:  # each entry of the first dimension stands for itself
        samples = lead[0] if lead else 1
        stretch = math.prod(lead) // max(1, samples)
    records = sample_major(keys[None], samples, stretch, site.key_dims)
    given = None
    if output is not None:
        shape = tuple(output.shape[output.ndim - site.value_dims :])
        wide = output.cpu().reshape(*lead, *shape)
        given = sample_major(wide[None], samples, stretch, site.value_dims)
        stream = replace(stream, values=shape)  # an image may be of another size today
    inputs, outputs = expand(stream, records, given)
    width = stream.values[0] if stream.layout else math.prod(stream.values)
    recorded = ledger.info.terms_of(stream.name)
    unrecorded = unrecorded_part(rows, recorded, inputs, outputs, parameters, ledger, width)
    if not math.prod(stream.keys):  # recorded as an offset: the weight was frozen then
        inputs = inputs[:, :0]
    return LayerCall(samples, inputs, unrecorded)


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
    calls: Sequence[LayerCall],
    weights: Mapping[str, Tensor],
) -> LayerQueries:
    """All rows of all calls; named by sample, and by position and call where there are several."""
    names: list[str] = []
    for number, call in enumerate(calls):
        suffix = f" (call {number + 1})" if len(calls) > 1 else ""
        places = len(call.inputs) // max(1, call.samples)
        names += [
            (f"{sample}[{at}]" if places > 1 else f"{sample}") + suffix
            for sample in range(call.samples)
            for at in range(places)
        ]
    inputs, info = torch.cat([call.inputs for call in calls]), ledger.info
    unrecorded = Unrecorded(
        torch.cat([call.unrecorded.initial for call in calls]),
        torch.cat([call.unrecorded.by_step for call in calls]),
    )
    by_row = layer_output(info.stream(name), info.terms_of(name), weights, inputs)
    return LayerQueries(names, inputs, by_row + unrecorded.total, unrecorded)


def last_seen(
    reader: RowReader,
    numbers: Tensor,
    names: Sequence[SampleId],
    weights: Mapping[str, Tensor],
    until: int,
) -> dict[str, LayerQueries]:
    """What each layer saw of some samples the last time it saw them, and what it would give now."""
    ledger, found = reader.ledger, {}
    for stream in ledger.info.layers:
        visits = _latest(reader, LastVisits(stream, numbers), until)
        rows = [expand(stream, visits[int(number)][1], None)[0] for number in numbers]
        inputs = torch.cat(rows) if rows else torch.zeros(0, math.prod(stream.keys))
        labels = [
            f"{name}[{at}]" if len(keys) > 1 else f"{name}"
            for name, keys in zip(names, rows, strict=True)
            for at in range(len(keys))
        ]
        terms = ledger.info.terms_of(stream.name)
        if not all(form_named(term.form).has_sides for term in terms.values()):
            inputs = inputs.long()  # places in a table, also where none were kept
        outputs = layer_output(stream, terms, weights, inputs)
        nothing = Unrecorded.nothing(*outputs.shape)  # as far as the run knows
        complete = any(form_named(term.form).needs_keys for term in terms.values())
        found[stream.name] = LayerQueries(labels, inputs, outputs, nothing, complete)
    return found


def _latest(reader: RowReader, fold: LastVisits, until: int) -> LatestKeys:
    """The last visit of each sample, from the last shard back as far as one may be later."""
    found = fold.start()
    shards = sorted(reader.shards(fold, until), key=attrgetter("last"), reverse=True)
    for shard in shards:
        if shard.last <= min((step for step, _ in found.values()), default=until):
            break
        found = reader.engine.reduce(fold, [shard], found)
    return found


LatestKeys: TypeAlias = dict[int, tuple[int, Tensor]]
"""The step of each sample's last visit, 0 if it had none, and the keys of its records."""


@dataclass(frozen=True)
class LastVisits(Fold[LatestKeys]):
    """What a stream saw of some samples the last time it saw them."""

    stream: Stream
    numbers: Tensor
    """The samples' stored ids."""

    @property
    def streams(self) -> list[str]:
        """One."""
        return [self.stream.name]

    def start(self) -> LatestKeys:
        """No visit of any."""
        none = torch.zeros(0, math.prod(self.stream.keys))
        return {int(number): (0, none) for number in self.numbers}

    def fold(self, partial: LatestKeys, shard: ShardRange) -> LatestKeys:
        """Looks for later visits in a shard."""
        columns = RowColumns(shard, self.stream)
        stored = StoredRecords(shard.shard, self.stream, columns)
        steps, samples = columns.steps, columns.samples
        inside = (steps >= shard.first) & (steps <= shard.last)
        for number, (before, _) in partial.items():
            mine = torch.nonzero((samples == number) & inside).flatten()
            if len(mine) and int(steps[mine].max()) > before:
                last = steps[mine].max()
                records = mine[steps[mine] == last].tolist()
                codec = shard.shard.codec(self.stream.name)
                keys = [codec.decode(stored.read(r, r + 1), 0, 1).keys.clone() for r in records]
                partial[number] = (int(last), torch.cat(keys))
        return partial

    def merge(self, one: LatestKeys, other: LatestKeys) -> LatestKeys:
        """The later visit of each sample."""
        return {number: max(one[number], other[number], key=itemgetter(0)) for number in one}


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
    given = check_shapes(model, ledger)
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


def check_shapes(model: nn.Module, ledger: Ledger) -> dict[str, nn.Parameter]:
    """The model's parameters, if it has all that the run recorded, whatever their values."""
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
    return given


def _while_recording(ledger: Ledger, step: int) -> str:
    """What to do where training may be ahead of what is committed."""
    if step != ledger.last_step or ledger.marks.get(step) == "final":
        return ""
    return (
        " This recording has not ended: to read the model as it is now, call "
        "recorder.checkpoint(), then open the run again."
    )
