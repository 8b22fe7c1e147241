"""What was read for a question: amounts by sample and part of training, and their check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.errors import ReadingError
from dualform.explore.exhibit import Exhibit, Subject, logits
from dualform.ledger.samples import SampleId
from dualform.read import Reading
from dualform.read.explain import ask_all, by_layer
from dualform.read.grouped import Grouping
from dualform.read.questions import layer_output
from dualform.read.scan import places
from dualform.read.scores import Array, Check
from dualform.read.spotlight import unknown_layer

NEEDS_MODEL = (
    "start with it and with queries: "
    "dualform view RUN --model package.module:function --input x.npy"
)
NO_INPUT = (
    "a training sample is known by what its layers last saw, not by its input; "
    "ask about a layer, or give the sample among the queries."
)


@dataclass(frozen=True)
class Question:
    """What is asked: of which query, about which output, and of which rows.

    >>> Question("3", "network", output=7).ask
    'network'
    """

    query: str
    ask: str = "layer"
    layer: str | None = None
    output: int | None = None
    place: int | None = None
    at: int | None = None


@dataclass(frozen=True)
class Found:
    """The answer to a question, which is complete now: every part of it that was left open."""

    question: Question
    cells: Array
    """(samples, bins); (samples, 1) where nothing says when."""
    outputs: Array
    """(width,): of the layer, or of the model."""
    note: str
    check: Mapping[str, float] | None = None
    missed: float | None = None
    """The share of what training changed that stays unexplained."""
    shares: Mapping[str, float] | None = None
    """Each layer's part, where the whole network was asked."""
    marks: Array | None = None
    """(places,): the output asked about, at each position of the query."""
    shared: bool = False
    """Whether those positions are the model's own: then the whole network has the same ones."""

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return self.cells.nbytes + self.outputs.nbytes


