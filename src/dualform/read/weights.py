"""Parameters from the ledger: as kept, as the rows add up to, and without some samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dualform.ledger import Book, Term
from dualform.ledger.format import BUFFER
from dualform.memory.blocks import Sides
from dualform.optimizers import apply
from dualform.read.coefficients import Accounting
from dualform.read.forward import Forward
from dualform.read.replay import chosen
from dualform.read.scan import Chunk, Scan, row_sides, rows_total


def initial_part(accounting: Accounting, book: Book) -> Tensor:
    """`c0 · W_0` (and the buffer training started with), in float64."""
    kept = accounting.ledger.kept(0)
    on_W, on_b = accounting.initial(book)
    part = apply(on_W, kept.read(book.name).double())
    if BUFFER + book.name in kept:
        part = part + apply(on_b, kept.read(BUFFER + book.name).double())
    return part.cpu()


def step_part(accounting: Accounting, book: Book) -> Tensor:
    """The sum of the changes that were booked by step, in float64."""
    total, counts = torch.zeros(book.shape, dtype=torch.float64), accounting.changes()
    for step, change in accounting.ledger.changes(book, 1, accounting.until):
        total += counts[step] * change.double()
    return total


def residual_part(accounting: Accounting, book: Book) -> Tensor:
    """What entries that are less than the rows leave of a parameter, in float64."""
    total = torch.zeros(book.shape, dtype=torch.float64, device=accounting.device)
    if accounting.ledger.has_residual(book):
        for span in accounting.spans([book]):
            operators = span.coefficients[book.name].operators
            for step, residual in accounting.ledger.residuals(book, span.first, span.last):
                if step in operators:
                    total += apply(operators[step], residual.to(total))
    return total.cpu()


def sampleless_part(accounting: Accounting, book: Book) -> Tensor:
    """What is booked by step and belongs to no sample: observed changes and residuals."""
    return step_part(accounting, book) + residual_part(accounting, book)


def row_parts(accounting: Accounting, books: Sequence[Book], samples: Tensor) -> dict[str, Tensor]:
    """What the rows of some samples add up to in each book, in float64."""
    if accounting.rule.by_numbers:
        return {book.name: _row_part(accounting, book, samples) for book in books}
    return {book.name: Forward(accounting, book, samples).sums()[2] for book in books}


def _row_part(accounting: Accounting, book: Book, samples: Tensor | None) -> Tensor:
    total = torch.zeros(book.shape, dtype=torch.float64, device=accounting.device)
    for chunk, term, numbers in _chunks(accounting, book):
        counts = chosen(chunk, samples) * numbers[chunk.steps]
        total += rows_total(book, term, row_sides(chunk, term), counts)
    return total.cpu()


def gross_part(accounting: Accounting, book: Book) -> Tensor:
    """The sum of the sizes of what each row adds to an offset or scale, whatever its sign."""
    total = torch.zeros(book.size, 1, dtype=torch.float64, device=accounting.device)
    for chunk, term, numbers in _chunks(accounting, book):
        sides = row_sides(chunk, term)
        if isinstance(sides, Sides) and sides.b is None:
            sizes = replace(sides, a=sides.a.abs())
            total += sizes.total(numbers[chunk.steps].abs(), tuple(total.shape))
    return total.cpu()


def _chunks(accounting: Accounting, book: Book) -> Iterator[tuple[Chunk, Term, Tensor]]:
    """All rows of a book under a rule of numbers, with their term and the steps' coefficients."""
    ledger = accounting.ledger
    if book.terms:
        numbers = accounting.numbers(book)
    for name, term in book.terms.items():
        for chunk in Scan(ledger, ledger.info.stream(name), accounting.until, accounting.device):
            yield chunk, term, numbers


def balance(accounting: Accounting, book: Book) -> tuple[Tensor, Tensor]:
    """A parameter as its book adds up to it, and its first value's part of that, in float64."""
    if accounting.rule.by_numbers:
        initial = initial_part(accounting, book)
        whole = _row_part(accounting, book, None) + residual_part(accounting, book) + initial
    else:
        whole, initial, _ = Forward(accounting, book).sums()
    return whole + step_part(accounting, book), initial


def reconstruct(accounting: Accounting) -> dict[str, Tensor]:
    """Every parameter as the books add up to it, in float64."""
    return {book.name: balance(accounting, book)[0] for book in accounting.ledger.info.books}
