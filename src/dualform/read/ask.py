"""The one door to a run: a question in, an answer out.

The command line, the explorer's page, its reports and notebooks all ask here. A question is plain
data. So is an answer: numbers by training sample, and the check that they add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dualform.errors import ReadingError
from dualform.ledger.samples import SampleId
from dualform.memory.forms import form_named
from dualform.read.explain import TOLERANCE, ask_all, by_layer
from dualform.read.grouping import ByCell, Grouping
from dualform.read.outputs import logits, model_outputs, model_places, usual_places
from dualform.read.questions import layer_output
from dualform.read.removal import less
from dualform.read.run import Run
from dualform.read.scan import count_rows, places
from dualform.read.scores import Array, Check, Scores
from dualform.read.spotlight import Reading, unknown_layer
from dualform.read.spotlight import nothing_by_row as nothing_by_row
from dualform.read.suspicion import RowErrors as RowErrors
from dualform.read.suspicion import row_errors

Ask: TypeAlias = Literal["layer", "network", "removed", "keys"]
ASKS: tuple[Ask, ...] = get_args(Ask)
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
    """What is asked of a run: plain data, which can be compared and be the key of a cache.

    >>> Question("network", output=7).ask
    'network'
    """

    ask: Ask = "layer"
    """"layer" (one layer's output), "network" (the model's), "removed" (what if a sample had been
    left out) or "keys" (how alike inputs look to a layer)."""
    layer: str | None = None
    """By default the last one. With "network", only what was added through that layer."""
    output: int | tuple[int, ...] | None = None
    """The unit that is asked about: for all queries, or for each; by default the largest."""
    samples: tuple[SampleId, ...] = ()
    """Training samples to ask about, as each layer last saw them; otherwise a model's inputs."""
    detailed: bool = False
    """Whether the answer to a single query also says when, and what stands beside it."""
    place: int | None = None
    """Detailed: which position of the query (a token, a patch); see `usual_places`."""
    at: int | None = None
    """Detailed: only rows at this position of the training samples."""
    tolerance: float = TOLERANCE
    """How much of the output's change an account of the network may miss."""
    method: str = "ridge"
    damping: float | None = None
    rank: int | None = None
    """How "removed" is estimated: as in `Run.influence`."""


@dataclass(frozen=True)
class Answer:
    """How much every training sample has to do with what was asked."""

    question: Question
    """With every part that was left open."""
    scores: Scores
    """(samples, queries), and how they add up: `scores.check`."""
    note: str
    """What the numbers are, in a sentence."""
    reading: Reading | None = None
    """The layer's reading, where one was asked without details."""

    cells: Array = field(default_factory=lambda: np.zeros((0, 0)))
    """Detailed, (samples, bins): amounts by part of training; (samples, 1) if nothing says when."""
    outputs: Array = field(default_factory=lambda: np.zeros(0))
    """Detailed, (width,): all outputs of the layer, or of the model."""
    marks: Array | None = None
    """Detailed, (places,): the output that is asked about, at each position of the query."""
    shared: bool = False
    """Whether those positions are the model's own: then the whole network has the same ones."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Each layer's part, where the whole network was asked in detail."""
    missed: float | None = None
    """The share of what training changed that stays unexplained."""

    @property
    def nbytes(self) -> int:
        """How much memory its numbers take."""
        return self.scores.values.nbytes + self.cells.nbytes + self.outputs.nbytes

    @property
    def output(self) -> int:
        """The unit that a detailed answer is about."""
        assert isinstance(self.question.output, int)
        return self.question.output

    @property
    def bins(self) -> int:
        """How many parts of training it tells apart; 0 where it tells none."""
        return 0 if self.question.ask in ("removed", "keys") else self.cells.shape[1]

    def without(self, places: Sequence[int]) -> float:
        """The output that is asked about, less what the samples at some places add to it."""
        before = self.outputs[[self.output]]
        return float(less(before, self.cells.sum(1, keepdims=True), places)[0])


