"""Probes: one vector a step that tells whether the rows explain the gradient, and by what factor.

Training changes gradients on their way to the optimizer: a loss scale is divided out, clipping
shrinks them, a discarded backward pass never counts. None of it is assumed; it is measured. At each
step the recorder takes `u = G r` of the gradient the optimizer is about to use (r fixed, random,
several of them for narrow matrices; G seen as a matrix, at some of its rows). The rows give the
same probe, for a matrix product `w = Σ error (x·r)`, and `u = κ w` must hold for one number κ, the
step's *factor*. Where it does not, the rows do not explain the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dualform.layers import inner_products, sample_major
from dualform.layers.conv import at_positions
from dualform.ledger import Stream, Term
from dualform.memory.forms import form_named
from dualform.recording.ports import Port
from dualform.recording.tape import Page

NOISE = 16.0
"""How many roundings of its terms a gradient must exceed to be more than rounding."""


@dataclass
class StreamRows:
    """The records of one stream over some steps, sample by sample."""

    keys: Tensor
    values: Tensor
    segments: Tensor
    """(segments, 3): index of the step, batch number, records of each sample."""
    counts: Tensor
    """(segments,): records."""
    shared: Tensor | None = None
    """(segments, height × width): the matrix that a segment's rows share, where they do."""

    @property
    def at(self) -> Tensor:
        """(records,): the index of each record's step."""
        return self.segments[:, 0].repeat_interleave(self.counts)

    def keep(self, segments: Tensor) -> StreamRows:
        """Only the segments where the mask is true."""
        rows = segments.repeat_interleave(self.counts).to(self.keys.device)
        shared = None if self.shared is None else self.shared[segments.to(self.shared.device)]
        table, counts = self.segments[segments], self.counts[segments]
        return StreamRows(self.keys[rows], self.values[rows], table, counts, shared)

    def by_segment(self) -> Iterator[StreamRows]:
        """The records of each segment by themselves, of which all have the same number."""
        count = max(1, len(self.counts))
        size = len(self.keys) // count
        for at in range(len(self.counts)):
            rows, own = slice(at * size, (at + 1) * size), slice(at, at + 1)
            shared = None if self.shared is None else self.shared[own]
            table, counts = self.segments[own], self.counts[own]
            yield StreamRows(self.keys[rows], self.values[rows], table, counts, shared)


