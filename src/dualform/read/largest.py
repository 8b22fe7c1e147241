"""The rows of largest size for each query, found while they are gone through."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dualform.read.scan import Chunk


class Largest:
    """The k rows of largest size for each query; of equal ones the earlier.

    Rows below the k-th best so far are dropped at sight, so that after the first chunks hardly
    any are looked at twice. What is found stays on the device until it is asked for.
    """

    def __init__(self, k: int, queries: int, device: torch.device | str = "cpu") -> None:
        self._k, self._queries = k, queries
        self._floor = torch.zeros(queries, dtype=torch.float64, device=device)
        self._kept = torch.zeros(0, 5, dtype=torch.float64, device=device)
        """One row each: query, value, stored id of the sample, step, position."""
        self._is_full = False
        """Whether every query has k rows, of which the smallest is its floor."""

    def add(self, contributions: Tensor, chunk: Chunk) -> None:
        """Takes the contributions (rows, queries) of a chunk."""
        sizes = contributions.abs()
        floor = self._floor.to(sizes)
        if not self._is_full:
            best = sizes.topk(min(self._k, len(sizes)), dim=0).values[-1]
            floor = torch.maximum(floor, best - best * 1e-6)
        at, query = torch.nonzero(sizes > floor, as_tuple=True)
        if not len(at):
            return
        columns = [chunk.samples[at], chunk.steps[at], chunk.positions[at]]
        found = [query, contributions[at, query], *columns]
        self._kept = torch.cat([self._kept, torch.stack([f.double() for f in found], 1)])
        enough = self._k * self._queries
        if len(self._kept) > 4 * enough or (len(self._kept) >= enough and not self._is_full):
            self._prune()

    def joined(self, other: Largest) -> Largest:
        """With the rows that were found elsewhere."""
        self._kept = torch.cat([self._kept, other._kept])
        self._prune()
        return self

    def result(self) -> Tensor:
        """(found, 5): query, value, stored id, step, position; by query, largest first."""
        self._prune()
        return self._kept.cpu()

    def __getstate__(self) -> dict[str, Any]:
        """Where it is sent elsewhere: no more than k rows of each query."""
        self._prune()
        return vars(self)

    def _prune(self) -> None:
        order = torch.argsort(self._kept[:, 1].abs(), descending=True, stable=True)
        order = order[torch.argsort(self._kept[order, 0], stable=True)]
        kept = self._kept[order]
        counts = torch.bincount(kept[:, 0].long(), minlength=self._queries)
        begins = (counts.cumsum(0) - counts).repeat_interleave(counts)
        rank = torch.arange(len(kept), device=kept.device) - begins
        full = counts >= self._k
        last = kept[rank == self._k - 1][:, 1].abs()
        self._floor[full] = last
        self._kept, self._is_full = kept[rank < self._k], bool(full.all())
