"""What the blocks of a matrix add up to: made where the blocks are, some samples at a time.

A block is too large to be sent, and what it adds to a sum is not. Samples can be cut anywhere.
So a cluster can share the work: each process makes the blocks of some samples, and adds them up.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from dualform.read.engine import BlockSum, ShardRange
from dualform.read.engine.interface import Partial
from dualform.read.samples_matrix.basis_lines import BasisLines
from dualform.read.samples_matrix.columns import Columns, Key
from dualform.read.samples_matrix.coordinates import Coordinates
from dualform.read.samples_matrix.folds import GroupedRows
from dualform.read.samples_matrix.sparse import SparseLines

LEAST_GROUPS = 4096
"""How many groups a piece has at least: to merge Gram matrices costs as much as to add up some 500
groups, where they are sent."""
HALVES = 8
"""In how many parts a Gram matrix is made, of which those above the diagonal are left out."""

Grams: TypeAlias = dict[Key, Tensor]
"""(lines, side, side) for each part."""
Answers: TypeAlias = dict[tuple[Key, int], Tensor]
"""(some groups, queries) for each part, by the first of the groups."""


@dataclass(frozen=True)
class GroupedSum(BlockSum[Partial]):
    """A sum over the blocks of rows that are read by group."""

    fold: GroupedRows

    @property
    def device(self) -> torch.device | str:
        """Where blocks are made."""
        return self.fold.device

    def cut(self, pieces: int) -> Sequence[GroupedSum[Partial]]:
        """About as many groups each, and not too few."""
        count = self.fold.grouping.count
        pieces = max(1, min(pieces, count // LEAST_GROUPS))
        cuts = [count * at // pieces for at in range(pieces + 1)]
        between = [(begin, end) for begin, end in pairwise(cuts) if begin < end]
        return [replace(self, fold=replace(self.fold, between=pair)) for pair in between]

    def total(self, shards: Sequence[ShardRange]) -> Partial:
        """Block by block."""
        found = self.start()
        for columns in self.fold.blocks(shards):
            if isinstance(columns.scale, Tensor):
                columns.values.mul_(columns.scale.to(columns.values))
            found = self.add(found, columns)
        return found

    @abstractmethod
    def start(self) -> Partial:
        """The sum of no block."""

    @abstractmethod
    def add(self, partial: Partial, columns: Columns) -> Partial:
        """A sum, and a block more; in place where that is cheaper."""


@dataclass(frozen=True)
class LineGrams(GroupedSum[Grams]):
    """`CᵀC` of each line of some parts; only below the diagonal."""

    def start(self) -> Grams:
        """None."""
        return {}

    def add(self, partial: Grams, columns: Columns) -> Grams:
        """With those of some groups."""
        if columns.key not in partial:
            shorter, longer = sorted(columns.region.shape)
            partial[columns.key] = columns.values.new_zeros(shorter, longer, longer)
        _add_grams(partial[columns.key], columns.lines(columns.values))
        return partial

    def merge(self, one: Grams, other: Grams) -> Grams:
        """The sum."""
        return {key: grams.clone().add_(other[key]) for key, grams in one.items()}


@dataclass(frozen=True)
class BasisGrams(GroupedSum[BasisLines]):
    """The Gram matrices of a book that is in the coordinates of its bases."""

    own: Coordinates

    def start(self) -> BasisLines:
        """Of no group."""
        return BasisLines.of(self.own)

    def add(self, partial: BasisLines, columns: Columns) -> BasisLines:
        """With those of some groups."""
        partial.add(columns)
        return partial

    def merge(self, one: BasisLines, other: BasisLines) -> BasisLines:
        """The sum."""
        return one.merged(other)


@dataclass(frozen=True)
class Products(GroupedSum[Answers]):
    """`C xᵀ` of each part, for x (queries, columns)."""

    asked: Mapping[Key, Tensor]

    def start(self) -> Answers:
        """Of no group."""
        return {}

    def add(self, partial: Answers, columns: Columns) -> Answers:
        """With those of some groups."""
        x = self.asked[columns.key].to(columns.values)
        found = (columns.values @ x.T).double().cpu()
        partial[columns.key, columns.groups.start] = found
        return partial

    def merge(self, one: Answers, other: Answers) -> Answers:
        """The groups of both."""
        return one | other


Make: TypeAlias = Callable[[GroupedRows], GroupedSum[Partial]]
"""What is to be made of the blocks that a fold gives."""


def _add_grams(grams: Tensor, C: Tensor) -> None:
    """Adds `CᵀC` of each line, for C (groups, lines, side); only below the diagonal."""
    sparse = SparseLines.of(C)
    if sparse is not None:
        grams += sparse.grams()
        return
    lines = C.transpose(0, 1)
    for rows, columns in below(C.shape[2]):
        target = grams[:, rows, columns]
        target += torch.bmm(lines[:, :, rows].mT, lines[:, :, columns])


def mirror(grams: Tensor) -> Tensor:
    """Fills what is above the diagonal, in place."""
    for rows, columns in below(grams.shape[2]):
        above = slice(columns.start, rows.start)
        grams[:, above, rows] = grams[:, rows, above].mT
    return grams


def below(side: int) -> list[tuple[slice, slice]]:
    """Parts of a symmetric matrix: some rows, and the columns up to their end.

    >>> below(300)
    [(slice(0, 128, None), slice(0, 128, None)), (slice(128, 256, None), slice(0, 256, None)), \
(slice(256, 300, None), slice(0, 300, None))]
    """
    each = max(128, -(-side // HALVES))
    cuts = [(at, min(at + each, side)) for at in range(0, side, each)]
    return [(slice(begin, end), slice(0, end)) for begin, end in cuts]


def by_group(found: Answers, parts: Sequence[Columns]) -> Iterator[tuple[Columns, slice, Tensor]]:
    """The answers of each part, with the groups that they are of; in order."""
    by_key = {part.key: part for part in parts}
    for (key, begin), answers in sorted(found.items(), key=lambda item: item[0]):
        yield by_key[key], slice(begin, begin + len(answers)), answers
