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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from dualform.layers import inner_products
from dualform.layers.patches import at_positions, gradient_row
from dualform.ledger import Stream, Term
from dualform.memory.forms import form_named
from dualform.recording.pages import StreamRows


@dataclass(frozen=True)
class Look:
    """Where and with what the gradient of a book is probed, seen as a matrix."""

    rows: slice
    vectors: Tensor | None
    """(width, vectors); None for a matrix of one column, which is probed as it is."""
    later: bool = False
    """Whether a step keeps the gradient's rows themselves, to be multiplied many steps at once."""
    partial: bool = True
    """Whether the matrix has other rows as well."""
    outputs: Tensor | None = None
    """U of a book that is summarized, (height, directions): `vectors` is V, and `u = Uᵀ G V`."""
    in_bases: bool = False
    """Whether `u` is the whole gradient in the book's bases, so that entries must add up to it."""

    @property
    def numbers(self) -> int:
        """How many numbers a probe has."""
        height = self.height if self.outputs is None else self.outputs.shape[1]
        return height * (1 if self.vectors is None else self.vectors.shape[1])

    @property
    def is_column(self) -> bool:
        """Whether the matrix has one column, as an offset does."""
        return self.vectors is None or len(self.vectors) == 1

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


def probe_rows(
    stream: Stream, term: Term, records: StreamRows, look: Look
) -> tuple[Tensor, Tensor]:
    """By segment, the probe of some records (segments, numbers) and its terms' size (segments,)."""
    if records.shared is not None:
        return _probe_shared(stream, term, records, look)
    wide = torch.promote_types(records.values.dtype, torch.float32)
    values = records.values.to(wide)
    form = form_named(term.form)
    if not form.has_sides:
        return _probe_lookup(stream, term, records, values, look)
    if stream.bases and not math.prod(stream.keys):
        return _probe_summaries(stream, values, len(records.counts), look)
    keys = records.keys.to(wide)
    inner = None
    if stream.bases and stream.bases[1]:
        inner = keys[:, None]  # along V already
    elif form.is_product:
        assert look.vectors is not None
        width = math.prod(stream.keys)  # as far as the term's block reaches
        if stream.layout:
            width = stream.keys[0] // term.groups * math.prod(stream.layout.get("kernel", ()))
        vectors = look.vectors[term.at[1] : term.at[1] + width]
        inner = inner_products(stream, keys, vectors.to(keys))
    if stream.layout:
        values = at_positions(stream, values).flatten(0, 1)
    a = values if form.is_product else form.rows(keys, values).a
    if stream.bases and stream.bases[0]:  # along U already
        return _probe_in_bases(a, inner, len(records.counts))
    sizes = records.sizes if a is records.values else None
    if inner is not None or look.outputs is not None:
        return _probe_blocks(term, a, inner, len(records.counts), look, sizes)
    asked = (term, look.rows.start, look.rows.stop, look.numbers)
    if asked not in records.known:
        records.known[asked] = _probe_blocks(term, a, None, len(records.counts), look, sizes)
    return records.known[asked]


