"""The whole-network read: a prediction as a complete account over the training samples.

`f(W_T) = f(W_0) + ⟨Ḡ, W_T − W_0⟩`, and `W_T − W_0` is a sum over rows: so each row's score is
`⟨Ḡ, H (a ⊗ b)⟩`, over all parameters, and all of them add up to the change of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualform.errors import ReadingError
from dualform.ledger import Book
from dualform.ledger.samples import SampleId
from dualform.read.contributions import RowQuestions, Source, row_sums
from dualform.read.grouping import ByPosition, BySample, ByStep, Grouping
from dualform.read.path import LineGradients, along_line
from dualform.read.samples_matrix.cost import work_of
from dualform.read.samples_matrix.matrix import SamplesMatrix, times
from dualform.read.scan import places
from dualform.read.scores import Array, Check, Scores
from dualform.read.targets import Asked, Target
from dualform.read.timeline import Timeline, make_timeline
from dualform.read.weights import initial_part, sampleless_part

QUERY_BYTES = 512 << 20
"""How large the averaged gradients of the queries may be that share a scan."""
TOLERANCE = 1e-3
"""How much of the output's change the integration may miss."""


@dataclass(frozen=True)
class Questions:
    """What some queries ask of every parameter: their averaged gradients, and where from."""

    names: Sequence[str]
    line: LineGradients
    source: Source

    @property
    def directions(self) -> Mapping[str, Tensor]:
        """(queries, *shape) for each book."""
        return self.line.directions

    def sums(self, grouping: Grouping, books: Sequence[Book] | None = None) -> dict[str, Array]:
        """(groups, queries) for each book: what the rows of each group contributed.

        Row by row, or by the matrix that all queries share, whichever costs less. Where an
        optimizer turns gradients, always row by row: the matrix would be turned sample by sample.
        """
        accounting = self.source.accounting
        asked = [book for book in (books or self.source.ledger.info.books) if book.terms]
        queries = len(next(iter(self.directions.values())))
        speedup, work = accounting.reader.engine.speedup, work_of(accounting, grouping, asked)
        if accounting.turns or work.row_by_row(queries, speedup):
            return row_sums(accounting, self.directions, grouping, asked)
        found = times(SamplesMatrix(accounting, grouping, asked), self.directions)
        return {name: part.numpy() for name, part in found.items()}

    def total(self, sums: Mapping[str, Array], grouping: Grouping) -> Array:
        """(groups, queries): the sum over books, of which there may be none."""
        queries = len(next(iter(self.directions.values())))
        return np.zeros((grouping.count, queries)) + sum(sums.values())

    def applied(self, part: Callable[[Book], Tensor]) -> Array:
        """(queries,): the share of a part of each parameter, summed."""
        shares = [
            self.directions[b.name].double().reshape(-1, b.size).cpu() @ part(b).double().flatten()
            for b in self.source.ledger.info.books
        ]
        total: Array = torch.stack(shares).sum(0).numpy()
        return total

    def check(self, evidence: Array) -> Check:
        """How the parts add up, where the rows' contributions sum to `evidence` (queries,)."""
        accounting, kept = self.source.accounting, self.source.ledger.weights(0)
        faded = self.applied(lambda book: initial_part(accounting, book) - kept[book.name].double())
        initial, total = self.line.initial.numpy() + faded, self.line.final.numpy()
        steps = self.applied(lambda book: sampleless_part(accounting, book))
        return Check(initial, evidence, steps, total - initial - steps - evidence, total)