def ask(run: Run, question: Question, model: nn.Module | None = None, x: Any = None) -> Answer:
    """Answers a question: of training samples, or of what the model gives for x.

    >>> from dualform.testing import tiny_run
    >>> run, model, x = tiny_run()
    >>> ask(run, Question("layer", samples=(3,))).scores.top(2).ids
    [4, 5]
    >>> answer = ask(run, Question("network", detailed=True), model, x[:1])
    >>> answer.cells.shape, list(answer.shares)
    ((8, 3), ['0', '2'])
    """
    if question.ask not in ASKS:
        raise ReadingError(f"ask='{question.ask}': there are {', '.join(map(repr, ASKS))} to ask.")
    if question.ask in ("layer", "keys"):
        return _ask_layer(run, question, model, x)
    if model is None:
        raise ReadingError(f"the whole network cannot be asked without the model; {NEEDS_MODEL}.")
    if question.samples:
        raise ReadingError(NO_INPUT)
    return (_ask_network if question.ask == "network" else _ask_removed)(run, question, model, x)


def positions(
    run: Run,
    question: Question,
    chosen: Sequence[int],
    span: tuple[int, int] | None = None,
    model: nn.Module | None = None,
    x: Any = None,
) -> Array:
    """(samples, positions): what each position of some training samples adds to one layer.

    Args:
        question: a detailed one about a layer.
        chosen: the samples, by their places among the ids.
        span: the first and the last bin of training that count; by default all.
    """
    reading, _, _ = _at_one_place(run, question, model, x)
    numbers, bins = run.source.numbers, run.bins
    count = places(run.source.ledger, run.info.stream(reading.layer))
    first, last = span or (0, len(bins) - 1)
    lines = torch.full((len(numbers),), -1)
    lines[list(chosen)] = torch.arange(len(chosen))
    when = bins.by_step(torch.arange(run.steps + 1))
    counted = torch.where((when >= first) & (when <= last), 0, -1)
    cells = ByCell(numbers, lines, counted, bins=1, positions=count)
    return reading.sums(cells)[:-1, 0].reshape(-1, count)


def effects(run: Run, model: nn.Module, x: Any, count: int) -> tuple[Array, NDArray[np.int64]]:
    """(samples, queries) at the last layer, and the output that each of `count` queries has most.

    Where a query has several places, at its usual one.
    """
    reading = run.spotlight(model, x).last
    outputs = reading.queries.outputs.reshape(count, -1, reading.queries.outputs.shape[1])
    each = outputs.shape[1]
    chosen = torch.arange(count) * each + usual_places(outputs, model_places(model, x, count))
    one_each = reading.only(chosen.tolist())
    return one_each.samples().values, one_each.directions.argmax(1).numpy()


def layer_without(
    run: Run,
    answer: Answer,
    ids: Sequence[SampleId],
    model: nn.Module | None = None,
    x: Any = None,
) -> Array:
    """(outputs,): all outputs of a layer, less what these samples added to its parameters."""
    reading, _, _ = _at_one_place(run, answer.question, model, x)
    stream, terms = run.info.stream(reading.layer), run.info.terms_of(reading.layer)
    with_them, without = (
        layer_output(stream, terms, weights, reading.queries.inputs)[0].numpy()
        for weights in (run.source.weights, run.subtract(ids))
    )
    left: Array = answer.outputs - (with_them - without)
    return left


def gives_output(answer: Answer, model: nn.Module | None, x: Any) -> bool:
    """Whether what was asked is the model's own output: of a layer, it may be another number."""
    if answer.question.ask in ("network", "removed"):
        return True
    if x is None or model is None:
        return False
    place = answer.question.place if answer.shared else -1
    own, given = model_outputs(model, x)[place].numpy(), answer.outputs
    return own.shape == given.shape and bool(np.allclose(own, given, 1e-4, 1e-5))


def errors(run: Run) -> RowErrors:
    """The errors that came back to the last layer, row by row."""
    return row_errors(run.source, run.layers[-1])


