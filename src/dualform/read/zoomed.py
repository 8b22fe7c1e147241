"""A visit that was run again: what one step saw of one sample, row by row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import add

import torch
from torch import Tensor

from dualform.layers import SampleRows
from dualform.ledger.samples import SampleId
from dualform.memory.shared import AnySides
from dualform.read.agreement import Agreement, Entry
from dualform.read.gradients import row_blocks


@dataclass(frozen=True, repr=False)
class ZoomedLayer:
    """The rows of one sample in one layer, of one visit: a row is a token, a patch, a time step.

    >>> from dualform.testing import tiny_run
    >>> run, model, x = tiny_run()
    >>> loss = lambda model, ids: model(x[ids]).square().sum()
    >>> layer = run.zoom([3], model, loss).visits[0].layers["2"]
    >>> layer.keys.shape, layer.errors.shape, layer.positions
    (torch.Size([1, 5]), torch.Size([1, 3]), tensor([0]))
    """

    calls: tuple[SampleRows, ...]
    """The rows of each call of the layer, in the order of the calls."""
    agreement: Agreement
    """With what the run has kept of the same visit."""
    entries: Mapping[str, Sequence[Entry]] = field(default_factory=dict)
    """What the run has kept of this visit, by parameter; nothing of those that it books by step."""

    def __len__(self) -> int:
        return sum(len(rows.values) for rows in self.calls)

    @property
    def keys(self) -> Tensor:
        """(rows, inputs): what the layer saw; the places in a table, for an embedding."""
        return self._joined([rows.keys for rows in self.calls])

    @property
    def errors(self) -> Tensor:
        """(rows, outputs): what came back to its output, in the units of the run's own rows."""
        return self._joined([rows.values for rows in self.calls])

    @property
    def positions(self) -> Tensor:
        """(rows,): which token, patch or time step of its sample a row is, within its call."""
        return self._joined([torch.arange(len(rows.values)) for rows in self.calls])

    @property
    def nbytes(self) -> int:
        """Of keys and errors."""
        return sum(rows.keys.nbytes + rows.values.nbytes for rows in self.calls)

    def blocks(self, book: str) -> Iterator[AnySides]:
        """What the rows of each call add to a parameter's gradient."""
        return (row_blocks(rows, book).double() for rows in self.calls)

    def scaled(self, number: float) -> ZoomedLayer:
        """The same with errors that are multiplied by a number."""
        calls = tuple(rows._replace(values=rows.values * number) for rows in self.calls)
        return replace(self, calls=calls)

    @staticmethod
    def _joined(parts: Sequence[Tensor]) -> Tensor:
        """Nothing where the layer was not called."""
        return torch.cat([*parts]) if parts else torch.zeros(0)


@dataclass(frozen=True, repr=False)
class ZoomedVisit:
    """One sample in one step, run again.

    >>> from dualform.testing import tiny_run
    >>> run, model, x = tiny_run()
    >>> loss = lambda model, ids: model(x[ids]).square().sum()
    >>> visit = run.zoom([3], model, loss).visits[0]
    >>> visit.id, visit.step, visit.weights_after, visit.distance
    (3, 1, (0,), 0)
    """

    id: SampleId
    number: int
    """The stored id."""
    step: int
    """The step that saw the sample."""
    weights_after: tuple[int, ...]
    """The steps after which the weights were kept that it was run with; between two if there are.
    """
    layers: Mapping[str, ZoomedLayer]
    scale: float = 1.0
    """What errors were multiplied by to be in the run's units: 1 / batch size, a loss scale, …"""

    @property
    def distance(self) -> int:
        """How many steps the nearest of these weights are away from the visit; 0 for its own.

        A step sees the weights that the step before it left.
        """
        return min(abs(kept - (self.step - 1)) for kept in self.weights_after)

    @cached_property
    def agreement(self) -> Agreement:
        """With what the run has kept of the visit, over all layers."""
        return reduce(add, [layer.agreement for layer in self.layers.values()], Agreement())

    @property
    def furthest(self) -> str:
        """The layer whose rows agree least."""
        known = {n: at.agreement.cosine for n, at in self.layers.items()}
        return min(
            (n for n in known if not math.isnan(known[n])), key=known.__getitem__, default=""
        )
