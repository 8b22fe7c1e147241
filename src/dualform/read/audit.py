"""Do the books balance?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from dualform.ledger import Book, Ledger
from dualform.read.coefficients import Accounting
from dualform.read.scan import Scan
from dualform.read.shown import Shown, framed, pandas_frame
from dualform.read.weights import balance, gross_part
from dualform.record.optimizers import ScalarRule

ROUNDING = "it changed by no more than rounding: the remainder is relative to what was added up"
SUSPECT = 1e-6


@dataclass(frozen=True)
class BookAudit:
    """One line of an audit: how a parameter was kept, and how far its rows miss it.

    >>> from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run()
    >>> line = run.audit().books[0]
    >>> line.name, line.shape, line.granularity, line.rows
    ('0.weight', (5, 4), 'row', 24)
    """

    name: str
    shape: tuple[int, ...]
    granularity: str
    rows: int
    remainder: float
    bytes: int
    reason: str = ""


@dataclass(frozen=True, repr=False)
class Audit(Shown):
    """The remainder of every book, `‖W_T − books‖ / ‖W_T − c0 W_0‖`, where W_T was kept.

    >>> line = BookAudit("fc.weight", (2, 3), "row", 640, 3e-8, 12800)
    >>> audit = Audit([line], step=10, measured_at=10, bytes=20000)
    >>> audit.remainder, audit.coverage
    (3e-08, 1.0)
    """

    books: Sequence[BookAudit]
    step: int
    measured_at: int
    """The last step up to here whose weights were kept: the remainder is measured there."""
    bytes: int

    @property
    def remainder(self) -> float:
        """The largest relative remainder over the books; NaN where none could be measured."""
        remainders = [book.remainder for book in self.books]
        return float("nan") if any(map(math.isnan, remainders)) else max(remainders, default=0.0)

    @property
    def coverage(self) -> float:
        """The share of trained parameter elements that is booked by row."""
        sizes = dict.fromkeys(("row", "step", "row, then step", "frozen"), 0)
        for book in self.books:
            sizes[book.granularity] += torch.Size(book.shape).numel()
        trained = sum(sizes.values()) - sizes["frozen"]
        return sizes["row"] / trained if trained else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "step": self.step,
            "measured_at": self.measured_at,
            "remainder": self.remainder,
            "coverage": self.coverage,
            "bytes": self.bytes,
            "books": [asdict(book) for book in self.books],
        }

    def to_pandas(self) -> Any:
        """A data frame with one row a book."""
        names = list(BookAudit.__dataclass_fields__)
        return pandas_frame({name: [getattr(b, name) for b in self.books] for name in names})

    @property
    def _title(self) -> str:
        if self.measured_at == self.step:
            return f"books at step {self.step:,}"
        if self.measured_at:
            return f"books at step {self.step:,}, remainder measured at step {self.measured_at:,}"
        return f"books at step {self.step:,}, not measured: no weights were kept up to there"

    def __rich__(self) -> Group:
        note = (
            f"largest remainder {self.remainder:.1e} · {self.coverage:.0%} of trained parameters "
            f"by row · {self.bytes / 1e6:,.1f} MB"
        )
        table = Table()
        for name in ("book", "shape", "kept by", "rows", "remainder", "MB"):
            table.add_column(name, justify="left" if name in ("book", "kept by") else "right")
        for book in self.books:
            kept = f"{book.granularity} ({book.reason})" if book.reason else book.granularity
            cells = [book.name, "×".join(map(str, book.shape)), kept, f"{book.rows:,}"]
            cells += [f"{book.remainder:.1e}", f"{book.bytes / 1e6:,.1f}"]
            table.add_row(*map(Text, cells))
        return framed(self._title, table, note)


def make_audit(ledger: Ledger, until: int, device: torch.device | str = "cpu") -> Audit:
    """Adds every book up and compares it with the weights that were kept."""
    measured = max(step for step in ledger.kept_steps if step <= until)
    accounting, latest = Accounting(ledger, measured, device), Accounting(ledger, until)
    kept, numbers = ledger.kept(measured), isinstance(accounting.rule, ScalarRule)
    lines = []
    for book in ledger.info.books:
        weight = kept.read(book.name).double()
        whole, initial = balance(accounting, book)
        gap, scale, size = ((weight - part).norm() for part in (whole, initial, 0.0))
        if numbers and gap > SUSPECT * scale and _is_column(book):  # rows that cancel round
            size = torch.maximum(size, gross_part(accounting, book).norm())
        small = bool(scale <= _rounding(book, measured) * size)
        remainder = float(gap / (size if small else scale).clamp_min(1e-300))
        if measured == 0 < until:
            remainder = float("nan")
        line = _line(ledger, latest, book, until, remainder)
        changed = small and line.granularity != "frozen"
        lines.append(replace(line, reason=ROUNDING) if changed else line)
    return Audit(lines, until, measured, ledger.nbytes)


def _is_column(book: Book) -> bool:
    return all(term.view == "flat" for term in book.terms.values())


def _rounding(book: Book, steps: int) -> float:
    """How far rounding alone may carry a parameter in so many steps, relative to its size."""
    return 10 * math.sqrt(steps) * torch.finfo(getattr(torch, book.dtype)).eps


def _line(
    ledger: Ledger, accounting: Accounting, book: Book, until: int, remainder: float
) -> BookAudit:
    granularity = accounting.granularity(book)
    notes = [note["reason"] for note in ledger.notes if note["book"] == book.name]
    reason = (notes[0] if notes else book.reason) if "step" in granularity else ""
    rows = sum(Scan(ledger, ledger.info.stream(name), until).rows for name in book.terms)
    return BookAudit(
        book.name, book.shape, granularity, rows, remainder, _bytes(ledger, book), reason
    )


def _bytes(ledger: Ledger, book: Book) -> int:
    """What the book takes on disk; rows that several books share are counted for one of them."""
    own = [stream for stream in book.terms if _payer(ledger, stream) == book.name]
    arrays = [f"{stream}/{part}" for stream in own for part in ("keys", "values")]
    return sum(ledger.array_bytes(name) for name in [*arrays, f"{book.name}/changes"])


def _payer(ledger: Ledger, stream: str) -> str:
    """The book that a stream's bytes are counted for: a weight rather than its bias."""
    return min(ledger.info.fed_by(stream), key=lambda book: book.terms[stream].form == "sum").name
