"""Rows of a shard by a smaller codec, and the residual that they then leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from dualform.ledger import Book, Codec, Declaration, Ledger, Records, Shard, Stream
from dualform.ledger.codecs import CODECS
from dualform.ledger.reader import values_by_step
from dualform.read.engine import ShardRange
from dualform.read.row_columns import RowColumns, check_arrays, stored_arrays, widths
from dualform.read.scan import StoredRecords
from dualform.recording.accounts import accounts_of
from dualform.recording.entries import residual_arrays, residuals
from dualform.recording.keep import Policy, codec_for
from dualform.recording.pages import StreamRows


def has_rows(shard: Shard, stream: Stream) -> bool:
    """Whether a shard has rows of a stream."""
    return f"{stream.name}/segments" in shard.file


def segments_of(shard: Shard, stream: Stream) -> tuple[Tensor, Tensor]:
    """(segments, 3) step, batch and records a sample; (segments,) how many samples each has."""
    table, segments = shard.file.read_all(("batches", f"{stream.name}/segments")).values()
    sizes = dict(table.tolist())
    samples = torch.tensor([sizes[batch] for batch in segments[:, 1].tolist()])
    counts = samples * segments[:, 2]
    check_arrays(shard, stream, int(counts.sum()), len(counts))
    return segments, samples


def read_arrays(shard: Shard, stream: Stream) -> dict[str, Tensor]:
    """The arrays of all records of a stream in a shard, as its codec made them.

    They are in memory of their own: what is computed of mapped rows may differ in its last digit.
    """
    columns = RowColumns(ShardRange(shard, shard.first, shard.last), stream)
    mapped = StoredRecords(shard, stream, columns).read(0, len(columns.steps))
    return {name: array.clone() for name, array in mapped.items()}


def stored_bytes(shard: Shard, stream: Stream, codec: Codec) -> int:
    """What the records of a stream in a shard take by a codec, which keeps as many keys."""
    values = shard.file.rows(f"{stream.name}/{codec.value_arrays[0]}")
    keys = shard.file.rows(f"{stream.name}/{codec.key_arrays[0]}")
    return sum(
        column.width * column.dtype.itemsize * (keys if name in codec.key_arrays else values)
        for name, column in codec.arrays(*widths(stream)).items()
    )


def read_rows(shard: Shard, stream: Stream) -> StreamRows:
    """The records of a stream in a shard, decoded, in the types in which they were recorded.

    Their segments have the numbers of steps.
    """
    segments, samples = segments_of(shard, stream)
    codec, counts = shard.codec(stream.name), samples * segments[:, 2]
    decoded = codec.decode(read_arrays(shard, stream), 0, int(counts.sum()))
    keys, values = (t.to(dtype) for t, dtype in zip(decoded, codec.recorded, strict=True))
    shared = shard.file.read(f"{stream.name}/shared") if stream.shared else None
    return StreamRows(keys, values, segments, counts, shared)


@cache
def smaller(codec: Codec, policy: type[Codec], keys: int, values: int) -> Codec:
    """A codec of a policy for rows that are kept by another one; itself where nothing is saved.

    >>> from dualform.ledger.codecs import Exact, Int8
    >>> smaller(Exact(), Int8, 30, 20).name, smaller(Int8(), Exact, 30, 20).name
    ('int8', 'int8')
    """
    order = list(CODECS)
    of_keys, of_values = (torch.empty(0, 0, dtype=dtype) for dtype in codec.recorded)
    new = policy.for_records(Records(of_keys, of_values))
    less = new.bytes_per_row(keys, values) < codec.bytes_per_row(keys, values)
    return new if less and order.index(new.name) > order.index(codec.name) else codec


@dataclass(frozen=True)
class Rounding:
    """Which streams are kept by a smaller codec, and what that saves."""

    ledger: Ledger
    policies: Mapping[str, type[Codec]]
    """By the stream's name; streams that are not named stay as they are."""
    saved: int = 0
    """Bytes, less those of the residuals."""
    _books: dict[str, Book] = field(default_factory=dict)

    @classmethod
    def plan(
        cls, ledger: Ledger, streams: Sequence[Stream], keep: Mapping[str, Policy]
    ) -> Rounding:
        """The streams for which it pays: those of books whose residuals take less than is saved."""
        info, saved = ledger.info, 0
        chosen: dict[str, type[Codec]] = {}
        declared = [Declaration(stream, info.terms_of(stream.name)) for stream in streams]
        declared = [one for one in declared if one.terms]
        for books, members in accounts_of(declared):
            policies = {
                declared[at].stream.name: codec_for(keep[book] for book in declared[at].terms)
                for at in members
            }
            trial = cls(ledger, policies)
            gain = sum(trial._gain(shard, sorted(books)) for shard in ledger.shards)
            if gain > 0:
                chosen |= policies
                saved += gain
        return cls(ledger, chosen, saved, {book.name: book for book in info.books})

    def codec(self, shard: Shard, stream: Stream) -> Codec:
        """How a stream's rows are kept in place of a shard's codec."""
        return self.of(shard.codec(stream.name), stream)

    def of(self, codec: Codec, stream: Stream) -> Codec:
        """How a stream's rows are kept in place of a codec."""
        if stream.name not in self.policies:
            return codec
        return smaller(codec, self.policies[stream.name], *widths(stream))

    def apply(self, shard: Shard, arrays: dict[str, list[Tensor]]) -> None:
        """Replaces the rows, and the residuals, among the arrays of a shard."""
        found: dict[str, dict[int, Tensor]] = {}
        for stream in self._changed(shard):
            rows, codec = read_rows(shard, stream), self.codec(shard, stream)
            recorded = Records(rows.keys, rows.values)
            encoded = codec.encode(recorded)
            for name in stored_arrays(shard, stream):
                del arrays[f"{stream.name}/{name}"]
            arrays |= {f"{stream.name}/{name}": [part] for name, part in encoded.items()}
            if codec.leaves_residual:
                terms = self.ledger.info.terms_of(stream.name)
                decoded = codec.decode(encoded, 0, len(rows.keys))
                left = residuals(self._books, stream, terms, rows, recorded, decoded)
                for book, step, residual in left:
                    own = found.setdefault(book, self._residuals(shard, self._books[book]))
                    own[step] = own.get(step, 0) + residual
        for name, own in found.items():
            arrays |= residual_arrays(self._books[name], own)

    def _changed(self, shard: Shard) -> list[Stream]:
        """The streams whose rows in a shard are kept otherwise."""
        named = [self.ledger.info.stream(name) for name in self.policies]
        held = [stream for stream in named if has_rows(shard, stream)]
        return [s for s in held if self.codec(shard, s) != shard.codec(s.name)]

    def _residuals(self, shard: Shard, book: Book) -> dict[int, Tensor]:
        """What the rows of a shard have left so far, by step."""
        found = values_by_step(shard, book, "residual", shard.first, shard.last)
        return {step: residual.double() for step, residual in found}

    def _gain(self, shard: Shard, books: Sequence[str]) -> int:
        """How many bytes a shard becomes smaller by."""
        saved, new_steps = 0, dict[str, set[int]]()
        for stream in self._changed(shard):
            old, new = shard.codec(stream.name), self.codec(shard, stream)
            segments, _ = segments_of(shard, stream)
            saved += stored_bytes(shard, stream, old) - stored_bytes(shard, stream, new)
            for name in self.ledger.info.terms_of(stream.name) if new.leaves_residual else ():
                new_steps.setdefault(name, set()).update(segments[:, 0].tolist())
        for book in self.ledger.info.books:
            if book.name in books and book.name in new_steps:
                dtype = torch.promote_types(getattr(torch, book.dtype), torch.float32)
                held = shard.file.rows(f"{book.name}/residuals")
                added = max(0, len(new_steps[book.name]) - held)
                saved -= added * (book.size * dtype.itemsize + 8)
        return saved
