"""Which rows are summed up together: by sample, by step, by position, or by several of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from dualform.read.scan import Chunk

SPREAD = 4
"""Up to this ratio of the range of ids to their number, places are looked up and not searched."""


@dataclass(frozen=True)
class Grouping(ABC):
    """Gives each row the number of its group; plain data, so that it can be sent anywhere.

    >>> ByStep(3).of(torch.tensor([1, 1, 3]), torch.zeros(3), torch.zeros(3))
    tensor([1, 1, 3])
    """

    by_visit = False
    """Whether all rows that one use of a layer left of a sample belong together."""

    @property
    @abstractmethod
    def count(self) -> int:
        """How many groups there are."""

    @abstractmethod
    def of(self, steps: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
        """(rows,): the group of each row, from its step, its sample's stored id and position."""

    def of_chunk(self, chunk: Chunk) -> Tensor:
        """The group of each row of a chunk, where the chunk is."""
        return self._on(chunk.keys.device).of(chunk.steps, chunk.samples, chunk.positions)

    def _on(self, device: torch.device) -> Grouping:
        """The same with its tensors on a device, to which they are copied once."""
        if device.type == "cpu":
            return self
        known = vars(self).setdefault("_known", {})
        if device not in known:
            tensors = [f.name for f in fields(self) if isinstance(getattr(self, f.name), Tensor)]
            known[device] = replace(self, **{n: getattr(self, n).to(device) for n in tensors})
        found: Grouping = known[device]
        return found


@dataclass(frozen=True)
class BySample(Grouping):
    """One group for each sample."""

    numbers: Tensor
    """(samples,): stored ids, sorted."""
    by_visit = True

    @property
    def count(self) -> int:
        """One for each sample."""
        return len(self.numbers)

    def of(self, steps: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
        """The place of each row's sample."""
        first, table = self._table
        return (
            torch.searchsorted(self.numbers, samples) if table is None else table[samples - first]
        )

    @cached_property
    def _table(self) -> tuple[int, Tensor | None]:
        """The first id, and the place of each id from it on; None where ids lie far apart."""
        if not len(self.numbers):
            return 0, None
        first, last = self.numbers[[0, -1]].tolist()
        if last - first >= SPREAD * len(self.numbers):
            return first, None
        here = self.numbers.device
        table = torch.zeros(last - first + 1, dtype=torch.long, device=here)
        table[self.numbers - first] = torch.arange(len(self.numbers), device=here)
        return first, table


@dataclass(frozen=True)
class ByStep(Grouping):
    """One group for each step."""

    until: int
    by_visit = True

    @property
    def count(self) -> int:
        """One for each step, and one for step 0, which has no rows."""
        return self.until + 1

    def of(self, steps: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
        """The number of each row's step."""
        return steps


@dataclass(frozen=True)
class ByPosition(Grouping):
    """One group for each position of each sample."""

    numbers: Tensor
    most: int

    @property
    def count(self) -> int:
        """As many positions for each sample."""
        return len(self.numbers) * self.most

    def of(self, steps: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
        """Positions of a sample lie side by side."""
        return torch.searchsorted(self.numbers, samples) * self.most + positions


@dataclass(frozen=True)
class ByCell(Grouping):
    """One group for each cell of a table: lines of samples × bins of steps × positions.

    Rows whose sample, step or position has no place in it are in one last group.

    >>> numbers, no = torch.tensor([5, 8]), -1
    >>> cells = ByCell(numbers, torch.tensor([no, 0]), torch.tensor([no, 0, 0, 1]), bins=2)
    >>> cells.of(torch.tensor([1, 3, 3]), torch.tensor([8, 8, 5]), torch.tensor([0, 0, 0]))
    tensor([0, 1, 2])
    """

    numbers: Tensor
    """(samples,): stored ids, sorted."""
    lines: Tensor
    """(samples,): each sample's line; -1 for none."""
    bin_of: Tensor
    """(steps + 1,): the bin of each step; -1 for none."""
    bins: int
    positions: int = 1
    """How many positions are told apart; those beyond count as the last."""
    only: int | None = None
    """The one position that counts, if one does."""

    @property
    def count(self) -> int:
        """All cells, and one more."""
        return (int(self.lines.max()) + 1) * self.bins * self.positions + 1

    def of(self, steps: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
        """Positions lie side by side, then bins, then lines."""
        line, when = self.lines[torch.searchsorted(self.numbers, samples)], self.bin_of[steps]
        place = positions.clamp_max(self.positions - 1)
        cell = (line * self.bins + when) * self.positions + place
        outside = (line < 0) | (when < 0)
        if self.only is not None:
            outside |= positions != self.only
        return torch.where(outside, self.count - 1, cell)
