"""Whole parameters asked row by row: `⟨D, H (a ⊗ b)⟩` for every row, and no row put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from dualform.ledger import Book
from dualform.memory.blocks import Bilinear, as_matrix
from dualform.read.coefficients import Accounting, Span, StepNumbers
from dualform.read.contributions import row_answers
from dualform.read.grouped import Grouping
from dualform.read.scores import Array


def row_sums(
    accounting: Accounting,
    directions: Mapping[str, Tensor],
    grouping: Grouping,
    books: Sequence[Book] | None = None,
    numbers: Mapping[str, Tensor] | None = None,
) -> dict[str, Array]:
    """(groups, queries) for each book: what the rows of each group answer to directions.

    >>> from dualform.testing import tiny_run
    >>> run, model, x = tiny_run()
    >>> accounting, grouping = run.source.accounting, Grouping.by_step(run.steps)
    >>> directions = {name: weight[None] for name, weight in run.state_dict().items()}
    >>> row_sums(accounting, directions, grouping)["2.bias"].shape
    (7, 1)

    Args:
        numbers: (steps + 1,) for each book, how much a row counts by its step; by default, as the
            optimizer made it count.
    """
    chosen = [book for book in (books or accounting.ledger.info.books) if book.terms]
    sums = {b.name: _zeros(grouping, directions[b.name], accounting.device) for b in chosen}
    spans = None if numbers is None else [_of_numbers(accounting.until, numbers)]
    for chunk, found in row_answers(accounting, chosen, partial(_question, directions), spans):
        groups = grouping.of_chunk(chunk)
        for name, part in found.items():
            sums[name].index_add_(0, groups, part.double())
    return {name: part.cpu().numpy() for name, part in sums.items()}


def _of_numbers(until: int, numbers: Mapping[str, Tensor]) -> Span:
    return Span(1, until, {name: StepNumbers(given) for name, given in numbers.items()})


def _zeros(grouping: Grouping, directions: Tensor, device: torch.device | str) -> Tensor:
    return torch.zeros(grouping.count, len(directions), dtype=torch.float64, device=device)


def _question(directions: Mapping[str, Tensor], book: Book, stream: str) -> Bilinear:
    """The directions as a stream sees the parameter."""
    term = book.terms[stream]
    seen = [as_matrix(d, term.view, term.groups) for d in directions[book.name].cpu()]
    return Bilinear(torch.stack(seen))
