"""The layer read: a layer's output as signed contributions of every training row.

`W_T q = c0 W_0 q + Σ_i a_i (x_i·q) e_i + R_T q`, for all queries of a batch in one scan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from rich.console import Group
from rich.text import Text
from torch import Tensor

from dualform.errors import ReadingError, UnknownLayerError
from dualform.ledger import Book, Ledger, Stream, Term
from dualform.memory import Memory
from dualform.memory.forms import form_named
from dualform.read.contributions import (
    AnswerSums,
    LargestRows,
    LayerRows,
    RowQuestions,
    Source,
)
from dualform.read.display import Displayed, columns, framed, signed
from dualform.read.grouping import BySample, ByStep, Grouping
from dualform.read.key_rows import KeySimilarity, StoredRows
from dualform.read.queries import LayerQueries, Outputs, directions
from dualform.read.scores import BY_STEP, Array, Check, Groups, Ranked, Ranking, Scores
from dualform.read.timeline import Timeline, make_timeline
from dualform.read.weights import initial_part, sampleless_part


class Spotlight(Mapping[str, "Reading"], Displayed):
    """One reading for each recorded layer, by the layer's name.

    >>> from dualform.testing import tiny_run
    >>> run, model, x = tiny_run()
    >>> spotlight = run.spotlight(model, x[:2])
    >>> list(spotlight)
    ['0', '2']
    """

    def __init__(
        self, queries: Mapping[str, LayerQueries], output: Outputs, source: Source
    ) -> None:
        self._queries, self._output, self._source = queries, output, source

    def __getitem__(self, layer: str) -> Reading:
        if layer not in self._queries:
            raise unknown_layer(layer, list(self._queries))
        queries = self._queries[layer]
        chosen, asked = directions(queries, self._output)
        return Reading(layer, queries, chosen, asked, self._source)

    @property
    def last(self) -> Reading:
        """The reading of the last layer: the model's output, as a rule."""
        if not self._queries:
            raise ReadingError(f"{nothing_by_row(self._source.ledger)}.")
        return self[list(self._queries)[-1]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._queries)

    def __len__(self) -> int:
        return len(self._queries)

    def __rich__(self) -> Group:
        table = columns(("layer", "inputs", "outputs", "queries"), words=("layer",))
        for name, queries in self._queries.items():
            keys, values = queries.inputs.shape[1], queries.outputs.shape[1]
            table.add_row(Text(name), str(keys), str(values), str(len(queries.names)))
        return framed("layers; read one as in spotlight['name'].top(10)", table)


