"""Rows of a shard as summaries: what a recorder with `keep="summaries"` would have stored.

The bases come from the run's own first rows, before anything is written. So unlike a recorder,
which must wait for them, a compaction summarizes the rows of all steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import torch
from torch import Tensor

from dualform.compaction.divisors import replayed_divisors
from dualform.compaction.rounding import has_rows, read_rows, segments_of, stored_bytes
from dualform.layers import Site, positions, sample_major
from dualform.ledger import Codec, Declaration, Ledger, Records, Shard, Stream
from dualform.memory.blocks import as_matrix
from dualform.memory.forms import form_named
from dualform.read.coefficients import Accounting
from dualform.read.row_columns import stored_arrays, widths
from dualform.read.step_gradients import step_gradients
from dualform.recording.bases import MOST_ROWS, BookBases, rows_wanted
from dualform.recording.keep import ROWS, Policy, codec_for
from dualform.recording.observer import is_due
from dualform.recording.pages import StreamRows
from dualform.recording.reduction import Reducer, reducer_for
from dualform.recording.repeated import Reduced


@dataclass
class Summarizing:
    """Which streams become summaries, and in which bases."""

    ledger: Ledger
    reducers: dict[str, Reducer] = field(default_factory=dict)
    """By the stream's name."""
    divisors: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    """Of each book that is summarized, by step, where its optimizer divides."""
    accounts: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    """Of each book that is summarized, the gradients of some steps in its bases."""
    saved: int = 0
    """Bytes, as far as the first rows of each stream tell."""
    _names: dict[tuple[object, ...], str] = field(default_factory=dict)
    """What a stream of summaries is called, by what its records are."""

    @classmethod
    def plan(cls, ledger: Ledger, keep: Mapping[str, Policy]) -> Summarizing:
        """The streams for which it pays."""
        info = ledger.info
        tables = {
            book.name
            for book in info.books
            if not all(form_named(term.form).has_sides for term in book.terms.values())
        }
        bases = BookBases(renews=False, tables=tables)
        shapes = {book.name: book.shape for book in info.books}
        found = cls(ledger)
        for stream in info.layers:
            terms = info.terms_of(stream.name)
            done = any(ledger.is_summarized(book) for book in info.fed_by(stream.name))
            site = Site(stream.name, terms, len(stream.keys), len(stream.values), stream.layout)
            reducer = None if done else reducer_for(site, stream, keep, shapes, bases)
            if reducer is not None and terms:
                gain = found._gain(stream, reducer)
                if gain > 0:
                    found.reducers[stream.name] = reducer
                    found.saved += gain
        found._find_divisors(bases)
        found._find_accounts(bases)
        return found

    def apply(
        self, shard: Shard, arrays: dict[str, list[Tensor]], declared: set[str]
    ) -> list[Declaration]:
        """Replaces rows among the arrays of a shard; returns the streams that are not declared yet.

        Their bases come with them.
        """
        new: dict[str, Declaration] = {}
        for reducer in self.reducers.values():
            if has_rows(shard, reducer.stream):
                for parts, segments in self._reduced(shard, reducer, arrays):
                    one = self._put(reducer, parts, segments, arrays)
                    if any(one.stream.bases):  # what entries miss is then known as a whole
                        arrays.pop(f"{parts[0].book}/residuals", None)
                        arrays.pop(f"{parts[0].book}/residual_steps", None)
                    if one.stream.name not in declared:
                        new[one.stream.name] = one
                        arrays |= _bases(one.stream.name, parts[0])
        if shard.rank == 0:
            self._put_by_step(shard, arrays)
        declared.update(new)
        return list(new.values())

    def _gain(self, stream: Stream, reducer: Reducer) -> int:
        """Looks at the first rows until there are bases; how many bytes a stream then saves."""
        wanted = 2 * rows_wanted(reducer.policy)
        stored, parts, first, seen, waits = 0, None, None, 0, True
        for shard in self.ledger.shards:
            if not has_rows(shard, stream):
                continue
            codec = shard.codec(stream.name)
            width = codec.bytes_per_row(*widths(stream))
            stored += stored_bytes(shard, stream, codec)
            for rows, order in _uses(shard, stream) if waits else ():
                first = first or (rows, order, width * len(rows.keys))
                parts = self._reduce(reducer, rows, order)
                reducer.bases.begin_step()
                seen += min(MOST_ROWS, len(rows.keys) * positions(stream))
                waits = seen < wanted and (parts is None or reducer.awaits_bases())
                if not waits:
                    break
        if first is None:
            return 0
        parts = self._reduce(reducer, *first[:2])
        if parts is None:
            return 0
        encoded = [array for part in parts for array in _encode(part).values()]
        return int(stored * (1 - sum(array.nbytes for array in encoded) / first[2]))

    def _find_divisors(self, bases: BookBases) -> None:
        accounting = Accounting(self.ledger, self.ledger.last_step)
        if accounting.rule.by_numbers:
            return
        fed = {book for reducer in self.reducers.values() for book in reducer.site.terms}
        for book in self.ledger.info.books:
            if book.name in bases.found and book.name in fed:
                self.divisors[book.name] = replayed_divisors(accounting, book)

    def _find_accounts(self, bases: BookBases) -> None:
        """What audits hold the summaries against; of books all of whose rows become summaries."""
        accounting = Accounting(self.ledger, self.ledger.last_step)
        for book in self.ledger.info.books:
            own = bases.found.get(book.name)
            if own is None:
                continue
            term = next(iter(book.terms.values()))
            if own.outputs is None and not form_named(term.form).has_sides:
                continue  # of a table, only some places are looked at
            if not self.reducers.keys() >= book.terms.keys():
                continue
            factors = accounting.factors(book)
            for step in filter(is_due, range(1, self.ledger.last_step + 1)):
                found = step_gradients(accounting.reader, book, step, step).get(step)
                if found is not None:
                    gradient = as_matrix(found * float(factors[step - 1]), term.view, term.groups)
                    kept = self.accounts.setdefault(book.name, {})
                    kept[step] = own.project(gradient).float()

    def _reduce(
        self, reducer: Reducer, rows: StreamRows, order: tuple[int, int]
    ) -> list[Reduced] | None:
        keys = rows.keys.reshape(-1, *reducer.stream.keys)
        values = rows.values.reshape(-1, *reducer.stream.values)
        return reducer.reduce(keys, values, order, is_new=False) if len(values) else None

    def _reduced(
        self, shard: Shard, reducer: Reducer, arrays: dict[str, list[Tensor]]
    ) -> Iterator[tuple[list[Reduced], list[Tensor]]]:
        """What becomes of a stream's rows, by the kind of record; those that stay remain."""
        stream = reducer.stream
        parts: dict[tuple[object, ...], tuple[list[Reduced], list[Tensor]]] = {}
        stay: list[bool] = []
        for rows, order in _uses(shard, stream):
            found = self._reduce(reducer, rows, order)
            stay.append(found is None)
            for part in found or ():
                segment = rows.segments.clone()
                segment[:, 2] = len(_records(part).values) // order[0]
                alike, segments = parts.setdefault(_kind(part), ([], []))
                alike.append(part)
                segments.append(segment)
        _keep_segments(shard, stream, arrays, torch.tensor(stay))
        yield from parts.values()

    def _put(
        self,
        reducer: Reducer,
        parts: Sequence[Reduced],
        segments: Sequence[Tensor],
        arrays: dict[str, list[Tensor]],
    ) -> Declaration:
        """Adds records of one kind to the arrays; says how they are declared."""
        part, layer = parts[0], reducer.stream.name
        key = (layer, *_kind(part))
        stream = replace(_stream(part, layer), name=self._names.get(key, ""))
        if not stream.name:
            stream = replace(stream, name=self._new_name(layer, part.book))
            self._names[key] = stream.name
        for each in parts:
            for name, array in _encode(each).items():
                arrays.setdefault(f"{stream.name}/{name}", []).append(array)
        arrays[f"{stream.name}/segments"] = list(segments)
        return Declaration(stream, {part.book: part.term}, _codec(part, _records(part)))

    def _new_name(self, layer: str, book: str) -> str:
        """As a recorder names them: by layer and parameter, and a number from the second on."""
        taken = {*self._names.values(), *(stream.name for stream in self.ledger.info.streams)}
        base = f"{layer}~{book.rpartition('.')[2]}"
        names = (base if number == 1 else f"{base}@{number}" for number in count(1))
        return next(name for name in names if name not in taken)

    def _put_by_step(self, shard: Shard, arrays: dict[str, list[Tensor]]) -> None:
        """What is kept of some steps: divisors and accounts."""
        for book, found in self.accounts.items():
            steps = [step for step in found if shard.first <= step <= shard.last]
            if steps and shard.rank == 0:
                arrays[f"{book}/accounts"] = [found[step][None] for step in steps]
                arrays[f"{book}/account_steps"] = [torch.tensor(steps)]
        for book, found in self.divisors.items():
            steps = [step for step in sorted(found) if shard.first <= step <= shard.last]
            if steps:
                arrays[f"{book}/divisors"] = [found[step][None] for step in steps]
                arrays[f"{book}/divisor_steps"] = [torch.tensor(steps)]


