"""Lines of books that are in the coordinates of their bases: solved without making the lines.

A line is `u S` for every sample, with u one of the rows `across`. So its Gram matrix is a sum over
samples of `Sᵀ u uᵀ S`: made of the lines, some at a time, or, where there are many more lines than
coordinates across, of the Gram matrix of S itself. What is solved for all lines is put together
into one question to S.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dualform.read.samples_matrix.columns import Columns
from dualform.read.samples_matrix.coordinates import Coordinates

BATCH_BYTES = 128 << 20
"""How much some lines, or their Gram matrices, may take at a time."""
CACHE_BYTES = 1 << 20
"""How much of some lines, and of their Gram matrices, a processor's cache holds."""
GRAM_BYTES = 1 << 30
"""How large the Gram matrices of all lines may be, to be added up from the lines."""
WELL_CONDITIONED = 1 << 14
"""Up to this ratio of a trace to λ lines are solved in the precision of their contributions."""
SMALLEST = 1e-30
"""λ where nothing was contributed."""


@dataclass
class BasisLines:
    """The Gram matrices of one book's lines, as far as samples were added."""

    own: Coordinates
    lines: int
    side: int
    _grams: Tensor | None = None
    """(lines, side, side); or (across · side, across · side) where they are made of those of S."""

    @classmethod
    def of(cls, own: Coordinates) -> BasisLines:
        """Without any samples."""
        side = own.height.size if own.tall else own.width.size
        return cls(own, len(own.far), side)

    @property
    def nbytes(self) -> int:
        """Of what is held."""
        return 0 if self._grams is None else self._grams.nbytes

    @property
    def _of_small(self) -> bool:
        """Whether lines are so many that the Gram matrix of S costs less."""
        if self.own.across is None:
            return False
        across, side = self.own.across.shape[1], self.side
        many = 4 * self.lines * side**2 > GRAM_BYTES
        return many or self.lines * (across + side) > across**2 * side

    def add(self, small: Columns) -> None:
        """Takes what some groups added."""
        S = small.dense()
        if self._grams is None:
            size = self.own.small.size
            shape = (size, size) if self._of_small else (self.lines, self.side, self.side)
            self._grams = S.new_zeros(shape)
        if self._of_small:
            flat = (S if self.own.tall else S.mT).permute(0, 2, 1).flatten(1)
            self._grams.addmm_(flat.T, flat)
            return
        most = CACHE_BYTES if S.device.type == "cpu" else BATCH_BYTES
        lines_each = max(1, min(self.lines, most // (4 * self.side**2)))
        samples_each = max(self.side, most // (4 * self.side * lines_each))
        for part in torch.split(S, samples_each):
            for at in range(0, self.lines, lines_each):
                lines = self.own.lines(part, slice(at, at + lines_each))
                self._grams[at : at + lines_each].baddbmm_(lines.mT, lines)

    def merged(self, other: BasisLines) -> BasisLines:
        """Those of the samples of both."""
        if self._grams is None or other._grams is None:
            return self if other._grams is None else other
        return replace(self, _grams=self._grams + other._grams)

    def solved(self, asked: Tensor, damping: float, samples: int) -> tuple[Tensor, float, float]:
        """What is asked of each line, (queries, lines, side), as `(1 + CᵀC/λ)⁻¹` makes it.

        With the trace of all Gram matrices, and how much of it solving leaves.
        """
        found, trace, left = torch.empty_like(asked), 0.0, 0.0
        for some in self._batches(self.side**2):
            K = self._some(some)
            K = K if samples <= WELL_CONDITIONED * damping else K.double()
            traces = K.diagonal(dim1=1, dim2=2).sum(1)
            added = (damping * traces / max(1, samples)).clamp_min(SMALLEST)
            system = K / added[:, None, None]
            system.diagonal(dim1=1, dim2=2).add_(1.0)
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(system))
            g = asked[:, some].transpose(0, 1).to(inverse)
            found[:, some] = (g @ inverse).transpose(0, 1).to(found)
            trace, left = trace + float(traces.sum()), left + float((K * inverse).sum())
        return found, trace, left

    def _some(self, some: slice) -> Tensor:
        """(some, side, side): the Gram matrices of some lines."""
        assert self._grams is not None
        if not self._of_small or self.own.across is None:
            return self._grams[some]
        rows = (self.own.across[some] * self.own.far[some, None]).to(self._grams)
        across, side = rows.shape[1], self.side
        half = rows @ self._grams.reshape(across, -1)  # (some, side · across · side)
        return torch.einsum("lsat,la->lst", half.reshape(len(rows), side, across, side), rows)

    def _batches(self, numbers: int) -> Iterator[slice]:
        """Some lines at a time, of which each takes so many numbers."""
        across = 1 if self.own.across is None else self.own.across.shape[1]
        wide = across if self._of_small else 1
        each = max(1, BATCH_BYTES // (4 * numbers * wide))
        for at in range(0, self.lines, each):
            yield slice(at, min(at + each, self.lines))
