"""The numbers of samples: what a batch's rows are written with."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from dualform.ledger import SampleTable
from dualform.ledger.ids import encode_ids
from dualform.owners import BatchSamples
from dualform.recording.messages import Pages

Arrays: TypeAlias = dict[str, list[Tensor]]
"""What a block holds: for each name, parts of one array."""


class SampleNumbers:
    """The numbers of samples in the ledger; those without ids are numbered as they come."""

    def __init__(self, table: SampleTable) -> None:
        self._table = table
        self._numbers: dict[int, Tensor] = {}
        """Of batches without ids, the numbers that their samples were given."""

    def arrays(self, pages: Pages, rows: Arrays) -> Arrays:
        """The samples of the batches that left rows, and the strings met for the first time."""
        tables = [part for name, ps in rows.items() if name.endswith("/segments") for part in ps]
        used = sorted({number for table in tables for number in table[:, 1].tolist()})
        marks = [page.marks for _, written in pages for page in written]
        batches = {samples.number: samples for filled in marks for _, samples in filled}
        kept = [batches[number] for number in used]
        self._numbers = {n: ids for n, ids in self._numbers.items() if n >= min(used, default=0)}
        if not kept:
            return {}
        table = torch.tensor([(batch.number, batch.size) for batch in kept])
        ids = torch.cat([self._ids(batch) for batch in kept])
        found = {"batches": [table], "samples": [ids]}
        new = self._table.take_new()
        return {**found, "ids": [encode_ids(new)]} if new else found

    def _ids(self, batch: BatchSamples) -> Tensor:
        if batch.whole is not None:
            return self._ids(batch.whole)[batch.places]
        if batch.ids is not None:
            return self._table.numbers(batch.ids)
        if batch.number not in self._numbers:  # rows of one batch may be parts of several
            self._numbers[batch.number] = self._table.count(batch.size)
        return self._table.numbers(self._numbers[batch.number])