def _uses(shard: Shard, stream: Stream) -> Iterator[tuple[StreamRows, tuple[int, int]]]:
    """The rows of each use of a layer, with the number of its samples and of records of each."""
    rows = read_rows(shard, stream)
    begin = 0
    for at, records in enumerate(rows.counts.tolist()):
        own, one = slice(begin, begin + records), slice(at, at + 1)
        each = int(rows.segments[at, 2])
        part = StreamRows(rows.keys[own], rows.values[own], rows.segments[one], rows.counts[one])
        yield part, (records // max(1, each), each)
        begin += records


def _records(part: Reduced) -> Records:
    """What is stored of a part, sample after sample."""
    keys = sample_major(part.keys[None], *part.order, part.key_dims)
    return Records(keys, sample_major(part.values[None], *part.order, part.value_dims))


def _codec(part: Reduced, records: Records) -> Codec:
    """How a part is stored: without rounding, where both sides of its parameter are kept whole.

    Then the books are to add up by entries alone, and nothing would say what rounding loses.
    """
    whole = part.bases is not None and part.bases.is_whole
    return codec_for([ROWS if whole else part.numbers]).for_records(records)


def _encode(part: Reduced) -> dict[str, Tensor]:
    records = _records(part)
    return _codec(part, records).encode(records)


def _stream(part: Reduced, layer: str) -> Stream:
    """The stream of such records, without a name."""
    keys = tuple(part.keys.shape[part.keys.ndim - part.key_dims :]) or (1,)
    values = tuple(part.values.shape[part.values.ndim - part.value_dims :])
    sides: tuple[int, ...] = ()
    if part.bases is not None:
        U, V = part.bases.outputs, part.bases.inputs
        sides = tuple(0 if side is None else side.shape[1] for side in (U, V))
    return Stream("", keys, values, {}, (), layer, sides)


def _kind(part: Reduced) -> tuple[object, ...]:
    """What records of one stream have in common."""
    stream, dtypes = _stream(part, ""), (part.keys.dtype, part.values.dtype)
    return (part.book, part.term, stream.keys, stream.values, stream.bases, part.numbers, *dtypes)


def _bases(stream: str, part: Reduced) -> dict[str, list[Tensor]]:
    """The bases of a stream as arrays, in 16 bits, which is what they were rounded to."""
    if part.bases is None:
        return {}
    sides = {"outputs": part.bases.outputs, "inputs": part.bases.inputs}
    found = {f"{stream}/{name}": side for name, side in sides.items() if side is not None}
    return {name: [side.bfloat16()] for name, side in found.items()}


def _keep_segments(
    shard: Shard, stream: Stream, arrays: dict[str, list[Tensor]], stay: Tensor
) -> None:
    """Leaves only some segments of a stream among the arrays of a shard, or none of it."""
    segments, samples = segments_of(shard, stream)
    rows = stay.repeat_interleave(samples * segments[:, 2])
    for name in stored_arrays(shard, stream):
        (stored,) = arrays.pop(f"{stream.name}/{name}")
        if stay.any():
            arrays[f"{stream.name}/{name}"] = [stored[rows]]
    del arrays[f"{stream.name}/segments"]
    if stay.any():
        arrays[f"{stream.name}/segments"] = [segments[stay]]