@dataclass(frozen=True, repr=False)
class Reading(Displayed):
    """One layer's output as contributions of every training row; scanned when first asked.

    >>> from dualform.testing import tiny_run
    >>> run, model, x = tiny_run()
    >>> reading = run.spotlight(model, x[:2], output=1)["2"]
    >>> reading.samples().values.shape
    (8, 2)
    >>> parts = reading.initial + reading.samples().values.sum(0) + reading.booked_by_step
    >>> output = model(x[:2])[:, 1].detach().numpy()
    >>> bool(abs(parts + reading.remainder - output).max() < 1e-6)
    True
    """

    layer: str
    queries: LayerQueries
    directions: Tensor
    """(queries, outputs): which output is asked about."""
    asked: Sequence[str]
    """The same in words."""
    source: Source

    def samples(self) -> Scores:
        """Signed contributions, samples × queries; repeats of a sample are summed."""
        return self._scores(self._sums[0], "contributions")

    def top(self, k: int = 10) -> Ranking:
        """The k samples that contribute most, for each query."""
        return self.samples().top(k)

    def bottom(self, k: int = 10) -> Ranking:
        """The k samples that contribute least (most against), for each query."""
        return self.samples().bottom(k)

    def plot(self, query: int = 0, axes: Any = None) -> Any:
        """Contributions sorted by value within each label; see `Scores.plot`."""
        return self.samples().plot(query, axes)

    def by(self, groups: Groups = "label") -> Scores:
        """Contributions summed over groups of samples; see `Scores.by`."""
        return self.samples().by(groups)

    def timeline(self, by: str = "step") -> Timeline:
        """Contributions summed by "step" or by "epoch"."""
        return make_timeline(self.source.reader, self._sums[1][1:], by, self.names, self.check)

    def sums(self, grouping: Grouping) -> Array:
        """(groups, queries): contributions summed over the rows of each group; one scan."""
        return self._summed(grouping)[0]

    def only(self, queries: Sequence[int]) -> Reading:
        """The same reading of some queries: of one token or patch, where an input has several."""
        asked = [self.asked[query] for query in queries]
        directions = self.directions[torch.tensor(queries)]
        return Reading(self.layer, self.queries.only(queries), directions, asked, self.source)

    def keys_only(self) -> Scores:
        """The published score `Σ |x·q|`: similarity of inputs alone, without error or sign."""
        source, streams = self.source, tuple(self._products("keys_only compares"))
        by_sample = BySample(source.numbers)
        fold = KeySimilarity(streams, self.queries.inputs, by_sample, source.device)
        sums = source.reader.reduce(fold, source.until).cpu().numpy()
        return replace(self._scores(sums, "keys only |x·q|"), check=None)

    def rows(self, k: int = 100) -> Ranking:
        """The k rows that contribute most in size, of either sign, with step and position."""
        if k < 1:
            raise ReadingError(f"k={k}: ask for at least one row.")
        largest = LargestRows(self._rows.asked, k=k).over(self.source.accounting)
        values, places = largest.result()
        query, sample, step, position = places.T
        found = torch.searchsorted(self.source.numbers, sample.contiguous()).tolist()
        ids, queries = [self.source.ids[at] for at in found], self.names
        asked = [queries[at] for at in query.tolist()]
        labels = map(self.source.labels.get, ids)
        rest = (values.tolist(), step.tolist(), position.tolist())
        return Ranking(list(map(Ranked, asked, ids, labels, *rest)), "rows")

    def memory(self) -> Memory:
        """The layer's rows as a `Memory`: `memory.read(q)` is what they add to `W_T q`.

        Loads every row. The values carry their coefficients; the bias is not part of it.
        """
        source, coefficients = self.source, self._numbers()
        rows: list[tuple[Tensor, ...]] = []
        for stream in self._products("memory() holds"):
            fold = StoredRows(stream, coefficients, device=source.device)
            rows = source.reader.reduce(fold, source.until, onto=rows)
        none = (self.queries.inputs[:0], self.queries.outputs[:0])
        keys, values = zip(*(rows or [none]), strict=True)
        return Memory(torch.cat(keys), torch.cat(values))

    @cached_property
    def names(self) -> list[str]:
        """The queries and the output each is asked about, in words."""
        return [f"{q}: {a}" for q, a in zip(self.queries.names, self.asked, strict=True)]

    @property
    def initial(self) -> Array:
        """(queries,): the share of the weights training started from, frozen ones among them."""
        return self.check.initial

    @property
    def booked_by_step(self) -> Array:
        """(queries,): the share of what was booked by step, of no sample: changes and residuals.

        A weight that is computed from such parameters is part of it as a whole.
        """
        return self.check.steps

    @property
    def remainder(self) -> Array:
        """(queries,): what rounding during training left unexplained."""
        return self.check.remainder

    @property
    def total(self) -> Array:
        """(queries,): the layer's output, in float64.

        Of a training sample (`revisit`) in a layer of which only an offset left rows, that offset:
        what else the layer gave is not recorded.
        """
        return self.check.total

    @cached_property
    def check(self) -> Check:
        """initial + evidence + booked by step + remainder = total."""
        return self.checked(self._sums[0].sum(0))

    def checked(self, evidence: Array) -> Check:
        """The check, where the sum of all contributions is known already: no scan."""
        accounting = self.source.accounting
        before, since = self.queries.unrecorded.initial, self.queries.unrecorded.by_step
        initial = self._applied(lambda book: initial_part(accounting, book)) + self._along(before)
        steps = self._applied(lambda book: sampleless_part(accounting, book)) + self._along(since)
        total = self._applied(lambda book: self.source.weights[book.name].double())
        total = total + self._along(before + since)
        return Check(initial, evidence, steps, total - initial - steps - evidence, total)

    def __rich__(self) -> Group:
        shown = [name for name in self.check.lines(0) if name != BY_STEP or self.check.steps.any()]
        shares = self.check.attributed
        names = ("query", *shown, *["attributed"] * bool((shares < 1).any()))
        table = columns(names, words=("query",))
        for at, name in enumerate(self.names[:12]):
            lines = self.check.lines(at)
            cells = [signed(lines[part]) for part in shown]
            table.add_row(
                Text(name), *cells, *[f"{shares[at]:.0%}"] * (len(names) - 1 - len(shown))
            )
        notes = [f"12 of {len(self.names)} queries shown"] if len(self.names) > 12 else []
        if bool((shares < 1).any()):
            notes.append("attributed: the share of what training changed that samples account for")
        what = "its output" if self.queries.complete else "what its recorded offset adds"
        return framed(
            f"layer {self.layer}: {what}, and what it is made of", table, "\n".join(notes)
        )

    @property
    def row_questions(self) -> list[RowQuestions]:
        """What the queries ask of each row."""
        return [self._rows.asked]

    @cached_property
    def _rows(self) -> LayerRows:
        return LayerRows(self.source, self.layer, self.queries.inputs, self.directions)

    @cached_property
    def _sums(self) -> tuple[Array, Array]:
        """Contributions by sample (samples, queries) and by step (1 + steps, queries)."""
        by_sample = BySample(self.source.numbers)
        samples, steps = self._summed(by_sample, ByStep(self.source.until))
        return samples, steps

    def _summed(self, *groupings: Grouping) -> list[Array]:
        """(groups, queries) for each grouping, in one scan."""
        fold = AnswerSums(self._rows.asked, groupings=groupings)
        return [total.cpu().numpy() for total in fold.over(self.source.accounting)[""]]

    def _products(self, what: str) -> Iterator[Stream]:
        """The streams of a matrix product; for others, keys are not vectors to compare."""
        ledger = self.source.ledger
        if not any(_is_product(term) for term in self._rows.terms.values()):
            raise ReadingError(f"{what} the inputs of matrix products; '{self.layer}' is none.")
        for stream in ledger.info.streams:
            terms = ledger.info.terms_of(stream.name)
            if any(_is_product(t) for book, t in terms.items() if book in self._rows.terms):
                if stream.layer:
                    raise ReadingError(
                        f"{what} the inputs of rows, and '{self.layer}' was kept as summaries; "
                        "record it with keep='rows', 'half' or 'int8' to compare them."
                    )
                yield stream

    def _numbers(self) -> Tensor:
        """The coefficients of the weight's rows, where they are numbers."""
        terms, books = self._rows.terms, self.source.ledger.info.fed_by(self.layer)
        weight = next(book for book in books if _is_product(terms[book.name]))
        accounting = self.source.accounting
        if not accounting.rule.by_numbers or terms[weight.name].groups > 1:
            raise ReadingError(
                f"memory() needs one number for each row; '{self.layer}' has "
                f"{'groups' if accounting.rule.by_numbers else 'one a weight'}; use samples()."
            )
        return accounting.numbers(weight)

    def _applied(self, part: Callable[[Book], Tensor]) -> Array:
        """(queries,): a part of the layer's parameters, applied to the queries."""
        applied: Array = self._rows.applied(part).numpy()
        return applied

    def _along(self, outputs: Tensor) -> Array:
        """(queries,): the outputs that are asked about."""
        along: Array = (self.directions * outputs).sum(1).numpy()
        return along

    def _scores(self, values: Array, title: str) -> Scores:
        source = self.source
        return Scores(source.ids, values, self.names, self.check, source.labels, title)


def nothing_by_row(ledger: Ledger) -> str:
    """Why a run has no layers to read."""
    if not ledger.last_step:
        return (
            "no step of this run is committed yet; a recording commits every 30 seconds, at "
            "recorder.checkpoint() and at its end"
        )
    return "no layer of this run was booked by row; run.audit() says why"


def unknown_layer(layer: str, known: Sequence[str]) -> UnknownLayerError:
    """Says which layers there are."""
    names = ", ".join(f"'{name}'" for name in known) or "no layer by row"
    return UnknownLayerError(f"layer {layer!r} is not in this run; it recorded {names}.")


def _is_product(term: Term) -> bool:
    return form_named(term.form).is_product
