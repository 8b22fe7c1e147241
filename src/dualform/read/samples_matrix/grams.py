"""Lines of parameters of which there are too many samples to hold them: their Gram matrices.

`CᵀC` of a line is a sum over samples, so it is added up some samples at a time, for as many lines
as there is memory for. The ledger is read once for it, and once more for what is asked of `C`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from dualform.memory.views import Region
from dualform.read.samples_matrix.block_sums import LineGrams, mirror
from dualform.read.samples_matrix.columns import Columns
from dualform.read.samples_matrix.matrix import Matrix

GRAM_BYTES = 1 << 30
"""How large the Gram matrices may be that are added up in one scan."""


def bands(wholes: Sequence[Columns]) -> Iterator[list[Columns]]:
    """Books in parts, lines of their longer sides, whose Gram matrices fit into memory together."""
    band: list[Columns] = []
    for part in (part for whole in wholes for part in _cut(whole)):
        if band and sum(map(_gram_bytes, (*band, part))) > GRAM_BYTES:
            yield band
            band = []
        band.append(part)
    if band:
        yield band


def _gram_bytes(part: Columns) -> int:
    return 4 * min(part.region.shape) * max(part.region.shape) ** 2


def _cut(whole: Columns) -> list[Columns]:
    """A book in parts that fit into memory."""
    height, width = whole.region.shape
    shorter, longer = sorted((height, width))
    each = max(1, GRAM_BYTES // (4 * longer**2))
    lines = [slice(at, min(at + each, shorter)) for at in range(0, shorter, each)]
    across = slice(0, longer)
    regions = [Region(across, some) if whole.tall else Region(some, across) for some in lines]
    return [replace(whole, region=r, scale=whole.scale_of(r)) for r in regions]


def line_grams(matrix: Matrix, band: Sequence[Columns]) -> list[Tensor]:
    """(lines, side, side) for each part: `CᵀC` of each of its lines; one scan."""
    found = matrix.sum_blocks(band, LineGrams)
    return [mirror(found[part.key]) for part in band]
