"""Do the books balance?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from rich.console import Group
from rich.text import Text
from torch import Tensor

from dualform.ledger import Book, Ledger
from dualform.memory.forms import form_named
from dualform.optimizers import BY_ROW
from dualform.read.accounts import account_gap
from dualform.read.coefficients import Accounting
from dualform.read.display import Displayed, attributed_words, columns, framed, pandas_frame
from dualform.read.engine import Engine, ShardRange
from dualform.read.row_columns import stored_arrays
from dualform.read.scan import count_rows
from dualform.read.weights import (
    Balance,
    balances,
    gross_part,
    residual_part,
    share_left,
    step_part,
)

ROUNDING = "it changed by no more than rounding: the remainder is relative to what was added up"
SUSPECT = 1e-6
SUMMARY_ROUNDING = 2e-2
"""By how much summaries of 8 bits, from rows of 16 bits, may miss the gradient in their bases."""


@dataclass(frozen=True)
class BookAudit:
    """One line of an audit: how a parameter was kept, and how far its rows miss it.

    `rounding` is how much of the remainder the rounding of stored weights alone can be. A step
    rounds a weight at most twice (its decay, and the step), by half a unit in its last place each:
    so it is one such unit for each step, divided by what the remainder is divided by, and much
    where a parameter changed little for its size.

    `residual` is the share of the parameter's change that entries leave, where they are less than
    the rows: `‖residual‖ / ‖W_T − c0 W_0‖`. It is 0 where rows are kept as they are. Where rows are
    summarized, the remainder is how far summaries are from the gradients in their bases. `by_step`
    is the share that was booked by step, and `change` the size of the change itself.

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
    rounding: float = 0.0
    residual: float = 0.0
    by_step: float = 0.0
    change: float = 0.0

    @property
    def attributed(self) -> float:
        """The share of the change that is attributed to samples: what is neither of the two.

        >>> BookAudit("a", (1,), "row", 9, remainder=0.0, bytes=0, residual=0.25).attributed
        0.75
        """
        return max(0.0, 1.0 - self.residual - self.by_step)


@dataclass(frozen=True, repr=False)
class Audit(Displayed):
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
        measured = [book.remainder for book in self.books if not math.isnan(book.remainder)]
        return max(measured, default=float("nan") if self.books else 0.0)

    @property
    def beyond_rounding(self) -> list[BookAudit]:
        """Books whose remainder is more than 1e-6, and more than rounding of weights can be.

        >>> small = BookAudit("a", (1,), "row", 9, remainder=3e-6, bytes=0, rounding=1e-5)
        >>> lines = [small, replace(small, name="b", rounding=0.0)]
        >>> [book.name for book in Audit(lines, step=1, measured_at=1, bytes=0).beyond_rounding]
        ['b']
        """
        return [book for book in self.books if book.remainder > max(SUSPECT, book.rounding)]

    @property
    def coverage(self) -> float:
        """The share of trained parameter elements that is booked by row."""
        sizes = dict.fromkeys(("row", "step", "row, then step", "frozen"), 0)
        for book in self.books:
            sizes[book.granularity] += torch.Size(book.shape).numel()
        trained = sum(sizes.values()) - sizes["frozen"]
        return sizes["row"] / trained if trained else 1.0

    @property
    def attributed(self) -> float:
        """The share of the change of all parameters together that is attributed to samples.

        >>> line = BookAudit("a", (1,), "row", 9, remainder=0.0, bytes=0, residual=0.5, change=3.0)
        >>> lines = [line, replace(line, name="b", residual=0.0, change=4.0)]
        >>> Audit(lines, step=1, measured_at=1, bytes=0).attributed
        0.7
        """
        sizes = [(book.change * (1.0 - book.attributed), book.change) for book in self.books]
        return share_left(*zip(*sizes, strict=True)) if sizes else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "step": self.step,
            "measured_at": self.measured_at,
            "remainder": self.remainder,
            "coverage": self.coverage,
            "attributed": self.attributed,
            "verdict": self.verdict,
            "bytes": self.bytes,
            "books": [asdict(book) | {"attributed": book.attributed} for book in self.books],
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
        return (
            f"books at step {self.step:,}, not measured: no weights were kept up to there; "
            "recorder.checkpoint() keeps them"
        )

    @property
    def verdict(self) -> str:
        """Whether rounding of the weights can be all that is missing, where that is not little.

        >>> line = BookAudit("w", (1,), "row", 9, remainder=3e-3, bytes=0, rounding=1e-5)
        >>> Audit([line], step=1, measured_at=1, bytes=0).verdict
        'more than rounding of the stored weights can be: w'
        """
        if not self.remainder > SUSPECT:
            return ""
        names = [book.name for book in self.beyond_rounding]
        if not names:
            return "rounding of the stored weights can be all of it"
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"more than rounding of the stored weights can be: {', '.join(names[:3])}{more}"

    def __rich__(self) -> Group:
        lossy = any(book.residual for book in self.books)
        names = ["book", "shape", "kept by", "rows", *["residual"] * lossy, "remainder", "MB"]
        table = columns(names, words=("book", "kept by"))
        for book in self.books:
            kept = f"{book.granularity} ({book.reason})" if book.reason else book.granularity
            cells = [book.name, "×".join(map(str, book.shape)), kept, f"{book.rows:,}"]
            cells += [f"{book.residual:.1e}"] if lossy else []
            cells += [f"{book.remainder:.1e}", f"{book.bytes / 1e6:,.1f}"]
            table.add_row(*map(Text, cells))
        return framed(self._title, table, self._note)

    @property
    def _note(self) -> str:
        if not self.step:
            return "no step is committed up to here: there is nothing to add up"
        covered = math.floor(1000 * self.coverage + 1e-6) / 10  # 100 only where it is all
        return (
            f"largest remainder {self.remainder:.1e} · {covered:g}% of trained parameters by row "
            f"· {self.bytes / 1e6:,.1f} MB"
            + (f"\n{attributed_words(self.attributed)}" if self.attributed < 1 else "")
            + (f"\n{self.verdict}" if self.verdict else "")
        )


