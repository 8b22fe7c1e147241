"""Gradients as a 16-bit kernel left them: the sums of rows, rounded where it rounded them.

Under autocast a matrix product takes 16-bit copies of its parameters. Their gradient is summed in
32 bits, rounded to 16, and widened, once for each use in a backward pass. An optimizer that follows
signs does not forgive a sum that is rounded to or across zero; it is replayed from what it saw.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor

from dualform.ledger import Book, Ledger, Term
from dualform.memory.blocks import matrix_shape
from dualform.memory.forms import Form, form_named
from dualform.memory.shared import AnySides
from dualform.read.scan import Scan, row_sides, rows_total, with_residuals

NARROW = (torch.bfloat16, torch.float16)
Use: TypeAlias = tuple[tuple[int, int], Tensor, bool]
"""Step and batch, what its rows add up to, and whether they reach all of the parameter."""


def kernel_dtype(ledger: Ledger, book: Book, stream: str) -> torch.dtype | None:
    """What the kernel rounded the book's gradient to, from rows of a stream; None if to nothing.

    Matrix products and the offsets beside them are cast; tables and normalizations are not.
    """
    shards = [shard for shard in ledger.shards if f"{stream}/segments" in shard.file]
    found = {shard.codec(stream).recorded[1] for shard in shards}
    cast = any(_form(b, stream).is_product for b in ledger.info.fed_by(stream))
    own = _form(book, stream).is_cast
    narrow = len(found) == 1 and found.issubset(NARROW) and book.dtype == "float32"
    return next(iter(found)) if cast and own and narrow else None


def _form(book: Book, stream: str) -> Form:
    return form_named(book.terms[stream].form)


def is_rounded(ledger: Ledger, book: Book) -> bool:
    """Whether some of the book's gradients come from a kernel that rounds them."""
    return any(kernel_dtype(ledger, book, stream) is not None for stream in book.terms)


def seen_gradients(
    ledger: Ledger, book: Book, first: int, last: int, device: torch.device | str = "cpu"
) -> dict[int, Tensor]:
    """The gradient of each step of a span as the kernels rounded it, by its number, in float64.

    >>> from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run()
    >>> sorted(seen_gradients(Ledger(run.path), run.info.books[0], 2, 4))
    [2, 3, 4]
    """
    found: dict[int, Tensor] = {}
    for name, term in book.terms.items():
        narrow = kernel_dtype(ledger, book, name)
        scan = Scan(ledger, ledger.info.stream(name), last, device, first)
        for (step, _), uses in groupby(_uses(scan, book, term), key=lambda use: use[0]):
            total = _total([(gradient, whole) for _, gradient, whole in uses], narrow)
            found[step] = found[step].add_(total) if step in found else total
    return with_residuals(ledger, book, first, last, found)


def _total(uses: list[tuple[Tensor, bool]], narrow: torch.dtype | None) -> Tensor:
    """A backward pass: uses of a whole parameter share its copy, and are added up in 16 bits."""
    total = _rounded(uses[0][0], narrow)
    for gradient, whole in uses[1:]:
        total = _rounded(total + _rounded(gradient, narrow), narrow if whole else None)
    return total


def _rounded(gradient: Tensor, narrow: torch.dtype | None) -> Tensor:
    return gradient if narrow is None else gradient.to(narrow).double()


def _uses(scan: Scan, book: Book, term: Term) -> Iterator[Use]:
    """What the rows of each use add up to, in the order of the backward passes."""
    shape = matrix_shape(book.shape, term.view, term.groups)
    last: Use | None = None
    before: object = None
    for chunk in scan:
        sides = row_sides(chunk, term)
        for number, key, rows in chunk.by_use():
            ones = torch.ones(rows.stop - rows.start, dtype=torch.float64, device=sides.a.device)
            gradient = rows_total(book, term, sides[rows], ones)
            if last is not None and before == (id(chunk.columns), number):
                last = (key, last[1] + gradient, last[2])  # a use that two chunks share
                continue
            if last is not None:
                yield last
            last, before = (key, gradient, _reaches(sides, shape)), (id(chunk.columns), number)
    if last is not None:
        yield last


def _reaches(sides: AnySides, shape: tuple[int, int]) -> bool:
    """Whether blocks of rows cover a whole matrix."""
    width = 1 if sides.b is None else sides.b.shape[-1]
    return (sides.a.shape[-1], width) == shape
