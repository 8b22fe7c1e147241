"""Parameters from the ledger: as kept, as the rows add up to, and without some samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dualform.ledger import Book, Term
from dualform.ledger.format import BUFFER
from dualform.read.coefficients import Accounting, StepCoefficients
from dualform.read.scan import Chunk, Scan, row_sides, rows_total
from dualform.record.optimizers import apply


def initial_part(accounting: Accounting, book: Book) -> Tensor:
    """`c0 · W_0` (and the buffer training started with), in float64."""
    kept = accounting.ledger.weights(0)
    on_W, on_b = accounting.initial(book)
    part = apply(on_W, kept[book.name].double())
    if BUFFER + book.name in kept:
        part = part + apply(on_b, kept[BUFFER + book.name].double())
    return part.cpu()


def step_part(accounting: Accounting, book: Book) -> Tensor:
    """The sum of the changes that were booked by step, in float64."""
    total, counts = torch.zeros(book.shape, dtype=torch.float64), accounting.changes()
    for shard in accounting.ledger.shards:
        if f"{book.name}/changes" in shard.file:
            steps = shard.file.read(f"{book.name}/change_steps")
            for at in torch.nonzero(steps <= accounting.until).flatten().tolist():
                change = shard.file.read(f"{book.name}/changes", at, at + 1)[0].double()
                total += counts[int(steps[at])] * change
    return total


def row_parts(
    accounting: Accounting, books: Sequence[Book], samples: Tensor | None = None
) -> dict[str, Tensor]:
    """What the rows of each book add up to (of some samples only, if given), in float64."""
    return {book.name: _row_part(accounting, book, samples) for book in books}


def _row_part(accounting: Accounting, book: Book, samples: Tensor | None) -> Tensor:
    total = torch.zeros(book.shape, dtype=torch.float64, device=accounting.device)
    for chunk, term, coefficients in _chunks(accounting, book):
        total += _chunk_part(book, term, chunk, _chosen(chunk, samples), coefficients)
    return total.cpu()


def gross_part(accounting: Accounting, book: Book) -> Tensor:
    """The sum of the sizes of what each row adds to an offset or scale, whatever its sign."""
    total = torch.zeros(book.size, 1, dtype=torch.float64, device=accounting.device)
    for chunk, term, coefficients in _chunks(accounting, book):
        sides = row_sides(chunk, term)
        if isinstance(coefficients, Tensor) and sides.b is None:
            sizes = replace(sides, a=sides.a.abs())
            total += sizes.total(coefficients[chunk.steps].abs(), tuple(total.shape))
    return total.cpu()


def _chunks(accounting: Accounting, book: Book) -> Iterator[tuple[Chunk, Term, StepCoefficients]]:
    """All rows of a book, with the term they enter by and the coefficients of their steps."""
    ledger = accounting.ledger
    for span in accounting.spans([book]) if book.terms else ():
        for name, term in book.terms.items():
            stream = ledger.info.stream(name)
            for chunk in Scan(ledger, stream, span.last, accounting.device, span.first):
                yield chunk, term, span.coefficients[book.name]


def _chosen(chunk: Chunk, samples: Tensor | None) -> Tensor:
    """(rows,): 1 for the rows that count, 0 for the others, in float64."""
    if samples is None:
        return torch.ones(len(chunk.keys), dtype=torch.float64, device=chunk.keys.device)
    return torch.isin(chunk.samples, samples.to(chunk.samples.device)).double()


def _chunk_part(
    book: Book, term: Term, chunk: Chunk, chosen: Tensor, coefficients: StepCoefficients
) -> Tensor:
    sides = row_sides(chunk, term)
    if isinstance(coefficients, Tensor):
        return rows_total(book, term, sides, chosen * coefficients[chunk.steps])
    part = torch.zeros(book.shape, dtype=torch.float64, device=chunk.keys.device)
    for step, rows in chunk.by_step():
        if step in coefficients:
            gradient = rows_total(book, term, sides[rows], chosen[rows])
            part += apply(coefficients[step], gradient)
    return part


def reconstruct(accounting: Accounting) -> dict[str, Tensor]:
    """Every parameter as the books add up to it, in float64."""
    books = accounting.ledger.info.books
    rows = row_parts(accounting, books)
    return {
        book.name: rows[book.name] + initial_part(accounting, book) + step_part(accounting, book)
        for book in books
    }
