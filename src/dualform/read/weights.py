"""Parameters from the ledger: as kept, as the rows add up to, and without some samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dualform.ledger import Book, Ledger
from dualform.ledger.format import BUFFER
from dualform.read.coefficients import Accounting
from dualform.read.scan import Scan


def initial_part(ledger: Ledger, accounting: Accounting, book: Book) -> Tensor:
    """`c0 · W_0` (and the momentum training started with), in float64."""
    initial, coefficients = ledger.weights(0), accounting.of(book)
    part = coefficients.initial * initial[book.name].double()
    if BUFFER + book.name in initial:
        part = part + coefficients.buffer * initial[BUFFER + book.name].double()
    return part


def step_part(ledger: Ledger, accounting: Accounting, book: Book, until: int) -> Tensor:
    """The sum of the changes that were booked by step, in float64."""
    total = torch.zeros(book.shape, dtype=torch.float64)
    coefficients = torch.from_numpy(accounting.of_changes(book))
    for shard in ledger.shards:
        if f"{book.name}/changes" in shard.file:
            steps = shard.file.read(f"{book.name}/change_steps")
            for at in torch.nonzero(steps <= until).flatten().tolist():
                change = shard.file.read(f"{book.name}/changes", at, at + 1)[0]
                total += coefficients[steps[at]] * change.double()
    return total


def row_parts(
    ledger: Ledger,
    accounting: Accounting,
    books: Sequence[Book],
    until: int,
    samples: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """`Σ a e xᵀ` over the rows of each book (of some samples only, if given), in float64."""
    parts = {book.name: torch.zeros(book.shape, dtype=torch.float64) for book in books}
    coefficients = {book.name: torch.from_numpy(accounting.of_rows(book)) for book in books}
    for stream in ledger.info.streams:
        fed = [book for book in books if stream.name in book.terms]
        if not fed:
            continue
        for chunk in Scan(ledger, stream.name, until, device):
            keys, values, steps = chunk.keys, chunk.values, chunk.steps
            if samples is not None:
                chosen = torch.isin(chunk.samples, samples.to(chunk.samples.device))
                keys, values, steps = keys[chosen], values[chosen], steps[chosen]
            for book in fed:
                factors = coefficients[book.name].to(steps.device)[steps]
                scaled = values.double() * factors[:, None]
                outer = book.terms[stream.name] == "outer"
                part = scaled.T @ keys.double() if outer else scaled.sum(0)
                parts[book.name] += part.cpu()
    return parts


def reconstruct(
    ledger: Ledger, accounting: Accounting, until: int, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Every parameter as the books add up to it after step `until`, in float64."""
    books = ledger.info.books
    rows = row_parts(ledger, accounting, books, until, device=device)
    return {
        book.name: initial_part(ledger, accounting, book)
        + step_part(ledger, accounting, book, until)
        + rows[book.name]
        for book in books
    }
