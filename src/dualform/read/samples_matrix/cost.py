"""Row by row, or samples × parameters: which of the two costs less is estimated beforehand.

Row by row, every query multiplies every row; put together by sample, rows are multiplied once, and
queries multiply samples. So the matrix pays off with many queries and many visits of each sample.
It has to be made first, though, and what it is made of has to be read in another order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dualform.layers import positions
from dualform.ledger import Book, Stream, Term
from dualform.memory.forms import form_named
from dualform.read.coefficients import Accounting
from dualform.read.grouping import Grouping
from dualform.read.samples_matrix.matrix import COLUMN_BYTES
from dualform.read.scan import count_records

OPERATIONS_A_BYTE = 10
"""How many operations a processor does in the time in which it moves a byte."""
MADE = 16
"""How many bytes are moved for each number of the matrix: it is cleared, added to, and read."""
GATHERED = 4
"""How often a row is moved until it is where its sample is: read, sorted, widened, used."""
REPLAYED = 64
"""How many bytes a step moves for each parameter where its coefficients are replayed."""


@dataclass(frozen=True)
class Cost:
    """Operations in floating point, and bytes that are moved.

    >>> Cost(operations=50.0, bytes=5.0).total
    100.0
    """

    operations: float
    bytes: float

    @property
    def total(self) -> float:
        """Both, in operations."""
        return self.operations + OPERATIONS_A_BYTE * self.bytes


@dataclass(frozen=True)
class Work:
    """What a read is about: rows, the parameters that they feed, and groups that they are put in.

    >>> work = Work(row_bytes=4e9, products=1e11, parameters=1e5, groups=60_000)
    >>> work.row_by_row(queries=2), work.row_by_row(queries=500)
    (True, False)
    >>> work.row_by_row(queries=500, speedup=16)  # by a cluster; the matrix is made by one process
    True
    """

    row_bytes: float
    """Of all rows together."""
    products: float
    """The sizes of the blocks that rows add, summed over the rows."""
    parameters: int
    groups: int
    steps: int = 0
    """How many have an operator in place of a number."""
    scans: float = 1.0
    """How often all rows are read to make the matrix."""

    def row_by_row(self, queries: int, speedup: float = 1.0) -> bool:
        """Whether to ask every row costs less than to make the matrix and to ask that.

        Args:
            speedup: how many times as fast rows are asked as the matrix is made.
        """
        return self.by_rows(queries).total <= speedup * self.by_matrix(queries).total

    def by_rows(self, queries: int) -> Cost:
        """Every query multiplies every row; operators are applied to the queries."""
        replayed = self.steps * self.parameters * (REPLAYED + 24 * queries)
        return Cost(2 * self.products * queries, self.row_bytes + replayed)

    def by_matrix(self, queries: int) -> Cost:
        """Rows are put together; operators are applied to what each step adds to a group."""
        made = self.groups * self.parameters
        operations = 2 * self.products + 2 * made * queries
        applied = MADE * self.products + REPLAYED * self.steps * self.parameters * self.scans
        moved = GATHERED * self.scans * self.row_bytes + MADE * made
        return Cost(operations, moved + (applied if self.steps else 0.0))


def work_of(
    accounting: Accounting,
    grouping: Grouping,
    books: Sequence[Book],
    by_numbers: bool | None = None,
) -> Work:
    """The work of asking about some books.

    Args:
        by_numbers: whether each step's rows count by one number; by default, as the rule has it.
    """
    ledger, until = accounting.ledger, accounting.until
    names = {name for book in books for name in book.terms}
    streams = {s.name: s for s in ledger.info.streams if s.name in names}
    records = {name: count_records(ledger, stream, until) for name, stream in streams.items()}
    if by_numbers is None:
        by_numbers = accounting.rule.by_numbers
    parameters = sum(book.size for book in books)
    cut = by_numbers and grouping.by_visit
    return Work(
        row_bytes=sum(4.0 * records[name] * _width(stream) for name, stream in streams.items()),
        products=sum(
            float(records[name] * positions(streams[name])) * _block(streams[name], term, book)
            for book in books
            for name, term in book.terms.items()
        ),
        parameters=parameters,
        groups=grouping.count,
        steps=0 if by_numbers else until,
        scans=1.0 if cut else max(1.0, 4.0 * grouping.count * parameters / COLUMN_BYTES),
    )


def _width(stream: Stream) -> int:
    """How many numbers a record has."""
    return math.prod(stream.keys) + math.prod(stream.values)


def _block(stream: Stream, term: Term, book: Book) -> int:
    """How many numbers of a parameter a row adds to."""
    outputs = stream.values[0] if stream.layout else math.prod(stream.values)
    if stream.shared:
        return book.size
    inputs = book.size // outputs if stream.layout else math.prod(stream.keys) // term.groups
    return form_named(term.form).block(outputs, inputs)