def make_audit(
    ledger: Ledger,
    until: int,
    device: torch.device | str = "cpu",
    engine: Engine | None = None,
) -> Audit:
    """Adds every book up and compares it with the weights that were kept."""
    measured = max(step for step in ledger.kept_steps if step <= until)
    accounting = Accounting(ledger, measured, device, (), engine)
    latest = Accounting(ledger, until)
    kept, lines = ledger.kept(measured), {}
    for book, balance in balances(accounting, ledger.info.books):
        found = _measure(accounting, book, kept.read(book.name).double(), balance)
        remainder = found.remainder if measured or not until else float("nan")
        line = _line(ledger, latest, book, until, remainder)
        line = replace(line, **found.shares._asdict())
        changed = found.small and measured and line.granularity != "frozen"
        lines[book.name] = replace(line, reason=ROUNDING) if changed else line
    in_order = [lines[book.name] for book in ledger.info.books]
    return Audit(in_order, until, measured, ledger.nbytes)


class _Shares(NamedTuple):
    """What is said of a book relative to its change, and the change."""

    rounding: float
    residual: float
    by_step: float
    change: float


class _Measured(NamedTuple):
    """A remainder, what is known beside it, and whether the change is no more than rounding."""

    remainder: float
    shares: _Shares
    small: bool


def _measure(accounting: Accounting, book: Book, weight: Tensor, balance: Balance) -> _Measured:
    """A book against the weight that was kept."""
    whole, initial = balance
    gap, scale, size = ((weight - part).norm() for part in (whole, initial, 0.0))
    numbers = accounting.rule.by_numbers
    if numbers and gap > SUSPECT * scale and _is_column(book):  # rows that cancel leave rounding
        size = torch.maximum(size, gross_part(accounting, book).norm())
    small = bool(scale <= _rounding(book, accounting.until) * size)
    relative_to = float((size if small else scale).clamp_min(1e-300))
    steps = int((accounting.states(book) == BY_ROW).sum())
    places = steps * float(_last_place(weight, book).norm())
    residual, by_step = (
        float(part(accounting, book).norm()) / relative_to for part in (residual_part, step_part)
    )
    if accounting.ledger.is_summarized(book):
        shares = _Shares(SUMMARY_ROUNDING, residual, by_step, relative_to)
        gap_of_sums = account_gap(accounting, book, cancel=small and _is_column(book))
        return _Measured(gap_of_sums, shares, small)
    shares = _Shares(places / relative_to, residual, by_step, relative_to)
    return _Measured(float(gap) / relative_to, shares, small)


def _is_column(book: Book) -> bool:
    return all(term.view == "flat" for term in book.terms.values())


def _last_place(weight: Tensor, book: Book) -> Tensor:
    """A unit in the last place of each element, as it is stored."""
    _, exponent = torch.frexp(weight)
    eps = torch.finfo(getattr(torch, book.dtype)).eps
    return torch.where(weight == 0, 0.0, torch.ldexp(torch.full_like(weight, eps / 2), exponent))


def _rounding(book: Book, steps: int) -> float:
    """How far rounding alone may carry a parameter in so many steps, relative to its size."""
    return 10 * math.sqrt(steps) * torch.finfo(getattr(torch, book.dtype)).eps


def _line(
    ledger: Ledger, accounting: Accounting, book: Book, until: int, remainder: float
) -> BookAudit:
    granularity = accounting.granularity(book)
    notes = [note["reason"] for note in ledger.notes if note["book"] == book.name]
    reason = (notes[0] if notes else book.reason) if "step" in granularity else ""
    rows = sum(count_rows(ledger, ledger.info.stream(name), until) for name in book.terms)
    return BookAudit(
        book.name, book.shape, granularity, rows, remainder, _bytes(ledger, book), reason
    )


def _bytes(ledger: Ledger, book: Book) -> int:
    """What the book takes on disk; rows that several books share are counted for one of them."""
    own = [ledger.info.stream(n) for n in book.terms if _payer(ledger, n) == book.name]
    arrays = {
        f"{stream.name}/{array}"
        for stream in own
        for shard in ShardRange.of(ledger, 1, ledger.last_step)
        if shard.holds(stream.name)
        for array in [*stored_arrays(shard.shard, stream), "places", "shared"]
    }
    by_step = (f"{book.name}/changes", f"{book.name}/residuals")
    return sum(ledger.array_bytes(name) for name in [*arrays, *by_step])


def _payer(ledger: Ledger, stream: str) -> str:
    """The book that a stream's bytes are counted for: a weight rather than its bias."""
    books = ledger.info.fed_by(stream)
    return max(books, key=lambda book: form_named(book.terms[stream].form).needs_keys).name
