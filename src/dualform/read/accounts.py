"""Are the entries of a book that is summarized what the optimizer saw?

What entries leave of such a book is its residual, so that the books balance whatever the entries
are. So another check is needed. At some steps the recorder kept the gradient itself, in the bases:
the *account* `Uᵀ G V` of the step. The step's entries must add up to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.ledger import Book, Ledger, Stream
from dualform.ledger.reader import values_by_step
from dualform.memory.blocks import as_matrix
from dualform.memory.forms import form_named
from dualform.memory.summary import Bases
from dualform.read.coefficients import Accounting
from dualform.read.engine import Fold, ShardRange
from dualform.read.row_columns import RowColumns
from dualform.read.scan import chunks, row_sides, rows_total

CHECKED = 8
"""At most so many steps of a book are checked."""


def account_gap(accounting: Accounting, book: Book, *, cancel: bool = False) -> float:
    """How far entries are from the accounts of their steps, relative; NaN where none was kept.

    Where entries `cancel` but for rounding, the gap is relative to the sum of their sizes.
    """
    ledger = accounting.ledger
    kept = {t: u for t, u in accounts(ledger, book) if t <= accounting.until}
    chosen = sorted(kept)[:: max(1, len(kept) // CHECKED)]
    streams = tuple(map(ledger.info.stream, book.terms))
    gaps, sizes = [], []
    for step in chosen:
        found = accounting.reader.reduce(EntrySum(book, streams, kept[step].shape), step, step)
        factor = float(accounting.factors(book)[step - 1])
        gaps.append(float((factor * found - kept[step].double()).norm()))
        size = kept[step]
        if cancel:
            gross = EntrySum(book, streams, kept[step].shape, sizes=True)
            size = accounting.reader.reduce(gross, step, step)
        sizes.append(float(size.norm()))
    return sum(gaps) / sum(sizes) if sum(sizes) else float("nan")


def accounts(ledger: Ledger, book: Book) -> list[tuple[int, Tensor]]:
    """The accounts that were kept of a book, each (k_o, k_i), with their steps."""
    found: list[tuple[int, Tensor]] = []
    for shard in ledger.step_shards:
        name = f"{book.name}/accounts"
        if name in shard.file:
            seen = Book(book.name, tuple(shard.file.array(name).shape[1:]), "float32")
            found += values_by_step(shard, seen, "account", 1, ledger.last_step)
    return found


@dataclass(frozen=True)
class EntrySum(Fold[Tensor]):
    """What the entries of some steps add up to in the bases of a book."""

    book: Book
    fed_by: tuple[Stream, ...]
    size: tuple[int, ...]
    """Height and width of a summary."""
    sizes: bool = False
    """Whether sizes are summed, whatever their sign; of offsets."""

    @property
    def streams(self) -> list[str]:
        """Those that feed the book."""
        return list(self.book.terms)

    def start(self) -> Tensor:
        """Zero."""
        return torch.zeros(self.size, dtype=torch.float64)

    def fold(self, partial: Tensor, shard: ShardRange) -> Tensor:
        """Adds the entries of a shard."""
        for stream in self.fed_by:
            term = self.book.terms[stream.name]
            form, top = form_named(term.form), 0
            if not (stream.bases and stream.bases[0]):  # rows of a block, at its place
                top = term.at[0]
            for chunk in chunks(shard, stream):
                if stream.shared:
                    counts = torch.ones(len(chunk.values), dtype=torch.float64)
                    whole = rows_total(self.book, term, row_sides(chunk, term), counts)
                    partial += self._along_bases(shard, as_matrix(whole, term.view, term.groups))
                    continue
                values = chunk.values.double()
                if not form.has_sides:
                    outputs = self._bases(shard).outputs
                    assert outputs is not None
                    partial += outputs[chunk.keys[:, 0] + term.at[0]].double().T @ values
                elif math.prod(stream.keys):
                    partial[top : top + values.shape[1]] += values.T @ chunk.keys.double()
                else:
                    values = values.abs() if self.sizes else values
                    partial += values.sum(0).reshape(self.size)
        return partial

    def _along_bases(self, shard: ShardRange, whole: Tensor) -> Tensor:
        """`Uᵀ G V` of what rows add up to."""
        bases = self._bases(shard)
        left = whole if bases.outputs is None else bases.outputs.double().T @ whole
        return left if bases.inputs is None else left @ bases.inputs.double()

    def _bases(self, shard: ShardRange) -> Bases:
        """Those that the entries of the steps are in; a table that is read is along V only."""
        span = (shard.first, shard.last)
        held = [s for s in self.fed_by if any(s.bases) and shard.holds(s.name)]
        with_rows = [s for s in held if len(set(RowColumns(shard, s).between(*span))) == 2]
        own = max(with_rows, key=lambda stream: stream.bases[0])
        bases = shard.bases(own)
        assert bases is not None
        return bases

    def merge(self, one: Tensor, other: Tensor) -> Tensor:
        """The sum."""
        return one.add_(other)