@dataclass(frozen=True, repr=False)
class Explanation(Scores):
    """A target as the sum of what every training sample contributed to it, through all layers.

    It accounts for what training did; it does not say what training without a sample would have
    done (see `run.influence`).

    >>> from dualform.testing import tiny_run
    >>> run, model, x = tiny_run()
    >>> explanation = run.explain(model, x[:2], target=1)
    >>> explanation.values.shape, bool(explanation.completeness.max() < 1e-3)
    ((8, 2), True)
    >>> parts = explanation.initial + explanation.values.sum(0) + explanation.booked_by_step
    >>> bool(abs(parts - explanation.total).max() < 1e-3)  # the rest is its `remainder`
    True
    >>> explanation.by_layer.ids
    ['0', '2']
    """

    completeness: Array = field(default_factory=lambda: np.zeros(0))
    """(queries,): how much of the change of the target the integration missed, relative to it."""
    books: Mapping[str, Array] = field(default_factory=dict)
    """(queries,) for each book: its rows' share."""
    questions: Sequence[Questions] = ()

    @property
    def initial(self) -> Array:
        """(queries,): the target before training, and what became of the first weights."""
        return self._parts.initial

    @property
    def booked_by_step(self) -> Array:
        """(queries,): the share of what was booked by step, of no sample: changes and residuals."""
        return self._parts.steps

    @property
    def remainder(self) -> Array:
        """(queries,): what rounding and the integration left unexplained."""
        return self._parts.remainder

    @property
    def total(self) -> Array:
        """(queries,): the target, as the trained model gives it."""
        return self._parts.total

    @property
    def by_layer(self) -> Scores:
        """What each layer's parameters contributed: layers × queries."""
        shares = by_layer(self.books, self.source.ledger.info.books)
        values = np.array(list(shares.values())).reshape(len(shares), len(self.queries))
        return Scores(list(shares), values, self.queries, self.check, {}, "contributions by layer")

    @cached_property
    def by_step(self) -> Timeline:
        """What each step of training contributed; scanned when first asked."""
        return self.timeline("step")

    def timeline(self, by: str = "step") -> Timeline:
        """Contributions summed by "step" or by "epoch"."""
        until = self.source.until
        steps = self.sums(ByStep(until))[1:]
        return make_timeline(self.source.reader, steps, by, self.queries, self.check)

    def sums(self, grouping: Grouping, layer: str | None = None) -> Array:
        """(groups, queries): contributions summed over the rows of each group; one scan.

        Args:
            layer: the one whose parameters are looked at; by default all of them.
        """
        books = None if layer is None else self._books_of(layer)
        parts = [asked.total(asked.sums(grouping, books), grouping) for asked in self.questions]
        return np.concatenate(parts, 1)

    def layer(self, name: str) -> Scores:
        """The samples' contributions through one layer's parameters only."""
        values = self.sums(BySample(self.source.numbers), name)
        return Scores(self.ids, values, self.queries, None, self.labels, f"contributions of {name}")

    def positions(self, name: str) -> Scores:
        """Contributions through one layer by sample and position: tokens, patches, time steps."""
        source = self.source
        streams = {stream for book in self._books_of(name) for stream in book.terms}
        most = max(places(source.ledger, source.ledger.info.stream(stream)) for stream in streams)
        values = self.sums(ByPosition(source.numbers, most), name)
        ids: list[SampleId] = [f"{sample}[{at}]" for sample in self.ids for at in range(most)]
        own = [self.labels.get(sample) for sample in self.ids for _ in range(most)]
        labels = {name: label for name, label in zip(ids, own, strict=True) if label is not None}
        return Scores(ids, values, self.queries, None, labels, f"contributions of {name}")

    @property
    def note(self) -> str:
        """How the parts add up, and how much the integration missed."""
        worst, median = self.completeness.max(), np.median(self.completeness)
        missed = f"integration missed {median:.2%} of the change (median; at most {worst:.2%})"
        return f"{super().note}\n{missed}"

    @property
    def _parts(self) -> Check:
        assert self.check is not None
        return self.check

    @property
    def source(self) -> Source:
        """The run that was asked, as of a step."""
        return self.questions[0].source

    @property
    def row_questions(self) -> list[RowQuestions]:
        """What the queries ask of each row, batch by batch."""
        return [RowQuestions.along(self.source.accounting, q.directions) for q in self.questions]

    def _books_of(self, layer: str) -> list[Book]:
        known = [book for book in self.source.ledger.info.books if book.terms]
        books = [book for book in known if _layer(book) == layer]
        if not books:
            names = ", ".join(f"'{n}'" for n in dict.fromkeys(map(_layer, known)))
            raise ReadingError(
                f"layer '{layer}' was not recorded by row in this run; those were {names}."
            )
        return books


def by_layer(shares: Mapping[str, Array], books: Sequence[Book]) -> dict[str, Array]:
    """Something of each book, summed by layer."""
    found: dict[str, Array] = {}
    for book in (book for book in books if book.name in shares):
        layer, share = _layer(book), shares[book.name]
        found[layer] = found[layer] + share if layer in found else share
    return found


def _layer(book: Book) -> str:
    """The layer a parameter is counted for: the first that left rows of it, whole if in parts."""
    return next(iter(book.terms)).partition("[")[0].partition("@")[0]


def make_explanation(
    model: nn.Module, x: Any, target: Target, source: Source, tolerance: float
) -> Explanation:
    """Asks for averaged gradients, then for what the rows say to them; batch by batch."""
    return _joined([_explained(some) for some in ask_all(model, x, target, source, tolerance)])


def ask_all(
    model: nn.Module, x: Any, target: Target, source: Source, tolerance: float = TOLERANCE
) -> Iterator[Questions]:
    """What the queries ask of every parameter, in batches that share a scan."""
    if not 0 < tolerance < 1:
        raise ReadingError(f"tolerance={tolerance}: give a share between 0 and 1, such as 1e-3.")
    asked = Asked(model, x, target)
    first, last = ends(model, source)
    for batch in query_batches(asked, source):
        line = along_line(asked, first, last, batch, tolerance)
        yield Questions([asked.names[query] for query in batch], line, source)


def query_batches(asked: Asked, source: Source) -> list[range]:
    """The queries in parts that share a scan: so many that their gradients fit into memory."""
    size = sum(4 * book.size for book in source.ledger.info.books)
    each = max(1, QUERY_BYTES // max(1, size))
    return [range(asked.count)[at : at + each] for at in range(0, asked.count, each)]


def ends(model: nn.Module, source: Source) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The recorded parameters before training and at the step that is read, where the model is."""
    given = dict(model.named_parameters())
    initial = source.ledger.weights(0)
    names = [book.name for book in source.ledger.info.books]
    first, last = (
        {n: weights[n].to(given[n].device, given[n].dtype) for n in names}
        for weights in (initial, source.weights)
    )
    return first, last


def _explained(asked: Questions) -> Explanation:
    source = asked.source
    by_sample = BySample(source.numbers)
    sums = asked.sums(by_sample)
    values = asked.total(sums, by_sample)
    return Explanation(
        source.ids,
        values,
        asked.names,
        asked.check(values.sum(0)),
        source.labels,
        "contributions to the output",
        asked.line.completeness.numpy(),
        {name: part.sum(0) for name, part in sums.items()},
        [asked],
    )


def _joined(parts: Sequence[Explanation]) -> Explanation:
    """The explanations of batches as one."""
    if len(parts) == 1:
        return parts[0]
    checks = [vars(part._parts) for part in parts]
    check = Check(*(np.concatenate([c[name] for c in checks]) for name in checks[0]))
    return replace(
        parts[0],
        values=np.concatenate([part.values for part in parts], axis=1),
        queries=[name for part in parts for name in part.queries],
        check=check,
        completeness=np.concatenate([part.completeness for part in parts]),
        books={n: np.concatenate([p.books[n] for p in parts]) for n in parts[0].books},
        questions=[q for part in parts for q in part.questions],
    )
