"""Which tokens, patches or time steps of a training sample contributed to an answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from rich.console import Group
from torch import Tensor

from dualform.errors import ReadingError
from dualform.ledger.samples import Label, SampleId
from dualform.optimizers import Memo, Operator
from dualform.read.agreement import in_bases
from dualform.read.coefficients import Accounting
from dualform.read.contributions import RowQuestions, Source
from dualform.read.display import Amounts, framed, matplotlib_axes, pandas_frame, signed
from dualform.read.explain import Explanation
from dualform.read.questions import seen_as
from dualform.read.scores import Array, Ranked, Ranking, Scores, strongest_lines
from dualform.read.spotlight import Reading
from dualform.read.zoomed import ZoomedLayer, ZoomedVisit

Answer: TypeAlias = Reading | Explanation
"""What rows can be asked about: a layer's output, or the whole network's."""


class RowPlace(NamedTuple):
    """Where a row is: the sample and step of its visit, its layer, and its place in the sample.

    >>> RowPlace(7, 3, "fc", 0, 12).position
    12
    """

    id: SampleId
    step: int
    layer: str
    call: int
    """Which call of the layer within the forward pass."""
    position: int


@dataclass(frozen=True)
class VisitCheck:
    """What the rows of each visit add up to, beside what the run's own entries contributed.

    Each part has (visits, queries).

    >>> check = VisitCheck(np.array([[1.5]]), np.array([[1.0]]), np.array([[0.25]]))
    >>> check.difference.tolist()
    [[0.5]]
    """

    rows: Array
    """The sum over the rows of a visit, as far as the entries of the run can hold them."""
    stored: Array
    """What the visit contributed by the run's entries."""
    beyond: Array
    """What else the rows would add: the run's bases do not reach it, so it is in the residual."""

    @property
    def difference(self) -> Array:
        """What the rows miss of the entries, or have too much."""
        return self.rows - self.stored

    @property
    def line(self) -> str:
        """All visits for the first query, in words."""
        rows, stored, beyond = (
            float(part[:, 0].sum()) for part in (self.rows, self.stored, self.beyond)
        )
        share = f" ({abs(rows - stored) / abs(stored):.1%})" if stored else ""
        found = (
            f"first query: rows {signed(rows)}, the run's entries {signed(stored)}, difference "
            f"{signed(rows - stored)}{share}"
        )
        if np.any(self.beyond):
            found += (
                f"\nbeyond the bases of its summaries these rows add {signed(beyond)}: "
                "the run has that in no sample's share"
            )
        return found


@dataclass(frozen=True, repr=False)
class RowContributions(Amounts):
    """What each row of the samples that were zoomed into contributed to an answer.

    `values` are as the run counts them: they add up to what the run's entries contributed, up to
    the agreement of the rows with these. `beyond` is what the bases of summaries do not reach.

    >>> from dualform.testing import tiny_run
    >>> run, model, x = tiny_run()
    >>> y = torch.zeros(8, 3)
    >>> zoom = run.zoom([3], model, lambda model, ids: (model(x[ids]) - y[ids]).square().sum())
    >>> found = zoom.contributions(run.spotlight(model, x[:2])["2"])
    >>> found.values.shape, found.places[0]
    ((3, 2), RowPlace(id=3, step=1, layer='2', call=0, position=0))
    """

    places: Sequence[RowPlace]
    values: Array
    """(rows, queries)."""
    queries: Sequence[str]
    beyond: Array
    """(rows, queries)."""
    check: VisitCheck
    labels: Mapping[SampleId, Label] = field(default_factory=dict)
    warning: str = ""
    """Of visits whose rows are not those of training."""

    @property
    def lines(self) -> Sequence[RowPlace]:
        """The rows."""
        return self.places

    def top(self, k: int = 10) -> Ranking:
        """The k rows that contribute most, for each query."""
        return self._ranked(k, descending=True)

    def bottom(self, k: int = 10) -> Ranking:
        """The k rows that contribute least (most against), for each query."""
        return self._ranked(k, descending=False)

    def positions(self, layer: str | None = None) -> Scores:
        """Contributions by sample and position, summed over visits: tokens, patches, time steps.

        Args:
            layer: the one whose rows are looked at; by default all of them, which says something
                where positions mean the same in all, such as the tokens of a text.
        """
        known = dict.fromkeys(place.layer for place in self.places)
        if layer is not None and layer not in known:
            names = ", ".join(f"'{name}'" for name in known)
            raise ReadingError(f"layer {layer!r} has no rows here; there are {names}.")
        by_sample: dict[SampleId, dict[int, Array]] = {}
        for place, value in zip(self.places, self.values, strict=True):
            if layer in (None, place.layer):
                sums = by_sample.setdefault(place.id, {})
                sums[place.position] = sums.get(place.position, 0.0) + value
        found = {
            f"{sample}[{at}]": (sample, sums[at])
            for sample, sums in by_sample.items()
            for at in sorted(sums)
        }
        ids: list[SampleId] = list(found)
        labels: dict[SampleId, Label] = {
            name: self.labels[own] for name, (own, _) in found.items() if own in self.labels
        }
        values = np.stack([value for _, value in found.values()])
        title = f"contributions of {layer or 'all layers'} by position"
        return Scores(ids, values, self.queries, None, labels, title)

    def plot(self, query: int = 0, axes: Any = None, layer: str | None = None) -> Any:
        """Contributions along the positions of each sample, summed over visits."""
        axes, found = matplotlib_axes(axes), self.positions(layer)
        samples = dict.fromkeys(place.id for place in self.places)
        for sample in samples:
            own = [at for at, name in enumerate(found.ids) if _sample_of(name) == str(sample)]
            axes.step(range(len(own)), found.values[own, query], where="mid", label=f"{sample}")
        axes.axhline(0, color="gray", linewidth=0.8)
        axes.set_xlabel("position in the sample")
        axes.set_ylabel(f"contributions to {self.queries[query]}")
        axes.legend(title="sample")
        return axes

    def to_pandas(self) -> Any:
        """A data frame with one line a row, and a column a query."""
        fields = {
            name: [getattr(place, name) for place in self.places] for name in RowPlace._fields
        }
        given = {name: self.values[:, at] for at, name in enumerate(self.queries)}
        return pandas_frame(fields | given)

    def __rich__(self) -> Group:
        best = self.top(10)
        notes = [best.note, self.check.line, self.warning]
        title = f"contributions by row: the largest of {len(self.places):,}"
        return framed(title, best.table, "\n".join(note for note in notes if note))

    def _ranked(self, k: int, descending: bool) -> Ranking:
        places = strongest_lines(self.values, k, descending, "row")
        which = "largest" if descending else "smallest"
        title = f"contributions by row, {which} first"
        return Ranking([self._row(at, query) for at, query in places], title)

    def _row(self, at: int, query: int) -> Ranked:
        place, value = self.places[at], float(self.values[at, query])
        label = self.labels.get(place.id)
        where = (place.step, place.position, place.layer)
        return Ranked(self.queries[query], place.id, label, value, *where)


