"""Detail on demand: the rows of a few samples, found by running their visits again.

A run that keeps summaries no longer tells which token or patch of a sample did what. `zoom` runs
the loss of a sample at the weights of training, or as near to them as the run knows them, and
takes the rows of that backward pass. What the run has kept of the visit says how well they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any, NamedTuple, TypeAlias

from rich.console import Group
from rich.text import Text
from torch import Tensor, nn

from dualform.errors import ReadingError, UnknownSampleError, UnknownStepError
from dualform.layers import SampleRows
from dualform.ledger import Ledger
from dualform.ledger.samples import SampleId
from dualform.read.agreement import Agreement, EntriesOf, Entry, VisitEntries, agreement_of
from dualform.read.contributions import Source
from dualform.read.display import Displayed, columns, framed, pandas_frame
from dualform.read.explain import Explanation
from dualform.read.rerun import Loss, Rerun
from dualform.read.row_contributions import Answer, RowContributions, make_contributions
from dualform.read.spotlight import Reading, unknown_layer
from dualform.read.timeline import EpochSamples
from dualform.read.zoomed import ZoomedLayer, ZoomedVisit

MOST_VISITS = 100
"""How many visits are run again at most: each is a forward and a backward pass by itself."""
MOST_BYTES = 4 << 30
"""How many bytes of rows are held at most."""
NEAR = 0.9
"""Rows that agree less than this with what the run has kept are not those of training."""
SHOWN = 12
"""How many visits are printed."""

WeightsNear: TypeAlias = Callable[[int], tuple[tuple[int, ...], Mapping[str, Tensor]]]
"""Weights after a step, or as near to it as they are known; and after which steps they are."""
VisitSteps: TypeAlias = Sequence[int] | Mapping[SampleId, Collection[int]]
"""Which visits of some samples: those in some steps, or in the steps that each is given."""


@dataclass(frozen=True, repr=False)
class Zoom(Displayed):
    """The rows of some samples, visit by visit, and how well they agree with what the run has kept.

    >>> from dualform.testing import tiny_run
    >>> run, model, x = tiny_run()
    >>> zoom = run.zoom([3, 5], model, lambda model, ids: (model(x[ids]) - 1).square().sum())
    >>> [(visit.id, visit.step) for visit in zoom.visits][:3]
    [(3, 1), (5, 2), (5, 3)]
    >>> zoom.visits[0].layers["0"].errors.shape
    torch.Size([1, 5])
    """

    visits: Sequence[ZoomedVisit]
    """In the order of training."""
    source: Source

    @property
    def agreement(self) -> float:
        """The cosine of the visit that agrees least with what the run has kept of it."""
        return min(visit.agreement.cosine for visit in self.visits)

    def contributions(self, answer: Answer) -> RowContributions:
        """What each token, patch or time step contributed to an answer of this run.

        Args:
            answer: one layer's `run.spotlight(model, x)[layer]`, or a `run.explain(model, x)`.
        """
        if not isinstance(answer, Reading | Explanation):
            raise ReadingError(
                f"contributions(answer) got {type(answer).__name__}; give what one layer of a "
                "spotlight says, run.spotlight(model, x)[layer], or a run.explain(model, x)."
            )
        other = answer.source
        if (other.ledger.path, other.until) != (self.source.ledger.path, self.source.until):
            raise ReadingError(
                f"the answer is about step {other.until} of '{other.ledger.path}', and the zoom "
                f"about step {self.source.until} of '{self.source.ledger.path}'; ask one run."
            )
        return make_contributions(self.visits, answer, other, self.warning)

    @property
    def warning(self) -> str:
        """Says in words which visits have rows that are not those of training; else empty.

        >>> from dualform.testing import tiny_run
        >>> run, model, x = tiny_run()
        >>> zoom = run.zoom([3], model, lambda model, ids: model(x[[0]]).square().sum())
        >>> print(zoom.warning)
        the rows of 3 of 3 visits are not those of training (agreement below 0.9): ...
        """
        low = [visit for visit in self.visits if visit.agreement.cosine < NEAR]
        if not low:
            return ""
        away = max(visit.distance for visit in low)
        why = (
            f"the nearest weights that were kept are up to {away:,} steps away; "
            "recorder.checkpoint() keeps more of them"
            if away
            else "the weights are those of training, so the loss or its data is another one, or "
            "random (dropout, augmentation)"
        )
        return (
            f"the rows of {len(low)} of {len(self.visits)} visits are not those of training "
            f"(agreement below {NEAR}): {why}"
        )

    def to_pandas(self) -> Any:
        """A data frame with one line for each visit and layer."""
        lines = [
            (visit, name, rows) for visit in self.visits for name, rows in visit.layers.items()
        ]
        return pandas_frame(
            {
                "id": [visit.id for visit, _, _ in lines],
                "step": [visit.step for visit, _, _ in lines],
                "weights after": [visit.weights_after for visit, _, _ in lines],
                "distance": [visit.distance for visit, _, _ in lines],
                "layer": [name for _, name, _ in lines],
                "rows": [len(rows) for _, _, rows in lines],
                "agreement": [rows.agreement.cosine for _, _, rows in lines],
                "ratio": [rows.agreement.ratio for _, _, rows in lines],
            }
        )

    def __rich__(self) -> Group:
        names = (
            "id",
            "step",
            "weights after",
            "distance",
            "rows",
            "agreement",
            "factor",
            "least",
        )
        table = columns(names, words=("id", "least"))
        for visit in self.visits[:SHOWN]:
            rows = sum(map(len, visit.layers.values()))
            least = visit.layers[visit.furthest].agreement.cosine if visit.furthest else 1.0
            cells = [
                str(visit.id),
                f"{visit.step:,}",
                " – ".join(f"{kept:,}" for kept in visit.weights_after),
            ]
            cells += [f"{visit.distance:,}", f"{rows:,}", f"{visit.agreement.cosine:.4f}"]
            cells += [f"{visit.scale:.4g}", f"{visit.furthest} {least:.4f}"]
            table.add_row(*map(Text, cells))
        count = len(self.visits)
        notes = [f"{SHOWN} of {count:,} visits shown"] if count > SHOWN else []
        notes += [
            "weights after: the steps whose weights were used, or a point between them; distance: "
            "in steps, to the nearest; agreement: of the rows with what the run has kept of the "
            "visit (1: the same); least: the layer that agrees least"
        ]
        notes += [self.warning] if self.warning else []
        return framed("samples run again, row by row", table, "\n".join(notes))


class _Visit(NamedTuple):
    """A sample and a step that saw it."""

    step: int
    number: int
    id: SampleId


def make_zoom(
    source: Source,
    weights_near: WeightsNear,
    numbers: Tensor,
    ids: Sequence[SampleId],
    model: nn.Module,
    loss: Loss,
    steps: VisitSteps | None,
    layers: Collection[str] | None,
) -> Zoom:
    """Runs the visits of some samples again, in the order of training."""
    ledger = source.ledger
    known = [stream.name for stream in ledger.info.layers]
    for name in layers or ():
        if name not in known:
            raise unknown_layer(name, known)
    chosen = [name for name in known if layers is None or name in layers]
    rerun = Rerun(model, loss, ledger)
    found: list[ZoomedVisit] = []
    entries: dict[int, VisitEntries] = {}
    for visit in _visits(source, dict(zip(numbers.tolist(), ids, strict=True)), steps):
        if visit.step not in entries:  # a step's weights and entries are read once
            fold = EntriesOf.layers(ledger, chosen, numbers.tolist())
            entries = {visit.step: source.reader.reduce(fold, visit.step, visit.step)}
            weights_after, weights = weights_near(visit.step - 1)
        rows = {name: calls for name, calls in rerun(visit.id, weights).items() if name in chosen}
        if not rows:
            raise ReadingError(
                f"the loss of sample {visit.id!r} left no rows in "
                f"{', '.join(map(repr, chosen))}; it must use them as training did."
            )
        found.append(_zoomed(ledger, visit, weights_after, rows, entries[visit.step]))
        size = sum(layer.nbytes for done in found for layer in done.layers.values())
        if size > MOST_BYTES:
            raise ReadingError(
                f"the rows of the first {len(found)} visits take {size / 1e9:.1f} GB, and a zoom "
                f"holds at most {MOST_BYTES / 1e9:.1f} GB; choose fewer by steps=, layers= or ids."
            )
    return Zoom(found, source)


def _visits(source: Source, ids: Mapping[int, SampleId], steps: VisitSteps | None) -> list[_Visit]:
    """The visits of some samples, or those of them in some steps; no more than are run again."""
    if not ids:
        raise ReadingError("zoom got no ids; give those of the samples to run again, such as [7].")
    names = tuple(stream.name for stream in source.ledger.info.streams)
    by_step = source.reader.reduce(EpochSamples(names), source.until)
    found = [
        _Visit(step, number, ids[number])
        for step, batches in sorted(by_step.items())
        for number in dict.fromkeys(n for batch in batches.values() for n in batch if n in ids)
    ]
    seen = {visit.number for visit in found}
    for number, name in ids.items():
        if number not in seen:
            raise UnknownSampleError(
                f"sample {name!r} was not visited up to step {source.until}, which is read here; "
                "it was later: zoom into the whole run."
            )
    if steps is not None:
        each = steps if isinstance(steps, Mapping) else dict.fromkeys(ids.values(), steps)
        asked = sorted({step for own in each.values() for step in own})
        unknown = sorted(set(asked) - {visit.step for visit in found})
        if unknown or not asked:
            there = ", ".join(str(visit.step) for visit in found[:10])
            raise UnknownStepError(
                f"steps={asked[:10]}: none of these samples was visited in "
                f"{unknown[:10] or 'no step'}; there are visits in the steps {there}"
                f"{', …' if len(found) > 10 else ''}."
            )
        found = [visit for visit in found if visit.step in each.get(visit.id, ())]
    if len(found) > MOST_VISITS:
        last = sorted({visit.step for visit in found})[-3:]
        raise ReadingError(
            f"these {len(ids):,} samples have {len(found):,} visits, each of which would be run "
            f"again; {MOST_VISITS} are the most. Choose some by steps={last}, or fewer samples."
        )
    return found


def _zoomed(
    ledger: Ledger,
    visit: _Visit,
    weights_after: tuple[int, ...],
    rows: Mapping[str, Sequence[SampleRows]],
    entries: VisitEntries,
) -> ZoomedVisit:
    """The rows of a visit in the run's units, with what the run has kept of it beside them."""
    kept: dict[str, dict[str, list[Entry]]] = {}
    for (number, layer, book), own in entries.items():
        if number == visit.number:
            kept.setdefault(layer, {})[book] = own
    layers = {
        stream.name: _layer(
            ledger, stream.name, rows.get(stream.name, ()), kept.get(stream.name, {})
        )
        for stream in ledger.info.layers
        if stream.name in rows or stream.name in kept
    }
    compared = [layer.agreement for layer in layers.values() if layer.calls]
    scale = reduce(add, compared, Agreement()).ratio
    scaled = {name: layer.scaled(scale) for name, layer in layers.items()}
    return ZoomedVisit(visit.id, visit.number, visit.step, weights_after, scaled, scale)


def _layer(
    ledger: Ledger, name: str, calls: Sequence[SampleRows], entries: Mapping[str, Sequence[Entry]]
) -> ZoomedLayer:
    """The rows of a layer, compared with the entries of each of its parameters."""
    # A backward pass meets calls the other way round.
    layer = ZoomedLayer(tuple(_on_cpu(rows) for rows in reversed(calls)), Agreement(), entries)
    agreement = Agreement()
    for book in ledger.info.fed_by(name):
        if book.name in entries:
            blocks = list(layer.blocks(book.name))
            agreement += agreement_of(entries[book.name], blocks, book.shape, book.terms[name])
    return replace(layer, agreement=agreement)


def _on_cpu(rows: SampleRows) -> SampleRows:
    shared = None if rows.shared is None else rows.shared.cpu()
    return rows._replace(keys=rows.keys.cpu(), values=rows.values.cpu(), shared=shared)
