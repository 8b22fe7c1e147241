"""Scores: how much each sample contributed to each query, with the check that they add up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from rich.console import Group
from rich.table import Table
from rich.text import Text

from dualform.errors import ReadingError
from dualform.ledger.samples import Label, SampleId
from dualform.read.display import (
    Amounts,
    Displayed,
    attributed_words,
    columns,
    framed,
    matplotlib_axes,
    pandas_frame,
    signed,
)

Array: TypeAlias = NDArray[np.float64]
Groups: TypeAlias = str | Mapping[SampleId, Label] | Callable[[SampleId], Label]

BY_STEP = "booked by step"
SHOWN = 20
"""How many queries of a ranking are printed."""


@dataclass(frozen=True)
class Check:
    """The sum every reading carries: initial + evidence + whole steps + remainder = total.

    Each part has one number a query. `steps` is the share of what was booked by step: changes
    that were observed, and what entries leave of gradients (the residual).

    >>> check = Check(*(np.array([x]) for x in (0.5, 1.0, 0.0, 0.0, 1.5)))
    >>> check.lines(0)["total"]
    1.5
    """

    initial: Array
    evidence: Array
    steps: Array
    remainder: Array
    total: Array

    @property
    def attributed(self) -> Array:
        """(queries,): the share of what training changed that is attributed to samples.

        Of the sizes of both parts, the evidence of samples and what belongs to none (`steps`).

        >>> Check(*(np.array([x]) for x in (0.5, 0.75, 0.25, 0.0, 1.5))).attributed
        array([0.75])
        """
        samples, nobody = np.abs(self.evidence), np.abs(self.steps)
        whole = samples + nobody
        found: Array = np.divide(samples, whole, out=np.ones_like(whole), where=nobody > 0)
        return found

    def lines(self, query: int) -> dict[str, float]:
        """The parts for one query, in the order in which they are added up."""
        return {
            "initial": float(self.initial[query]),
            "evidence": float(self.evidence[query]),
            BY_STEP: float(self.steps[query]),
            "remainder": float(self.remainder[query]),
            "total": float(self.total[query]),
        }


@dataclass(frozen=True, repr=False)
class Scores(Amounts):
    """Signed amounts, samples × queries, in the units of the output they are parts of.

    >>> check = Check(*(np.array([x]) for x in (0.5, 1.0, 0.0, 0.0, 1.5)))
    >>> scores = Scores(["cat", "dog"], np.array([[1.5], [-0.5]]), ["q"], check, {"cat": 1})
    >>> scores.top(1).rows[0]
    Ranked(query='q', id='cat', label=1, value=1.5)
    >>> scores.by({"cat": "pet", "dog": "pet"}).values.tolist()
    [[1.0]]
    """

    ids: Sequence[SampleId]
    values: Array
    """(samples, queries)."""
    queries: Sequence[str]
    check: Check | None = None
    labels: Mapping[SampleId, Label] = field(default_factory=dict)
    title: str = "contributions"

    def top(self, k: int = 10) -> Ranking:
        """The k samples with the largest amounts, for each query."""
        return self._ranked(k, descending=True)

    def bottom(self, k: int = 10) -> Ranking:
        """The k samples with the smallest (most negative) amounts, for each query."""
        return self._ranked(k, descending=False)

    def by(self, groups: Groups = "label") -> Scores:
        """Sums over groups: "label", a mapping from id to group, or a function of the id."""
        names = [self._group(groups, sample) for sample in self.ids]
        order = sorted(set(names), key=lambda name: (str(type(name)), name))
        position = {name: at for at, name in enumerate(order)}
        sums = np.zeros((len(order), len(self.queries)))
        np.add.at(sums, [position[name] for name in names], self.values)
        return Scores(order, sums, self.queries, self.check, {}, f"{self.title} by group")

    @property
    def lines(self) -> Sequence[SampleId]:
        """The samples."""
        return self.ids

    def plot(self, query: int = 0, axes: Any = None) -> Any:
        """Amounts sorted by value within each label (without labels: all together)."""
        axes = matplotlib_axes(axes)
        offset, middles = 0, dict[str, float]()
        for label in sorted({self.labels.get(i, "") for i in self.ids}, key=str):
            chosen = [at for at, i in enumerate(self.ids) if self.labels.get(i, "") == label]
            heights = np.sort(self.values[chosen, query])[::-1]
            places = np.arange(offset, offset + len(heights))
            axes.fill_between(places, heights, step="mid", edgecolor="face", linewidth=0.8)
            middles[str(label)] = offset + len(heights) / 2
            offset += len(heights)
        names = [name if len(name) <= 16 else f"{name[:15]}…" for name in middles]
        slanted = max(map(len, names), default=0) > 3
        axes.set_xticks(list(middles.values()), names, rotation=45 if slanted else 0)
        axes.set_xlabel("samples, sorted within each label")
        axes.set_ylabel(f"{self.title} to {self.queries[query]}")
        return axes

    def __rich__(self) -> Group:
        several = f", for {len(self.queries)} queries" if len(self.queries) > 1 else ""
        best = self.top(5)
        notes = [note for note in (best.note, self.note) if note]
        title = f"{self.title}: the largest of {len(self.ids):,}{several}"
        return framed(title, best.table, "\n".join(notes))

    @property
    def note(self) -> str:
        """What stands below a table of them: how the parts of the first query add up."""
        return _sum_line(self.check)

    def _group(self, groups: Groups, sample: SampleId) -> Label:
        if isinstance(groups, str):
            if groups != "label":
                raise ReadingError(
                    f"by({groups!r}): give 'label', a mapping from id to group such as "
                    f"run.samples.columns[{groups!r}], or a function of the id."
                )
            groups = self.labels
        if callable(groups):
            return groups(sample)
        if not isinstance(groups, Mapping):
            raise ReadingError(
                f"by({type(groups).__name__}): give 'label', a mapping from id to group, or a "
                "function of the id."
            )
        if sample not in groups:
            raise ReadingError(
                f"by(groups): sample {sample!r} has no group; describe it with "
                "recorder.describe(ids, labels=…) or give a mapping that has every id."
            )
        return groups[sample]

    def _ranked(self, k: int, descending: bool) -> Ranking:
        places = strongest_lines(self.values, k, descending, "sample")
        rows = [self._row(sample, query) for sample, query in places]
        return Ranking(rows, f"{self.title}, {'largest' if descending else 'smallest'} first")

    def _row(self, sample: int, query: int) -> Ranked:
        name = self.ids[sample]
        value = float(self.values[sample, query])
        return Ranked(self.queries[query], name, self.labels.get(name), value)


def strongest_lines(values: Array, k: int, descending: bool, what: str) -> list[tuple[int, int]]:
    """The k largest or smallest lines of each query: (line, query), query after query.

    >>> strongest_lines(np.array([[1.0], [3.0], [2.0]]), 2, True, "sample")
    [(1, 0), (2, 0)]
    """
    if k < 1:
        raise ReadingError(f"k={k}: ask for at least one {what}.")
    order = np.argsort(-values if descending else values, axis=0, kind="stable")[:k]
    return [(int(line), query) for query in range(values.shape[1]) for line in order[:, query]]


class Ranked(NamedTuple):
    """One line of a ranking. Rows also know their step and position, and some their layer.

    >>> Ranked("q", 7, None, 0.5, step=3, position=0)
    Ranked(query='q', id=7, value=0.5, step=3, position=0)
    """

    query: str
    id: SampleId
    label: Label | None
    value: float
    step: int | None = None
    position: int | None = None
    layer: str | None = None

    def __repr__(self) -> str:
        shown = {name: value for name, value in self._asdict().items() if value is not None}
        return f"Ranked({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


@dataclass(frozen=True, repr=False)
class Ranking(Displayed):
    """The strongest samples or rows of each query, best first.

    >>> Ranking([Ranked("q", 7, None, 0.5)], "contributions").ids
    [7]
    """

    rows: Sequence[Ranked]
    title: str

    @property
    def ids(self) -> list[SampleId]:
        """The ids, in the order of the ranking."""
        return [row.id for row in self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Ranked]:
        return iter(self.rows)

    def __getitem__(self, at: int) -> Ranked:
        return self.rows[at]

    def to_pandas(self) -> Any:
        """A data frame with one row a line of the ranking."""
        names = Ranked._fields
        return pandas_frame({name: [getattr(row, name) for row in self.rows] for name in names})

    def plot(self, axes: Any = None) -> Any:
        """The amounts as bars, best on top."""
        axes = matplotlib_axes(axes)
        names = [f"{row.query} · {row.id}" for row in self.rows]
        axes.barh(names, [row.value for row in self.rows])
        axes.invert_yaxis()
        axes.set_xlabel(self.title)
        return axes

    def __rich__(self) -> Group:
        return framed(self.title, self.table, self.note)

    @property
    def note(self) -> str:
        """What stands below the table: of how many queries it shows the first."""
        count = len(set(self._queries))
        return f"{SHOWN} of {count:,} queries shown" if count > SHOWN else ""

    @property
    def _queries(self) -> list[str]:
        return [row.query for row in self.rows]

    @property
    def table(self) -> Table:
        """The lines of the first queries as a rich table, without a title."""
        names = ["query", "id", "label", "value", "step", "layer", "position"]
        shown = [n for n in names if any(getattr(row, n) is not None for row in self.rows)]
        table = columns(shown, words=("query", "id", "label", "layer", "position"))
        first = set(list(dict.fromkeys(self._queries))[:SHOWN])
        for row in (row for row in self.rows if row.query in first):
            cells = {name: getattr(row, name) for name in shown} | {"value": signed(row.value)}
            table.add_row(*(Text("" if cell is None else str(cell)) for cell in cells.values()))
        return table


def _sum_line(check: Check | None) -> str:
    if check is None or not len(check.total):
        return ""
    parts = check.lines(0)
    total = parts.pop("total")
    if not check.steps.any():
        del parts[BY_STEP]
    summed = " ".join(f"{signed(value)} ({name})" for name, value in parts.items())
    line = f"first query: {summed} = {signed(total)}"
    share = float(check.attributed[0])
    return line if share == 1 else f"{line}\n{attributed_words(share)}"