class Reader:
    """Reads what an exhibit is asked.

    >>> from dualform.testing import tiny_run
    >>> run, model, x = tiny_run()
    >>> found = Reader(Exhibit(run, model, x[:2]))(Question("0", "network"))
    >>> found.cells.shape, bool(found.missed < 1e-3), list(found.shares)
    ((8, 3), True, ['0', '2'])
    """

    def __init__(self, exhibit: Exhibit) -> None:
        self.exhibit, self._ridge = exhibit, Lock()

    def __call__(self, question: Question) -> Found:
        """The answer; one scan of the run, or a few."""
        answers = {
            "layer": self._layer,
            "network": self._network,
            "removed": self._removed,
            "keys": self._keys,
        }
        if question.ask not in answers:
            raise ReadingError(
                f"ask='{question.ask}': there are {', '.join(map(repr, answers))} to ask."
            )
        return answers[question.ask](self.exhibit.subject(question.query), question)

    def reading(
        self, subject: Subject, question: Question
    ) -> tuple[Reading, Question, dict[str, Any]]:
        """One output of one layer at one place; what was chosen; and what the layer gives there."""
        run = self.exhibit.run
        layer = question.layer if question.layer is not None else _last(run.layers)
        if layer not in run.layers:
            raise unknown_layer(layer, run.layers)
        everywhere = self._spotlight(subject, question.output)
        if layer not in everywhere:
            raise ReadingError(f"the model does not use layer '{layer}' for this query.")
        reading = everywhere[layer]
        outputs = reading.queries.outputs
        positions = self._positions(subject)
        usual = usual_places(outputs[None], positions)
        place = _checked("place", question.place, len(outputs), int(usual))
        one = reading.only([place])
        unit = int(one.directions[0].argmax())
        chosen = replace(question, layer=layer, output=unit, place=place)
        marks = outputs[:, unit].numpy() if len(outputs) > 1 else None
        shared = marks is not None and subject.x is not None and len(marks) == positions
        return one, chosen, {"outputs": outputs[place].numpy(), "marks": marks, "shared": shared}

    def places(
        self, question: Question, chosen: Sequence[int], span: tuple[int, int] | None = None
    ) -> Array:
        """(samples, positions): what each position of some training samples adds, in this layer.

        Args:
            chosen: the samples, by their places among the ids.
            span: the first and the last bin of training that count; by default all.
        """
        reading, _, _ = self.reading(self.exhibit.subject(question.query), question)
        source = reading.source
        count = places(source.ledger, source.ledger.info.stream(reading.layer))
        bins, (first, last) = self.exhibit.run.bins, span or (0, len(self.exhibit.run.bins) - 1)
        rest = len(chosen)
        rows = torch.full((len(source.ids),), rest)
        rows[list(chosen)] = torch.arange(len(chosen))

        def group(steps: Tensor, samples: Tensor, at: Tensor) -> Tensor:
            row = rows[torch.searchsorted(source.numbers, samples.long())]
            when = bins.by_step(steps)
            row = torch.where((when >= first) & (when <= last), row, rest)
            return row * count + at.clamp_max(count - 1)

        sums = reading.sums(Grouping((len(chosen) + 1) * count, group))[:, 0]
        return sums.reshape(-1, count)[:-1]

    def on_queries(self, count: int) -> tuple[Array, NDArray[np.int64]]:
        """(samples, queries) at the last layer, and the output each query has most of.

        Where a query has several places, at its usual one.
        """
        if not count or self.exhibit.model is None:
            return np.zeros((len(self.exhibit.run.ids), 0)), np.zeros(0, dtype=np.int64)
        reading = self.exhibit.run.spotlight(self.exhibit.model, self.exhibit.inputs(count)).last
        outputs = reading.queries.outputs.reshape(count, -1, reading.queries.outputs.shape[1])
        positions = self._positions(self.exhibit.subject("0"))
        chosen = torch.arange(count) * outputs.shape[1] + usual_places(outputs, positions)
        one_each = reading.only(chosen.tolist())
        return one_each.samples().values, one_each.directions.argmax(1).numpy()

    def layer_without(self, found: Found, ids: Sequence[SampleId]) -> Array:
        """(outputs,): all outputs of a layer, less what these samples added to its parameters."""
        reading, _, _ = self.reading(self.exhibit.subject(found.question.query), found.question)
        info, layer = reading.source.ledger.info, reading.layer
        stream, terms, inputs = info.stream(layer), info.terms_of(layer), reading.queries.inputs
        with_them, without = (
            layer_output(stream, terms, weights, inputs)[0].numpy()
            for weights in (reading.source.weights, self.exhibit.run.subtract(ids))
        )
        left: Array = found.outputs - (with_them - without)
        return left

    def gives_output(self, found: Found) -> bool:
        """Whether what was asked of a layer is the model's own output."""
        subject = self.exhibit.subject(found.question.query)
        if found.question.ask in ("network", "removed"):
            return True
        if subject.x is None or self.exhibit.model is None:
            return False
        place = found.question.place if found.shared else -1
        own = self.exhibit.outputs(subject.x)[place].numpy()
        return own.shape == found.outputs.shape and bool(
            np.allclose(own, found.outputs, 1e-4, 1e-5)
        )

    def _spotlight(self, subject: Subject, output: int | None) -> Any:
        run, model = self.exhibit.run, self.exhibit.model
        if subject.sample is not None:
            return run.revisit([subject.sample], output)
        assert model is not None
        return run.spotlight(model, subject.x, output)

    def _positions(self, subject: Subject) -> int:
        """How many positions of a query the model, or else its last layer, gives outputs for."""
        if subject.x is None:
            return len(self._spotlight(subject, None).last.queries.outputs)
        try:
            return len(self.exhibit.outputs(subject.x))
        except ReadingError:  # its outputs are no classes: layers can still be asked
            return 1

    def _layer(self, subject: Subject, question: Question) -> Found:
        reading, chosen, there = self.reading(subject, question)
        cells = self._cells(reading.sums(self._grouping(question.at)))
        if question.at is not None:
            note = f"Only what position {question.at} of the training samples added."
            return Found(chosen, cells, **there, note=note)
        check = reading.checked(cells.sum(keepdims=True)[0])
        note = "Exact: what each training sample added to this output of the layer."
        return Found(chosen, cells, **there, note=note, check=_check(check), missed=_missed(check))

    def _keys(self, subject: Subject, question: Question) -> Found:
        reading, chosen, there = self.reading(subject, question)
        scores = reading.keys_only()
        note = "How alike the inputs are, Σ |x·q|: no error, no sign, no units of the output."
        return Found(chosen, scores.values, **there, note=note)

    def _network(self, subject: Subject, question: Question) -> Found:
        chosen, there = self._target(subject, question)
        run, model = self.exhibit.run, self.exhibit.model
        assert model is not None
        (asked,) = ask_all(model, subject.x, _number(chosen), run.source)
        by_book = by_layer(asked.sums(self._grouping()), run.info.books)
        parts = {layer: self._cells(sums) for layer, sums in by_book.items()}
        shares = {layer: float(cells.sum()) for layer, cells in parts.items()}
        if question.layer is not None:
            if question.layer not in parts:
                raise unknown_layer(question.layer, list(parts))
            note = f"Only what training samples added through the parameters of {question.layer}."
            return Found(chosen, parts[question.layer], **there, note=note, shares=shares)
        cells = np.zeros((len(run.source.ids), len(run.bins))) + sum(parts.values())
        check = asked.check(cells.sum(keepdims=True)[0])
        note = "An account: what each training sample added to the output, through all layers."
        there |= {"check": _check(check), "missed": _missed(check)}
        return Found(chosen, cells, **there, note=note, shares=shares)

    def _removed(self, subject: Subject, question: Question) -> Found:
        chosen, there = self._target(subject, question)
        with self._ridge:  # what does not depend on the query is made once, not twice at a time
            influence = self.exhibit.run.influence(self.exhibit.model, subject.x, _number(chosen))  # type: ignore[arg-type]
        note = f"{influence.note[:1].upper()}{influence.note[1:]}."
        return Found(chosen, influence.values, **there, note=note)

    def _target(self, subject: Subject, question: Question) -> tuple[Question, dict[str, Any]]:
        """Which output of the model is asked about; all of them there, and it at each place."""
        if self.exhibit.model is None:
            raise ReadingError(
                f"the whole network cannot be asked without the model; {NEEDS_MODEL}."
            )
        if subject.x is None:
            raise ReadingError(NO_INPUT)
        outputs = self.exhibit.outputs(subject.x)
        place = _checked("place", question.place, len(outputs), len(outputs) - 1)
        usual = int(outputs[place].argmax())
        output = _checked("output", question.output, outputs.shape[1], usual)
        marks = outputs[:, output].numpy() if len(outputs) > 1 else None
        there = {"outputs": outputs[place].numpy(), "marks": marks, "shared": marks is not None}
        return replace(question, output=output, place=place), there

    def _grouping(self, position: int | None = None) -> Grouping:
        """By sample and bin; rows at other positions go into a last group."""
        source, bins = self.exhibit.run.source, self.exhibit.run.bins
        rest = len(source.ids) * len(bins)

        def group(steps: Tensor, samples: Tensor, at: Tensor) -> Tensor:
            found = torch.searchsorted(source.numbers, samples.long()) * len(bins)
            found += bins.by_step(steps)
            return found if position is None else torch.where(at == position, found, rest)

        return Grouping(rest + 1, group)

    def _cells(self, sums: Array) -> Array:
        return sums[:-1, 0].reshape(len(self.exhibit.run.source.ids), -1)