def layer_rows(run: Run, layer: str) -> int:
    """How many rows a layer left up to the step that is read."""
    return count_rows(run.source.ledger, run.info.stream(layer), run.steps)


def keeps_inputs(run: Run, layer: str) -> bool:
    """Whether the inputs of a layer's rows were kept, to be compared with those of a query.

    >>> from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run()
    >>> keeps_inputs(run, "2")
    True
    """
    terms, info = run.info.terms_of(layer), run.info
    books = {book for book, term in terms.items() if form_named(term.form).is_product}
    summaries = [stream for stream in info.streams if stream.layer]
    return bool(books) and all(books.isdisjoint(info.terms_of(s.name)) for s in summaries)


def layer_places(run: Run, layer: str) -> int:
    """How many positions (tokens, patches) a sample has in a layer; 1 where there are none."""
    return places(run.source.ledger, run.info.stream(layer))


def _ask_layer(run: Run, question: Question, model: nn.Module | None, x: Any) -> Answer:
    """One layer's output as contributions; or how alike inputs look to it."""
    if not question.detailed:
        reading = _reading(run, question, model, x)
        scores = reading.samples() if question.ask == "layer" else reading.keys_only()
        return Answer(replace(question, layer=reading.layer), scores, scores.note, reading)
    reading, chosen, beside = _at_one_place(run, question, model, x)
    if question.ask == "keys":
        scores = reading.keys_only()
        note = "How alike the inputs are, Σ |x·q|: no error, no sign, no units of the output."
        return Answer(chosen, scores, note, cells=scores.values, **beside)
    cells = _cells(run, reading.sums(_by_sample_and_bin(run, question.at)))
    scores = Scores(run.source.ids, cells.sum(1, keepdims=True), reading.names)
    if question.at is not None:
        note = f"Only what position {question.at} of the training samples added."
        return Answer(chosen, scores, note, cells=cells, **beside)
    check = reading.checked(cells.sum(keepdims=True)[0])
    note = "what each training sample added to this output of the layer"
    whole = float(check.attributed[0]) == 1
    note = f"Exact: {note}." if whole else f"W{note[1:]}, as far as the run has kept it by sample."
    beside["missed"] = _missed(check)
    return Answer(chosen, replace(scores, check=check), note, cells=cells, **beside)


def _reading(run: Run, question: Question, model: nn.Module | None, x: Any) -> Reading:
    """A layer's output for all queries, at all their places."""
    if question.layer is not None and question.layer not in run.layers:
        raise unknown_layer(question.layer, run.layers)
    if question.samples:
        spotlight = run.revisit(question.samples, question.output)
    elif model is not None:
        spotlight = run.spotlight(model, x, question.output)
    else:
        raise ReadingError("say what to ask about: training samples, or a model and its input x.")
    if question.layer is None:
        return spotlight.last
    if question.layer not in spotlight:
        raise ReadingError(f"the model does not use layer '{question.layer}' for this query.")
    return spotlight[question.layer]


def _at_one_place(
    run: Run, question: Question, model: nn.Module | None, x: Any
) -> tuple[Reading, Question, dict[str, Any]]:
    """One output of one layer at one place; what was chosen; and what the layer gives there."""
    everywhere = _reading(run, question, model, x)
    outputs = everywhere.queries.outputs
    if question.samples or model is None:
        own = len(run.revisit(question.samples).last.queries.outputs)
    else:
        own = model_places(model, x)
    usual = int(usual_places(outputs[None], own))
    place = _checked("place", question.place, len(outputs), usual)
    reading = everywhere.only([place])
    unit = int(reading.directions[0].argmax())
    marks = outputs[:, unit].numpy() if len(outputs) > 1 else None
    shared = marks is not None and not question.samples and len(marks) == own
    chosen = replace(question, layer=reading.layer, output=unit, place=place)
    return reading, chosen, {"outputs": outputs[place].numpy(), "marks": marks, "shared": shared}


