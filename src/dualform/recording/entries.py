"""Entries: what is kept of a step's rows, and the residual that they leave."""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dualform.layers import expand, positions
from dualform.ledger import Book, Codec, Records, Stream, Term
from dualform.ledger.codecs import Exact
from dualform.memory.blocks import from_matrix, matrix_shape
from dualform.memory.forms import form_named
from dualform.memory.shared import AnySides, SharedSides
from dualform.memory.summary import Matrices
from dualform.recording.accounts import Evidence, Feed
from dualform.recording.keep import AUTO, Summaries, codec_for
from dualform.recording.pages import StreamRows
from dualform.recording.plan import Plan

ACCOUNTED = 16
"""Of so many steps in a row that are handed over, one keeps the gradient in a book's bases."""


@dataclass
class Entries:
    """The rows of some steps as codecs keep them, and what that leaves of their sums."""

    plan: Plan
    first: int
    """The number of the first step."""
    arrays: dict[str, list[Tensor]] = field(default_factory=dict)
    """The arrays of a shard, in parts."""
    codecs: dict[str, Codec] = field(default_factory=dict)
    """How the rows of each stream are kept, by the stream's name."""
    residuals: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    """For each book and step, the sum of the rows less that of the entries, in float64."""

    accounts: dict[str, list[Tensor]] = field(default_factory=dict)
    """Gradients of books that are summarized, in their bases, at some steps that were probed."""

    def keep_accounts(self, account: Evidence, in_bases: Container[str]) -> None:
        """Keeps what was probed of books whose entries are `in_bases`, as it is."""
        for book, (look, columns) in account.looks.items():
            probed = torch.nonzero(account.active[:, columns.start]).flatten()
            turns = (probed + self.first) // ACCOUNTED
            probed = probed[turns.diff(prepend=turns.new_tensor([-1])) > 0]
            if book in in_bases and len(probed):
                assert look.vectors is not None
                u = account.u[probed][:, columns].float()
                shape = (len(probed), -1, look.vectors.shape[1])
                self.accounts[f"{book}/accounts"] = [u.reshape(shape)]
                self.accounts[f"{book}/account_steps"] = [probed + self.first]

    def add(self, account: Evidence) -> None:
        """Encodes the rows of an account."""
        for feed in account.feeds:
            if feed.pieces:
                recorded = _of_one_dtype(feed.pieces)
                numbers = feed.opened.numbers
                asked = [self.plan.keep[book] for book in feed.terms]
                kind = codec_for([numbers] if numbers else asked)
                free = all(isinstance(policy, Summaries) or policy == AUTO for policy in asked)
                if free and not any(feed.stream.bases):
                    kind = self._cheaper(kind, feed, recorded)
                self.codecs[feed.stream.name] = kind.for_records(recorded[0])
                for rows, records in zip(feed.pieces, recorded, strict=True):
                    self._encode(feed, rows, records)

    def _cheaper(self, kind: type[Codec], feed: Feed, recorded: Sequence[Records]) -> type[Codec]:
        """Records that are not in bases are rounded if that saves more than residuals take."""
        rounded, exact = kind.for_records(recorded[0]), Exact.for_records(recorded[0])
        widths = [math.prod(side.shape[1:]) for side in recorded[0]]
        saved = exact.bytes_per_row(*widths) - rounded.bytes_per_row(*widths)
        steps = len({step for rows in feed.pieces for step in rows.at.tolist()})
        spent = steps * sum(4 * self.plan.book(book).size for book in feed.terms)
        return kind if saved * sum(len(records.keys) for records in recorded) > spent else Exact

    def residual_arrays(self) -> dict[str, list[Tensor]]:
        """The residuals as arrays of a shard."""
        arrays: dict[str, list[Tensor]] = {}
        for name, found in self.residuals.items():
            arrays |= residual_arrays(self.plan.book(name), found)
        return arrays

    def _encode(self, feed: Feed, rows: StreamRows, records: Records) -> None:
        name, codec = feed.stream.name, self.codecs[feed.stream.name]
        encoded = codec.encode(records)
        for array, part in encoded.items():
            self.arrays.setdefault(f"{name}/{array}", []).append(part)
        segments = rows.segments + torch.tensor([self.first, 0, 0])
        self.arrays.setdefault(f"{name}/segments", []).append(segments)
        if rows.shared is not None:
            self.arrays.setdefault(f"{name}/shared", []).append(rows.shared)
        if not codec.leaves_residual or any(feed.stream.bases):  # which leave more than rounding
            return
        decoded = codec.decode(encoded, 0, len(records.keys))
        books = {book: self.plan.book(book) for book in feed.terms}
        for book, at, residual in residuals(books, feed.stream, feed.terms, rows, records, decoded):
            found, step = self.residuals.setdefault(book, {}), self.first + at
            found[step] = found[step] + residual if step in found else residual


def residuals(
    books: Mapping[str, Book],
    stream: Stream,
    terms: Mapping[str, Term],
    rows: StreamRows,
    recorded: Records,
    decoded: Records,
) -> Iterator[tuple[str, int, Tensor]]:
    """For each step of some rows and each book: the sum of the rows less that of the entries.

    `recorded` and `decoded` are the records of `rows`, before and after a codec.
    """
    steps = rows.at.to(rows.keys.device)
    for at in sorted(set(rows.at.tolist())):
        own = steps == at
        for book, term in terms.items():
            residual = _total(books[book], stream, term, recorded, own, rows)
            residual -= _total(books[book], stream, term, decoded, own, rows)
            yield book, at, residual


def residual_arrays(book: Book, found: Mapping[int, Tensor]) -> dict[str, list[Tensor]]:
    """Residuals by step as arrays of a shard, in the type of the book but at least 32 bits."""
    dtype = torch.promote_types(getattr(torch, book.dtype), torch.float32)
    return {
        f"{book.name}/residuals": [found[step].to(dtype)[None] for step in sorted(found)],
        f"{book.name}/residual_steps": [torch.tensor(sorted(found))],
    }


def _of_one_dtype(pieces: Sequence[StreamRows]) -> list[Records]:
    """Parts of one array share a dtype; autocast may have been switched between them."""
    keys, values = (
        functools.reduce(torch.promote_types, [getattr(rows, side).dtype for rows in pieces])
        for side in ("keys", "values")
    )
    return [Records(rows.keys.to(keys), rows.values.to(values)) for rows in pieces]


def _total(
    book: Book, stream: Stream, term: Term, records: Records, own: Tensor, rows: StreamRows
) -> Tensor:
    """What some records add up to, in the shape of a book, in float64; `rows` are all of them."""
    keys, values = expand(stream, records.keys[own], records.values[own].double())
    assert values is not None
    ones = torch.ones(len(values), dtype=torch.float64, device=values.device)
    shape = matrix_shape(book.shape, term.view, term.groups)
    form = form_named(term.form)
    if stream.bases and form.has_sides and not math.prod(stream.keys):  # a matrix for each sample
        whole = Matrices(values.reshape(len(values), *stream.values)).total(ones, shape)
        return from_matrix(whole, book.shape, term.view, term.groups)
    keys = keys.double() if keys.is_floating_point() else keys.long()
    plain = form.rows(keys, values, term.groups, term.at)
    sides: AnySides = plain
    if rows.shared is not None:
        uses = torch.arange(len(rows.counts)).repeat_interleave(rows.counts).to(own.device)[own]
        matrices = rows.shared.double().reshape(-1, *stream.shared)
        sides = SharedSides(plain, matrices, uses.repeat_interleave(positions(stream)))
    return from_matrix(sides.total(ones, shape), book.shape, term.view, term.groups)
