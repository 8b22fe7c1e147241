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
        self._amounts = torch.zeros(0, dtype=torch.float64, device=device)
        self._places = torch.zeros(0, 4, dtype=torch.long, device=device)
        """Of each value: query, stored id of the sample, step, position."""
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
        places = [query, chunk.samples[at], chunk.steps[at], chunk.positions[at]]
        self._take(contributions[at, query].double(), torch.stack(places, 1))
        held, enough = len(self._amounts), self._k * self._queries
        if held > 4 * enough or (held >= enough and not self._is_full):
            self._prune()

    def joined(self, other: Largest) -> Largest:
        """With the rows that were found elsewhere."""
        self._take(other._amounts, other._places)
        self._prune()
        return self

    def result(self) -> tuple[Tensor, Tensor]:
        """Values, and (found, 4): query, stored id, step, position; by query, largest first."""
        self._prune()
        return self._amounts.cpu(), self._places.cpu()

    def __getstate__(self) -> dict[str, Any]:
        """Where it is sent elsewhere: no more than k rows of each query."""
        self._prune()
        return vars(self)

    def _take(self, values: Tensor, places: Tensor) -> None:
        self._amounts = torch.cat([self._amounts, values])
        self._places = torch.cat([self._places, places])

    def _prune(self) -> None:
        order = torch.argsort(self._amounts.abs(), descending=True, stable=True)
        order = order[torch.argsort(self._places[order, 0], stable=True)]
        values, places = self._amounts[order], self._places[order]
        counts = torch.bincount(places[:, 0], minlength=self._queries)
        begins = (counts.cumsum(0) - counts).repeat_interleave(counts)
        rank = torch.arange(len(values), device=values.device) - begins
        full = counts >= self._k
        self._floor[full] = values[rank == self._k - 1].abs()
        self._amounts, self._places = values[rank < self._k], places[rank < self._k]
        self._is_full = bool(full.all())