def _probe_blocks(
    term: Term,
    a: Tensor,
    inner: Tensor | None,
    segments: int,
    look: Look,
    sizes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """For rows `a ⊗ b`: a at the rows looked at, times what b gives with the vectors.

    All segments have the same number of rows. `sizes` are the lengths of a, where they are known.
    """
    top, height = term.at[0], a.shape[1]
    first, last = max(look.rows.start, top), min(look.rows.stop, top + height)
    if first >= last or not a.numel():
        return a.new_zeros(segments, look.numbers), a.new_zeros(segments)
    if look.outputs is not None:
        return _probe_in_bases(a @ look.outputs[top : top + height].to(a), inner, segments)
    a = a.reshape(segments, -1, height)[:, :, first - top : last - top]
    if sizes is not None and last - first == height:
        size = sizes.reshape(segments, -1)
    else:
        size = torch.linalg.vector_norm(a, dim=2)
    if inner is None:
        sums = a.sum(1)[..., None]
    else:
        inner = inner.reshape(segments, -1, *inner.shape[1:])
        size = size * torch.linalg.vector_norm(inner, dim=(2, 3))
        if inner.shape[2] == 1:
            sums = (inner[:, :, 0].mT @ a).mT  # several times as fast as a.mT @ inner
        else:  # each entry of a has a group of its own
            at = torch.arange(first - top, last - top, device=a.device)
            sums = torch.einsum("snh,snhv->shv", a, inner[:, :, at * inner.shape[2] // height])
    above, below = first - look.rows.start, look.rows.stop - last
    return F.pad(sums, (0, 0, above, below)).flatten(1), size.sum(1)


def _probe_in_bases(a: Tensor, inner: Tensor | None, segments: int) -> tuple[Tensor, Tensor]:
    """For rows of a book that is summarized: a along U, times what b gives along V."""
    b = a.new_ones(len(a), 1) if inner is None else inner[:, 0]
    left, right = (t.reshape(segments, -1, t.shape[1]) for t in (a, b))
    sizes = torch.linalg.vector_norm(left, dim=2) * torch.linalg.vector_norm(right, dim=2)
    return (left.mT @ right).flatten(1), sizes.sum(1)


def _probe_summaries(
    stream: Stream, values: Tensor, segments: int, look: Look
) -> tuple[Tensor, Tensor]:
    """For summaries: as they are in the bases; a side that was kept whole is looked at now."""
    assert look.vectors is not None
    blocks = values.reshape(len(values), *stream.values)
    if not stream.bases[1]:
        blocks = blocks @ look.vectors.to(blocks)
    if not stream.bases[0]:
        blocks = blocks[:, look.rows]
    blocks = blocks.flatten(1)
    sizes = torch.linalg.vector_norm(blocks, dim=1).reshape(segments, -1)
    return blocks.reshape(segments, -1, blocks.shape[1]).sum(1), sizes.sum(1)


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
            each = a[:, :, None] * (lines @ vectors)
            if look.outputs is not None:
                each = look.outputs.to(M).T @ each
            each = each.flatten(1)
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


def gradient_at(stream: Stream, term: Term, records: StreamRows, row: int, width: int) -> Tensor:
    """(segments, width): one row of the gradient, from the rows of a product or of a table."""
    if records.shared is not None and not stream.layout:
        return shared_line(stream, term, records, row)
    wide = torch.promote_types(records.values.dtype, torch.float32)
    values, (top, left), count = records.values.to(wide), term.at, len(records.counts)
    found = values.new_zeros(count, width)
    if not form_named(term.form).has_sides:
        chosen = (records.keys[:, 0] + top == row)[:, None]
        at = torch.arange(count).repeat_interleave(records.counts).to(values.device)
        found[:, left : left + values.shape[1]].index_add_(0, at, values * chosen)
        return found
    height = stream.values[0] if stream.layout else values.shape[1]
    if not (top <= row < top + height and len(values)):
        return found
    keys = records.keys.to(wide)
    if stream.layout:
        pairs = zip(keys.chunk(count), values.chunk(count), strict=True)  # all of one size
        line = torch.stack([gradient_row(stream, k, v, row - top) for k, v in pairs])
        line = line if records.shared is None else line * records.shared.to(wide)
        found[:, left : left + line.shape[1]] = line
        return found
    part = keys.shape[1] // term.groups  # a group of outputs has its own part of the keys
    start = (row - top) * term.groups // height * part
    keys = keys[:, start : start + part]
    errors = values[:, row - top].reshape(count, 1, -1)
    found[:, left : left + keys.shape[1]] = (errors @ keys.reshape(count, -1, keys.shape[1]))[:, 0]
    return found


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
    stream: Stream, term: Term, records: StreamRows, values: Tensor, look: Look
) -> tuple[Tensor, Tensor]:
    """For rows of a table: what the errors give with the vectors, place by place."""
    assert look.vectors is not None
    left, segments, inner = term.at[1], len(records.counts), values
    if not (stream.bases and stream.bases[1]):
        inner = values @ look.vectors[left : left + values.shape[1]].to(values)
    if look.outputs is not None:
        a = look.outputs.to(inner)[records.keys[:, 0] + term.at[0]]
        return _probe_in_bases(a, inner[:, None], segments)
    local = records.keys[:, 0] + term.at[0] - look.rows.start
    seen = (local >= 0) & (local < look.height)
    inner = inner * seen[:, None]
    at = torch.arange(segments).repeat_interleave(records.counts).to(values.device)
    where = at * look.height + local.clamp(0, look.height - 1)
    w = inner.new_zeros(segments * look.height, inner.shape[1]).index_add_(0, where, inner)
    size = inner.new_zeros(segments).index_add_(0, at, torch.linalg.vector_norm(inner, dim=1))
    return w.reshape(segments, -1), size


def in_double(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors as float64 in main memory; all in one transfer where they come from a GPU.

    >>> in_double([torch.ones(2), torch.zeros(1, 1)])
    [tensor([1., 1.], dtype=torch.float64), tensor([[0.]], dtype=torch.float64)]
    """
    if not any(t.is_cuda for t in tensors):
        return [t.double() for t in tensors]
    flat = torch.cat([t.reshape(-1) for t in tensors]).to("cpu", torch.float64)
    parts = torch.split(flat, [t.numel() for t in tensors])
    return [part.reshape(t.shape) for part, t in zip(parts, tensors, strict=True)]
