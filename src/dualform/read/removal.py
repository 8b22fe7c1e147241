"""What becomes of a prediction without some samples: an account, and an estimate.

There is one answer of each kind, wherever it is asked for. The account takes away what the samples
added, as `explain` or a layer's reading has it. The estimate says what training without them would
have led to, as `influence` has it. Each is a target less a sum of amounts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group

from dualform.ledger.samples import SampleId
from dualform.read.display import Displayed, columns, framed, pandas_frame, signed
from dualform.read.explain import Explanation
from dualform.read.influence import Influence
from dualform.read.scores import Array

ACCOUNT = (
    "An account: the model's output less what these samples added to it through all layers; "
    "nothing is trained again."
)
LAYER_ACCOUNT = (
    "An account of this layer alone: its output less what these samples added to its parameters; "
    "its input stays as it is, and nothing is trained again."
)
ESTIMATE = "An estimate of what training without these samples would have led to; not an account."


@dataclass(frozen=True, repr=False)
class Removal(Displayed):
    """Targets as they are, less what samples added to them, and as if trained without them.

    >>> from dualform.testing import tiny_run
    >>> run, model, x = tiny_run()
    >>> removal = run.without([0, 1], model, x[:2], target=1)
    >>> removal.accounted.shape, removal.predicted.shape
    ((2,), (2,))
    """

    ids: Sequence[SampleId]
    queries: Sequence[str]
    before: Array
    """(queries,): the targets of the trained model."""
    accounted: Array
    """(queries,): an account: those less what the samples added, as `explain` has it."""
    predicted: Array
    """(queries,): an estimate: what training without the samples would lead to, by `influence`."""

    def to_pandas(self) -> Any:
        """A data frame with one row a query."""
        columns = {name: getattr(self, name) for name in ("before", "accounted", "predicted")}
        frame = pandas_frame(columns)
        frame.index = list(self.queries)
        return frame

    def __rich__(self) -> Group:
        table = columns(("query", "before", "accounted", "predicted"), words=("query",))
        shown = list(zip(self.queries, self.before, self.accounted, self.predicted, strict=True))
        for query, *numbers in shown[:12]:
            table.add_row(query, *map(signed, numbers))
        note = f"accounted: {_inside(ACCOUNT)}\npredicted: {_inside(ESTIMATE)}"
        return framed(f"without {len(self.ids):,} samples", table, note)


def less(before: Array, amounts: Array, places: Sequence[int]) -> Array:
    """`before − Σ amounts` over the samples at some places, each counted once.

    >>> import numpy as np
    >>> less(np.array([5.0]), np.array([[1.0], [2.0], [3.0]]), [0, 2, 2])
    array([1.])
    """
    left: Array = before - amounts[list(dict.fromkeys(places))].sum(0)
    return left


def make_removal(
    ids: Sequence[SampleId], explanation: Explanation, influence: Influence
) -> Removal:
    """Takes the samples' contributions away, and their influence."""
    at = {name: place for place, name in enumerate(explanation.ids)}
    places, before = [at[name] for name in ids], explanation.total
    accounted = less(before, explanation.values, places)
    predicted = less(before, influence.values, places)
    return Removal(list(ids), explanation.queries, before, accounted, predicted)


def _inside(sentence: str) -> str:
    """A sentence as a part of another."""
    return f"{sentence[0].lower()}{sentence[1:]}".rstrip(".")
