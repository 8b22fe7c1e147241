"""Lines most of whose elements are 0: embeddings, of which a sample sees few words."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SHARE = 1 / 8
"""How many elements may be other than 0, for the rest to be worth leaving out."""
PAIRS = 1 << 16
"""How many pairs of elements are multiplied at a time."""


@dataclass(frozen=True)
class SparseLines:
    """`C[group, line, place]` without the groups and places at which every line is 0.

    >>> C = torch.zeros(3, 2, 20)
    >>> C[0, 1, 4], C[0, :, 9], C[2, 0, 9] = 5.0, 2.0, 3.0
    >>> lines = SparseLines.of(C)
    >>> torch.equal(lines.grams(), torch.einsum("nls,nlt->lst", C, C))
    True
    >>> x = torch.rand(7, 2, 20)
    >>> torch.allclose(lines.times(x), torch.einsum("nls,qls->nq", C, x))
    True
    """

    shape: torch.Size
    groups: Tensor
    """(elements,), in order."""
    places: Tensor
    values: Tensor
    """(elements, lines)."""

    @classmethod
    def of(cls, C: Tensor) -> SparseLines | None:
        """Of C as it is, or None where too little of it is 0."""
        if not C.numel():
            return None
        found = C[:, 0] != 0
        for line in C.unbind(1)[1:] if _few(found) else ():
            found |= line != 0
        if not _few(found):
            return None
        groups, places = found.nonzero(as_tuple=True)
        return cls(C.shape, groups, places, C[groups, :, places])

    def grams(self) -> Tensor:
        """(lines, side, side): `CᵀC` of each line."""
        _, lines, side = self.shape
        grams = self.values.new_zeros(side * side, lines)
        pairs = (torch.split(side_of, PAIRS) for side_of in self._pairs())
        for left, right in zip(*pairs, strict=True):
            at = self.places[left] * side + self.places[right]
            grams.index_add_(0, at, self.values[left] * self.values[right])
        return grams.T.reshape(lines, side, side)

    def times(self, x: Tensor) -> Tensor:
        """(groups, queries): `Σ C xᵀ` over the lines, for x (queries, lines, side)."""
        turned = x.flatten(1).T.contiguous().view(*x.shape[1:], len(x))
        total = self.values.new_zeros(self.shape[0], len(x))
        order = self.places.argsort(stable=True)
        places, counts = torch.unique_consecutive(self.places[order], return_counts=True)
        some_of = torch.split(order, counts.tolist())
        for place, some in zip(places.tolist(), some_of, strict=True):
            total.index_add_(0, self.groups[some], self.values[some] @ turned[:, place])
        return total

    def _pairs(self) -> tuple[Tensor, Tensor]:
        """All pairs of elements of the same group."""
        counts = torch.bincount(self.groups, minlength=self.shape[0])
        others, begins = counts[self.groups], (counts.cumsum(0) - counts)[self.groups]
        left = torch.arange(len(others), device=others.device).repeat_interleave(others)
        within = torch.arange(len(left), device=left.device) - (others.cumsum(0) - others)[left]
        return left, begins[left] + within


def _few(found: Tensor) -> bool:
    return int(found.count_nonzero()) <= SHARE * found.numel()
