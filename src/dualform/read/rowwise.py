"""Whole parameters asked row by row: `⟨D, H (a ⊗ b)⟩` for every row, and no row put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dualform.ledger import Book
from dualform.memory.blocks import Bilinear, as_matrix
from dualform.read.contributions import Source, answers
from dualform.read.grouped import Grouping
from dualform.read.scan import Scan
from dualform.read.scores import Array


def row_sums(
    source: Source,
    directions: Mapping[str, Tensor],
    grouping: Grouping,
    books: Sequence[Book] | None = None,
) -> dict[str, Array]:
    """(groups, queries) for each book: what the rows of each group answer to directions.

    >>> from dualform.testing import tiny_run
    >>> run, model, x = tiny_run()
    >>> source, grouping = run.spotlight(model, x[:1])["2"].source, Grouping.by_step(run.steps)
    >>> directions = {name: weight[None] for name, weight in run.state_dict().items()}
    >>> row_sums(source, directions, grouping)["2.bias"].shape
    (7, 1)
    """
    chosen = [book for book in (books or source.ledger.info.books) if book.terms]
    sums = {book.name: _zeros(grouping, directions[book.name], source.device) for book in chosen}
    for span in source.accounting.spans(chosen):
        for stream in source.ledger.info.streams:
            fed = [book for book in chosen if stream.name in book.terms]
            asked = {book.name: _question(book, stream.name, directions) for book in fed}
            scan = Scan(source.ledger, stream, span.last, source.device, span.first)
            for chunk in scan if fed else ():
                groups = grouping.of_chunk(chunk)
                for book in fed:
                    found = answers(chunk, book, span, asked[book.name])
                    sums[book.name].index_add_(0, groups, found.double())
    return {name: part.cpu().numpy() for name, part in sums.items()}


def _zeros(grouping: Grouping, directions: Tensor, device: torch.device | str) -> Tensor:
    return torch.zeros(grouping.count, len(directions), dtype=torch.float64, device=device)


def _question(book: Book, stream: str, directions: Mapping[str, Tensor]) -> Bilinear:
    """The directions as a stream sees the parameter."""
    term = book.terms[stream]
    seen = [as_matrix(d, term.view, term.groups) for d in directions[book.name].cpu()]
    return Bilinear(torch.stack(seen))
