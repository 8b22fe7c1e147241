"""From the training thread to the run folder: parcels of steps, settled and written behind it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dualform.errors import NonFiniteError
from dualform.ledger import Background, LedgerWriter
from dualform.recording.glance import Glance
from dualform.recording.lane import Lane
from dualform.recording.settle import Pages, Settler, Span, to_host
from dualform.recording.steps import Step
from dualform.recording.tape import Pool

PARCEL_BYTES = 32 << 20
"""Parcels are large, so that the writer's thread seldom needs the interpreter.

From an accelerator, where each operation is a call to it, a parcel is a whole shard.
"""


@dataclass
class Parcel:
    """What the training thread hands to the writer's."""

    steps: list[Step]
    pages: Pages
    span: Span
    step: int
    flush: bool
    weights: dict[str, Tensor] | None
    mark: str
    now: Glance
    """The parameters, after whatever came after the last step."""
    last: bool = False
    """Whether recording ends with it."""
    ready: torch.cuda.Event | None = None
    """On a GPU, reached when all of it is computed."""


class Delivery:
    """Takes parcels; a thread of its own settles them and passes them on to the ledger."""

    def __init__(
        self, writer: LedgerWriter, settler: Settler, pool: Pool, parameters: Iterable[Tensor]
    ) -> None:
        self._writer, self._settler, self._pool = writer, settler, pool
        self._lane = Lane(parameters)
        self.unkept = 0
        """The step whose weights were due last, where they were not the model's any more."""
        self._background = Background(self._deliver)

    def parcel_bytes(self, shard: int) -> int:
        """How large a parcel should be, for shards of this size."""
        return shard if self._lane else min(PARCEL_BYTES, shard)

    def take(self, parcel: Parcel) -> None:
        """Hands a parcel over; waits while too many do."""
        parcel.ready = self._lane.mark()
        self._background.put(parcel)

    def raise_error(self) -> None:
        """Raises the error that delivery met, if it met one."""
        self._background.raise_error()

    def wait(self) -> None:
        """Returns when everything taken is committed."""
        self._background.wait()
        self._writer.flush()

    def close(self) -> None:
        """Delivers everything, and ends the thread."""
        self._background.close()
        self._writer.flush()

    def _deliver(self, parcel: Parcel) -> None:
        with self._lane.after(parcel.ready):
            error = self._settle(parcel)
            weights = {name: to_host(weight) for name, weight in (parcel.weights or {}).items()}
        if parcel.flush:
            self._writer.pass_on()
        if error is not None:
            self._writer.flush()
            raise error
        if weights and parcel.step:
            if self._settler.moved_on(parcel.now, parcel.span):
                self.unkept = parcel.step
            else:
                self._writer.weights(parcel.step, weights, parcel.mark)
                self.unkept = 0

    def _settle(self, parcel: Parcel) -> NonFiniteError | None:
        if not parcel.steps:
            return None
        block, error = self._settler.settle(
            parcel.steps, parcel.pages, parcel.span, parcel.now, parcel.last
        )
        give_back = partial(self._give_back, parcel.pages)
        if self._lane:
            give_back()  # what will be written is a copy
        if block is not None:
            block.written = None if self._lane else give_back
            self._writer.append(block)
        return error

    def _give_back(self, pages: Pages) -> None:
        for group in pages.values():
            self._pool.give_back(group)
