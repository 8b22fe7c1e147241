"""What becomes of a prediction without some samples: two answers, kept apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from torch import Tensor

from dualform.ledger.samples import SampleId
from dualform.read.influence import Influence
from dualform.read.scores import Array
from dualform.read.shown import Shown, columns, framed, pandas_frame, signed
from dualform.read.targets import Asked


@dataclass(frozen=True, repr=False)
class Removal(Shown):
    """Targets as they are, with samples' rows taken away, and as if trained without them.

    >>> from dualform.testing import tiny_run
    >>> run, model, x = tiny_run()
    >>> removal = run.without([0, 1], model, x[:2], target=1)
    >>> removal.forgotten.shape, removal.predicted.shape
    ((2,), (2,))
    """

    ids: Sequence[SampleId]
    queries: Sequence[str]
    before: Array
    """(queries,): the targets of the trained model."""
    forgotten: Array
    """(queries,): those of the weights without the samples' rows, as `forget` gives them."""
    predicted: Array
    """(queries,): what training without the samples would lead to, as `influence` estimates it."""

    def to_pandas(self) -> Any:
        """A data frame with one row a query."""
        columns = {name: getattr(self, name) for name in ("before", "forgotten", "predicted")}
        frame = pandas_frame(columns)
        frame.index = list(self.queries)
        return frame

    def __rich__(self) -> Group:
        table = columns(("query", "before", "forgotten", "predicted"), words=("query",))
        shown = list(zip(self.queries, self.before, self.forgotten, self.predicted, strict=True))
        for query, *numbers in shown[:12]:
            table.add_row(query, *map(signed, numbers))
        note = (
            "forgotten: their rows are taken out of the weights, and nothing is trained again\n"
            "predicted: an estimate of what training without them would have led to"
        )
        return framed(f"without {len(self.ids):,} samples", table, note)


def make_removal(
    asked: Asked,
    ids: Sequence[SampleId],
    weights: Mapping[str, Tensor],
    forgotten: Mapping[str, Tensor],
    influence: Influence,
) -> Removal:
    """Compares the targets of both weights, and takes the samples' influence away."""
    chosen = set(ids)
    lost = influence.values[[at for at, name in enumerate(influence.ids) if name in chosen]].sum(0)
    given = dict(asked.model.named_parameters())
    before, after = (
        asked.values({n: w.to(given[n]) for n, w in state.items() if n in given}).numpy()
        for state in (weights, forgotten)
    )
    return Removal(list(ids), asked.names, before, after, before - lost)