def lay_out(port: Port, page: Page, first: int, last: int) -> StreamRows | None:
    """A page's slots of steps `first` to `last` as records; None where it has none."""
    chosen = [
        (at, step - first, batch)
        for at, (step, batch) in enumerate(page.marks)
        if first <= step <= last
    ]
    if not chosen:
        return None
    site, (samples, stretch) = port.site, page.form[4]
    slots = [at for at, _, _ in chosen]
    keys, values = page.rows(slots)
    keys = sample_major(keys, samples, stretch, site.key_dims)
    values = sample_major(values, samples, stretch, site.value_dims)
    count = len(keys) // len(chosen)
    table = [(step, batch.number, count // samples) for _, step, batch in chosen]
    counts = torch.full((len(chosen),), count)
    return StreamRows(keys, values, torch.tensor(table), counts, page.matrices(slots))


@dataclass(frozen=True)
class Look:
    """Where and with what the gradient of a book is probed, seen as a matrix."""

    rows: slice
    vectors: Tensor | None
    """(width, vectors); None for a matrix of one column, which is probed as it is."""
    later: bool = False
    """Whether a step keeps the gradient's rows themselves, to be multiplied many steps at once."""

    @property
    def numbers(self) -> int:
        """How many numbers a probe has."""
        return self.height * (1 if self.vectors is None else self.vectors.shape[1])

    @property
    def kept(self) -> int:
        """How many numbers a step keeps of the gradient."""
        if self.vectors is not None and self.later:
            return self.height * len(self.vectors)
        return self.numbers

    @property
    def height(self) -> int:
        """At how many rows of the matrix it looks."""
        return int(self.rows.stop - self.rows.start)

    def probes(self, kept: Tensor) -> Tensor:
        """(steps, numbers): the probes, from what each step kept."""
        if self.vectors is not None and self.later:
            rows = kept.reshape(len(kept), self.height, -1)
            return torch.matmul(rows, self.vectors.to(kept)).flatten(1)
        return kept


class Part(NamedTuple):
    """What some records say of one book, segment by segment."""

    columns: slice
    """Which numbers of its account are the book's."""
    at: Tensor
    """(segments,): the index of each segment's step."""
    probe: Tensor
    """(segments, numbers)."""
    size: Tensor
    """(segments,): the size of the probe's terms."""


@dataclass(frozen=True)
class Feed:
    """The rows that one stream gives to the books of an account."""

    stream: Stream
    terms: dict[str, Term]
    pieces: list[StreamRows]


@dataclass(frozen=True)
class Evidence:
    """What the rows of one account say its gradients were, step by step.

    An account is the books that share streams, checked together: usually a weight and its bias.
    """

    feeds: list[Feed]
    looks: dict[str, tuple[Look, slice]]
    """For each book, how it was probed, and which of the numbers are its probe."""
    u: Tensor
    """(steps, numbers): the probes of the gradients that were used, flat."""
    active: Tensor
    """(steps, numbers): whether the step changed the number's book by row."""

    @property
    def pieces(self) -> list[tuple[Feed, StreamRows]]:
        """All rows, with the stream they come from."""
        return [(feed, rows) for feed in self.feeds for rows in feed.pieces]

    @cached_property
    def touched(self) -> Tensor:
        """(steps,): whether the step changed the account at all."""
        return self.active.any(1)

    def parts(self) -> list[Part]:
        """What the rows say of each book."""
        return [
            Part(columns, rows.segments[:, 0], *probe_rows(feed.stream, term, rows, look))
            for feed, rows in self.pieces
            for book, term in feed.terms.items()
            for look, columns in [self.looks[book]]
        ]

    @property
    def rounding(self) -> float:
        """The relative rounding of the coarsest numbers involved."""
        dtypes = [rows.values.dtype for _, rows in self.pieces] or [torch.float32]
        coarse = max(torch.finfo(dtype).eps for dtype in dtypes)
        return coarse if coarse < 1e-4 else coarse / 250  # 16-bit rows are summed in 32 bits

    def noise(self, factor: Tensor) -> set[str]:
        """Books in which a gradient is zero but for rounding, though errors came in.

        Such are offsets that what follows takes out again: a bias before a batch normalization,
        or of attention's keys. An optimizer that divides by the gradient's size magnifies it.
        """
        found = set()
        for name, (look, columns) in self.looks.items():
            if look.vectors is None:
                size = torch.zeros_like(self.u[:, columns])
                for feed, rows in self.pieces:
                    if name in feed.terms:
                        plain = replace(rows, values=rows.values.abs(), keys=rows.keys.abs())
                        probe, _ = probe_rows(feed.stream, feed.terms[name], plain, look)
                        size.index_add_(0, rows.segments[:, 0], probe.to(size))
                reach = size * factor.abs()[:, None]
                small = self.u[:, columns].abs() <= NOISE * self.rounding * reach
                if bool((small & (size > 0)).any()):
                    found.add(name)
        return found

    def from_batch(self, at: int, first: int) -> Evidence:
        """The same without the batches of step `at` that came before `first`."""
        return self._keep(lambda table: (table[:, 0] != at) | (table[:, 1] >= first))

    def of_touched(self) -> Evidence:
        """The same without the rows of steps that left the account alone."""
        if bool(self.touched.all()):
            return self
        return self._keep(lambda table: self.touched[table[:, 0]])

    def _keep(self, chosen: Callable[[Tensor], Tensor]) -> Evidence:
        """Only the segments that are chosen."""
        feeds = [
            replace(feed, pieces=[rows.keep(chosen(rows.segments)) for rows in feed.pieces])
            for feed in self.feeds
        ]
        return replace(self, feeds=feeds)

    def batches(self, at: int) -> list[int]:
        """The batches that left rows in step `at`, in order."""
        tables = [rows.segments for _, rows in self.pieces]
        return sorted({int(n) for table in tables for n in table[table[:, 0] == at][:, 1]})


def probe_rows(
    stream: Stream, term: Term, records: StreamRows, look: Look
) -> tuple[Tensor, Tensor]:
    """By segment, the probe of some records (segments, numbers) and its terms' size (segments,)."""
    if records.shared is not None:
        return _probe_shared(stream, term, records, look)
    wide = torch.promote_types(records.values.dtype, torch.float32)
    values = records.values.to(wide)
    if term.form == "lookup":
        return _probe_lookup(term, records, values, look)
    keys = records.keys.to(wide)
    inner = None
    if term.form == "outer":
        assert look.vectors is not None
        inner = inner_products(stream, keys, _part(look.vectors, term, stream).to(keys))
    if stream.layout:
        values = at_positions(stream, values).flatten(0, 1)
    if term.form == "scale":
        values = values * keys
    return _probe_blocks(term, values, inner, len(records.counts), look)


def _part(vectors: Tensor, term: Term, stream: Stream) -> Tensor:
    """The vectors, as far as the term's block reaches."""
    keys = stream.keys[0] // term.groups * math.prod(stream.layout.get("kernel", ()))
    width = keys if stream.layout else math.prod(stream.keys)
    return vectors[term.at[1] : term.at[1] + width]


def _probe_blocks(
    term: Term, a: Tensor, inner: Tensor | None, segments: int, look: Look
) -> tuple[Tensor, Tensor]:
    """For rows `a ⊗ b`: a at the rows looked at, times what b gives with the vectors.

    All segments have the same number of rows.
    """
    top, height = term.at[0], a.shape[1]
    first, last = max(look.rows.start, top), min(look.rows.stop, top + height)
    if first >= last or not a.numel():
        return a.new_zeros(segments, look.numbers), a.new_zeros(segments)
    a = a.reshape(segments, -1, height)[:, :, first - top : last - top]
    size = torch.linalg.vector_norm(a, dim=2)
    if inner is None:
        sums = a.sum(1)[..., None]
    else:
        inner = inner.reshape(segments, -1, *inner.shape[1:])
        size = size * torch.linalg.vector_norm(inner, dim=(2, 3))
        groups = torch.arange(first - top, last - top, device=a.device) * inner.shape[2] // height
        sums = _products(a, inner, groups)
    above, below = first - look.rows.start, look.rows.stop - last
    return F.pad(sums, (0, 0, above, below)).flatten(1), size.sum(1)


def _products(a: Tensor, inner: Tensor, groups: Tensor) -> Tensor:
    """`Σ a inner` over the rows of each segment; `groups` has the group of each entry of a."""
    if inner.shape[2] == 1:
        return a.mT @ inner[:, :, 0]
    return torch.einsum("snh,snhv->shv", a, inner[:, :, groups])


def _probe_shared(
    stream: Stream, term: Term, records: StreamRows, look: Look
) -> tuple[Tensor, Tensor]:
    """For rows that share a matrix: a convolution's share a line, which acts on the vectors."""
    assert look.vectors is not None
    none = records.values.new_zeros(0, look.numbers)
    probes, sizes = [none], [none[:, 0]]
    for segment, M in _by_segment(stream, records):
        vectors = look.vectors.to(M)
        if stream.layout:
            seen = replace(look, vectors=vectors * M.T, later=False)
            probe, size = probe_rows(stream, term, replace(segment, shared=None), seen)
            probes.append(probe)
            sizes.append(size)
        else:
            a, lines = _shared_lines(term, segment, M, look.rows)
            each = (a[:, :, None] * (lines @ vectors)).flatten(1)
            probes.append(each.sum(0)[None])
            sizes.append(torch.linalg.vector_norm(each, dim=1).sum()[None])
    return torch.cat(probes), torch.cat(sizes)


def shared_line(stream: Stream, term: Term, records: StreamRows, row: int) -> Tensor:
    """(segments, width): one row of the gradient, from rows that share a matrix."""
    found = [records.values.new_zeros(0, stream.shared[1])]
    for segment, M in _by_segment(stream, records):
        a, lines = _shared_lines(term, segment, M, slice(row, row + 1))
        found.append((a[:, :, None] * lines).sum(0))
    return torch.cat(found)


def _by_segment(stream: Stream, records: StreamRows) -> Iterator[tuple[StreamRows, Tensor]]:
    """Each segment by itself, and the matrix that its rows share, at least in 32 bits."""
    for segment in records.by_segment():
        assert segment.shared is not None
        wide = torch.promote_types(segment.shared.dtype, torch.float32)
        yield segment, segment.shared.to(wide).reshape(stream.shared)


def _shared_lines(term: Term, segment: StreamRows, M: Tensor, some: slice) -> tuple[Tensor, Tensor]:
    """Some lines of the blocks of one segment's rows, which share M: as one side times the other.

    (rows, lines), and (rows, lines, width) or one for all rows.
    """
    rows = form_named(term.form).rows(segment.keys.to(M), segment.values.to(M), term.groups)
    if rows.b is None:
        return rows.a[:, some], M[None, some]
    groups = torch.arange(len(M), device=M.device)[some] * term.groups // len(M)
    return rows.a[:, some], M[some] * rows.b.reshape(len(rows), term.groups, -1)[:, groups]


def _probe_lookup(
    term: Term, records: StreamRows, values: Tensor, look: Look
) -> tuple[Tensor, Tensor]:
    """For rows of a table: what the errors give with the vectors, place by place."""
    assert look.vectors is not None
    left, segments = term.at[1], len(records.counts)
    inner = values @ look.vectors[left : left + values.shape[1]].to(values)
    local = records.keys[:, 0] + term.at[0] - look.rows.start
    seen = (local >= 0) & (local < look.height)
    inner = inner * seen[:, None]
    at = torch.arange(segments).repeat_interleave(records.counts).to(values.device)
    where = at * look.height + local.clamp(0, look.height - 1)
    w = inner.new_zeros(segments * look.height, inner.shape[1]).index_add_(0, where, inner)
    size = inner.new_zeros(segments).index_add_(0, at, torch.linalg.vector_norm(inner, dim=1))
    return w.reshape(segments, -1), size
