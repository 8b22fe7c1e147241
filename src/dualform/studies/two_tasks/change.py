"""What rows moved a target between two steps of a run: the whole network, exactly.

`f(W_t) − f(W_s) = ⟨Ḡ, W_t − W_s⟩`, with the gradient averaged over the straight line from W_s to
W_t. The ledger has both weights as sums of rows, so their difference is one too. A row counts by
how much its coefficient grew from step s to step t: rows after step s count in full, and those
before it for what momentum still carried over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor, nn

from dualform.read import Run
from dualform.read.contributions import Source
from dualform.read.explain import Questions
from dualform.read.grouping import Grouping
from dualform.read.path import LineGradients, along_line
from dualform.read.scores import Array
from dualform.read.targets import Asked, Target

TOLERANCE = 1e-3
"""How much of a target's change the integration may miss."""


@dataclass(frozen=True)
class Change:
    """How some targets changed between two steps, and which rows changed them.

    >>> from dualform.testing import tiny_run
    >>> from dualform.read.grouping import ByStep
    >>> run, model, x = tiny_run()
    >>> change = change_between(run.at(2), run, model, x[:2], target=1)
    >>> parts = sum(change.sums(ByStep(6)).values()).sum(0)
    >>> bool((abs(parts - change.total.numpy()) < 1e-3).all())
    True
    """

    line: LineGradients
    early: Source
    late: Source

    @property
    def total(self) -> Tensor:
        """(queries,): the change of the targets."""
        return self.line.final - self.line.initial

    @property
    def mean(self) -> Change:
        """The change of the mean over all queries, as one query."""
        directions = {name: d.mean(0, keepdim=True) for name, d in self.line.directions.items()}
        ends = (self.line.initial, self.line.final, self.line.explained)
        return replace(self, line=LineGradients(directions, *(end.mean()[None] for end in ends)))

    def sums(self, grouping: Grouping) -> dict[str, Array]:
        """(groups, queries) for each book: what the rows of each group changed."""
        late, early = (
            Questions((), self.line, source).sums(grouping) for source in (self.late, self.early)
        )
        return {name: late[name] - early[name] for name in late}


def change_between(
    early: Run, late: Run, model: nn.Module, x: Tensor, target: Target = None
) -> Change:
    """The change of a target for each query, from one step of a run to a later one.

    Args:
        early, late: the run as of both steps.
        target: as in `run.explain`.
    """
    asked = Asked(model, x, target)
    first, last = (_weights(run.source, model) for run in (early, late))
    line = along_line(asked, first, last, range(asked.count), TOLERANCE)
    return Change(line, early.source, late.source)


def by_layer(sums: Mapping[str, Array]) -> dict[str, Array]:
    """What some books got, summed by the layer they belong to."""
    found: dict[str, Array] = {}
    for book, part in sums.items():
        layer = book.rpartition(".")[0]
        found[layer] = found.get(layer, np.zeros_like(part)) + part
    return found


def _weights(source: Source, model: nn.Module) -> dict[str, Tensor]:
    """The recorded parameters as of a step, where the model has its own."""
    own = dict(model.named_parameters())
    names = [book.name for book in source.ledger.info.books]
    return {name: source.weights[name].to(own[name].device, own[name].dtype) for name in names}