def _ask_network(run: Run, question: Question, model: nn.Module, x: Any) -> Answer:
    """The model's output as an account of the training samples, through all layers or one."""
    if not question.detailed:
        found = run.explain(model, x, _target(question), question.tolerance)
        return Answer(question, found, found.note)
    chosen, beside = _at_one_output(question, model, x)
    (asked,) = ask_all(model, x, _one_number(chosen), run.source, question.tolerance)
    by_book = by_layer(asked.sums(_by_sample_and_bin(run)), run.info.books)
    parts = {layer: _cells(run, sums) for layer, sums in by_book.items()}
    beside["shares"] = {layer: float(cells.sum()) for layer, cells in parts.items()}
    ids, layer = run.source.ids, question.layer
    if layer is not None:
        if layer not in parts:
            raise unknown_layer(layer, list(parts))
        note = f"Only what training samples added through the parameters of {layer}."
        scores = Scores(ids, parts[layer].sum(1, keepdims=True), asked.names)
        return Answer(chosen, scores, note, cells=parts[layer], **beside)
    cells = np.zeros((len(ids), len(run.bins))) + sum(parts.values())
    check = asked.check(cells.sum(keepdims=True)[0])
    scores = Scores(ids, cells.sum(1, keepdims=True), asked.names, check)
    note = "An account: what each training sample added to the output, through all layers."
    beside["missed"] = _missed(check)
    return Answer(chosen, scores, note, cells=cells, **beside)


def _ask_removed(run: Run, question: Question, model: nn.Module, x: Any) -> Answer:
    """What leaving each sample out of training would do to the model's output."""
    options = (question.method, question.damping, question.rank)
    if not question.detailed:
        found = run.influence(model, x, _target(question), *options)
        return Answer(question, found, found.note)
    chosen, beside = _at_one_output(question, model, x)
    found = run.influence(model, x, _one_number(chosen), *options)
    note = f"{found.note[:1].upper()}{found.note[1:]}."
    return Answer(chosen, found, note, cells=found.values, **beside)


def _target(question: Question) -> int | list[int] | None:
    """The class that is asked about: of all queries, or of each."""
    return list(question.output) if isinstance(question.output, tuple) else question.output


def _at_one_output(question: Question, model: nn.Module, x: Any) -> tuple[Question, dict[str, Any]]:
    """Which output of the model is asked about; all of them there, and it at each place."""
    outputs = model_outputs(model, x)
    place = _checked("place", question.place, len(outputs), len(outputs) - 1)
    usual = int(outputs[place].argmax())
    output = _checked("output", question.output, outputs.shape[1], usual)
    marks = outputs[:, output].numpy() if len(outputs) > 1 else None
    beside = {"outputs": outputs[place].numpy(), "marks": marks, "shared": marks is not None}
    return replace(question, output=output, place=place), beside


def _one_number(question: Question) -> Any:
    """The target as a function of the model's output for one query."""
    place, output = question.place, question.output
    return lambda out: logits(out)[place, output]


def _by_sample_and_bin(run: Run, position: int | None = None) -> Grouping:
    """Rows by sample and part of training; those at other positions go into a last group."""
    numbers, bins = run.source.numbers, run.bins
    when = bins.by_step(torch.arange(run.steps + 1))
    return ByCell(numbers, torch.arange(len(numbers)), when, len(bins), only=position)


def _cells(run: Run, sums: Array) -> Array:
    """(samples, bins), from the sums of that grouping."""
    return sums[:-1, 0].reshape(len(run.source.ids), -1)


def _missed(check: Check) -> float:
    learned = np.abs(check.total - check.initial).max()
    return float(np.abs(check.remainder).max() / max(learned, 1e-300))


def _checked(name: str, given: Any, count: int, usual: int) -> int:
    if given is None:
        return usual
    if not 0 <= given < count:
        raise ReadingError(f"{name}={given}: this query has {name}s 0 to {count - 1}.")
    return int(given)