def usual_places(outputs: Tensor, positions: int) -> Tensor:
    """(queries,): which place is meant where none is given, of (queries, places, width).

    The last, where the layer has the positions of the model: that is what a language model is
    asked about. Otherwise the place with most output.

    >>> outputs = torch.tensor([[[5.0], [1.0], [2.0]]])
    >>> usual_places(outputs, positions=3), usual_places(outputs, positions=1)
    (tensor([2]), tensor([0]))
    """
    if outputs.shape[1] == positions:
        return torch.full((len(outputs),), positions - 1)
    return outputs.amax(2).argmax(1)


def _number(question: Question) -> Any:
    """The target as a function of the model's output for one query."""
    place, output = question.place, question.output
    assert place is not None
    assert output is not None
    return lambda out: logits(out)[place, output]


def _check(check: Check) -> dict[str, float]:
    parts = check.lines(0)
    return {name.replace("booked by step", "by_step"): value for name, value in parts.items()}


def _missed(check: Check) -> float:
    learned = np.abs(check.total - check.initial).max()
    return float(np.abs(check.remainder).max() / max(learned, 1e-300))


def _checked(name: str, given: int | None, count: int, usual: int) -> int:
    if given is not None and not 0 <= given < count:
        raise ReadingError(f"{name}={given}: this query has {name}s 0 to {count - 1}.")
    return usual if given is None else given


def _last(layers: list[str]) -> str:
    if not layers:
        raise ReadingError("no layer of this run was booked by row; the books say why.")
    return layers[-1]