def _sample_of(name: SampleId) -> str:
    return str(name).rpartition("[")[0]


class _LayerOfVisit(NamedTuple):
    """The rows of one visit in one layer that has a part in the answer."""

    at: int
    """The number of the visit."""
    visit: ZoomedVisit
    name: str
    rows: ZoomedLayer

    def places(self) -> Iterator[RowPlace]:
        for call, rows in enumerate(self.rows.calls):
            for position in range(len(rows.values)):
                yield RowPlace(self.visit.id, self.visit.step, self.name, call, position)


def make_contributions(
    visits: Sequence[ZoomedVisit], answer: Answer, source: Source, warning: str
) -> RowContributions:
    """Asks the rows of some visits what an answer asks of the run's entries."""
    asked = answer.row_questions
    books = {book.name for book in asked[0].books}
    layers = [
        _LayerOfVisit(at, visit, name, rows)
        for at, visit in enumerate(visits)
        for name, rows in visit.layers.items()
        if not books.isdisjoint(rows.entries)
    ]
    if not layers:
        raise ReadingError(
            "none of these rows has a part in the answer; zoom without layers=, or into a layer "
            "that the answer is about."
        )
    batches = [_asked_of_rows(layers, some, source.accounting) for some in asked]
    values, beyond, stored = (
        torch.cat([torch.cat([part[side] for part in parts]) for parts in batches], 1).numpy()
        for side in range(3)
    )
    of_rows = [layer.at for layer in layers for _ in range(len(layer.rows))]
    check = VisitCheck(
        _by_visit(values, of_rows, len(visits)),
        _by_visit(stored, [layer.at for layer in layers], len(visits)),
        _by_visit(beyond, of_rows, len(visits)),
    )
    places = [place for layer in layers for place in layer.places()]
    queries = answer.names if isinstance(answer, Reading) else answer.queries
    return RowContributions(places, values, queries, beyond, check, source.labels, warning)


def _by_visit(values: Array, of_visit: Sequence[int], visits: int) -> Array:
    """(visits, queries): sums over lines, each of which belongs to a visit."""
    sums = np.zeros((visits, values.shape[1]))
    np.add.at(sums, of_visit, values)
    return sums


class _Contributed(NamedTuple):
    """What the rows of one visit contribute in one layer."""

    counted: Tensor
    """(rows, questions): as far as the entries can hold them."""
    beyond: Tensor
    """(rows, questions): what else they would add."""
    stored: Tensor
    """(1, questions): what the run's entries do."""


def _asked_of_rows(
    layers: Sequence[_LayerOfVisit], asked: RowQuestions, accounting: Accounting
) -> list[_Contributed]:
    """What each of some visits and layers contributes, as the optimizer made it count."""
    found: dict[int, _Contributed] = {}
    memos: dict[tuple[str, str], Memo] = {}
    for span in accounting.spans(asked.books):
        operators = {name: steps.operators for name, steps in span.coefficients.items()}
        for number, layer in enumerate(layers):
            if span.first <= layer.visit.step <= span.last:
                found[number] = _contributed(layer, asked, operators, memos)
    return [found[number] for number in range(len(layers))]


def _contributed(
    layer: _LayerOfVisit,
    asked: RowQuestions,
    operators: Mapping[str, Mapping[int, Operator]],
    memos: dict[tuple[str, str], Memo],
) -> _Contributed:
    counts = (len(layer.rows), len(layer.rows), 1)
    counted, beyond, stored = (torch.zeros(n, len(asked), dtype=torch.float64) for n in counts)
    for book in (book for book in asked.books if book.name in layer.rows.entries):
        coefficient = operators[book.name].get(layer.visit.step)
        if coefficient is None:  # booked by step
            continue
        key, view = (book.name, layer.name), seen_as(book, book.terms[layer.name])
        answers = partial(
            coefficient.answers, asked.asked[key][0], view=view, memo=memos.setdefault(key, {})
        )
        entries, begin = layer.rows.entries[book.name], 0
        for entry in entries:
            stored += answers(rows=entry.rows.double()).sum(0)
        for rows in layer.rows.blocks(book.name):
            own, begin = slice(begin, begin + len(rows)), begin + len(rows)
            kept = in_bases(rows, entries[0].bases)
            as_counted = answers(rows=kept)
            counted[own] += as_counted
            if kept is not rows:
                beyond[own] += answers(rows=rows) - as_counted
    return _Contributed(counted, beyond, stored)
