"""Lines of parameters of which there are too many samples to hold them: their Gram matrices.

`CᵀC` of a line is a sum over samples, so it is added up some samples at a time, for as many lines
as there is memory for. The ledger is read once for it, and once more for what is asked of `C`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dualform.memory.views import Region
from dualform.read.samples_matrix.columns import Columns
from dualform.read.samples_matrix.matrix import Matrix
from dualform.read.samples_matrix.sparse import SparseLines

GRAM_BYTES = 1 << 30
"""How large the Gram matrices may be that are added up in one scan."""
HALVES = 8
"""In how many parts a Gram matrix is made, of which those above the diagonal are left out."""


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
    found: dict[tuple[str, int, int], Tensor] = {}
    for columns in matrix.blocks(band):
        if columns.key not in found:
            found[columns.key] = _zeros(columns)
        _add_grams(found[columns.key], columns.lines(columns.values))
    for grams in found.values():
        _mirror(grams)
    return [found[part.key] for part in band]


def _zeros(part: Columns) -> Tensor:
    shorter, longer = sorted(part.region.shape)
    return part.values.new_zeros(shorter, longer, longer)


def _add_grams(grams: Tensor, C: Tensor) -> None:
    """Adds `CᵀC` of each line, for C (groups, lines, side); only below the diagonal."""
    sparse = SparseLines.of(C)
    if sparse is not None:
        grams += sparse.grams()
        return
    lines = C.transpose(0, 1)
    for rows, columns in _below(C.shape[2]):
        target = grams[:, rows, columns]
        target += torch.bmm(lines[:, :, rows].mT, lines[:, :, columns])


def _mirror(grams: Tensor) -> None:
    """Fills what is above the diagonal."""
    for rows, columns in _below(grams.shape[2]):
        above = slice(columns.start, rows.start)
        grams[:, above, rows] = grams[:, rows, above].mT


def _below(side: int) -> list[tuple[slice, slice]]:
    """Parts of a symmetric matrix: some rows, and the columns up to their end.

    >>> _below(300)
    [(slice(0, 128, None), slice(0, 128, None)), (slice(128, 256, None), slice(0, 256, None)), \
(slice(256, 300, None), slice(0, 300, None))]
    """
    each = max(128, -(-side // HALVES))
    cuts = [(at, min(at + each, side)) for at in range(0, side, each)]
    return [(slice(begin, end), slice(0, end)) for begin, end in cuts]
