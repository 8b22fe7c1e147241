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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dualform.ledger import Stream, Term
from dualform.record.layers import inner_products, sample_major
from dualform.record.layers.conv import at_positions
from dualform.record.tape import Page
from dualform.record.watch import Port

MISMATCH = 1000.0
"""How many roundings of their terms two probes may differ by."""
NOISE = 16.0
"""How many roundings of its terms a gradient must exceed to be more than rounding."""
UNSCALED = 32.0
"""How many roundings a factor may differ from 1 and still be 1."""


@dataclass
class StreamRows:
    """The records of one stream over some steps, sample by sample."""

    keys: Tensor
    values: Tensor
    segments: Tensor
    """(segments, 3): index of the step, batch number, records of each sample."""
    counts: Tensor
    """(segments,): records."""

    @property
    def at(self) -> Tensor:
        """(records,): the index of each record's step."""
        return self.segments[:, 0].repeat_interleave(self.counts)

    def keep(self, segments: Tensor) -> StreamRows:
        """Only the segments where the mask is true."""
        rows = segments.repeat_interleave(self.counts).to(self.keys.device)
        return StreamRows(
            self.keys[rows], self.values[rows], self.segments[segments], self.counts[segments]
        )


def lay_out(port: Port, page: Page, first: int, last: int) -> StreamRows | None:
    """A page's slots of steps `first` to `last` as records; None where it has none."""
    chosen = [
        (at, step - first, batch)
        for at, (step, batch) in enumerate(page.marks)
        if first <= step <= last
    ]
    if not chosen:
        return None
    site, axis, samples = port.site, page.form[4], chosen[0][2].size
    keys, values = _slots(page, [at for at, _, _ in chosen])
    keys = sample_major(keys, samples, axis, site.key_dims)
    values = sample_major(values, samples, axis, site.value_dims)
    count = len(keys) // len(chosen)
    table = [(step, batch.number, count // batch.size) for _, step, batch in chosen]
    return StreamRows(keys, values, torch.tensor(table), torch.full((len(chosen),), count))


def joined(pieces: list[StreamRows]) -> list[StreamRows]:
    """On an accelerator, where calls cost more than copies: pieces of one form as one."""
    alike = {(r.keys.shape[1:], r.keys.dtype, r.values.dtype, int(r.counts[0])) for r in pieces}
    if len(alike) != 1 or not pieces[0].keys.is_cuda:
        return pieces
    columns = zip(*((r.keys, r.values, r.segments, r.counts) for r in pieces), strict=True)
    return [StreamRows(*(torch.cat(parts) for parts in columns))]


def _slots(page: Page, chosen: list[int]) -> tuple[Tensor, Tensor]:
    """The chosen slots; without a copy where they are neighbors, as they nearly always are."""
    start, stop = chosen[0], chosen[-1] + 1
    if stop - start == len(chosen):
        return page.keys[start:stop], page.values[start:stop]
    return page.keys[chosen], page.values[chosen]


@dataclass(frozen=True)
class Look:
    """Where and with what the gradient of a book is probed, seen as a matrix."""

    rows: slice
    vectors: Tensor | None
    """(width, vectors); None for a matrix of one column, which is probed as it is."""

    @property
    def numbers(self) -> int:
        """How many numbers a probe has."""
        return self.height * (1 if self.vectors is None else self.vectors.shape[1])

    @property
    def height(self) -> int:
        """At how many rows of the matrix it looks."""
        return int(self.rows.stop - self.rows.start)


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

    @cached_property
    def sums(self) -> tuple[Tensor, Tensor]:
        """The rows' probe of each step (steps, numbers), and the size of its terms (steps,)."""
        w, size = torch.zeros_like(self.u), torch.zeros(len(self.u), dtype=torch.float64)
        for feed, rows in self.pieces:
            for book, term in feed.terms.items():
                look, columns = self.looks[book]
                probe, reach = probe_rows(feed.stream, term, rows, look, len(w))
                w[:, columns] += probe
                size += reach * self.active[:, columns.start]
        return torch.where(self.active, w, 0.0), size

    @property
    def rounding(self) -> float:
        """The relative rounding of the coarsest numbers involved."""
        dtypes = [rows.values.dtype for _, rows in self.pieces] or [torch.float32]
        coarse = max(torch.finfo(dtype).eps for dtype in dtypes)
        return coarse if coarse < 1e-4 else coarse / 250  # 16-bit rows are summed in 32 bits

    def agrees(self, factor: Tensor) -> Tensor:
        """(steps,): whether `u = κ w` to within rounding."""
        w, size = self.sums
        gap = torch.linalg.vector_norm(self.u - factor[:, None] * w, dim=1)
        reach = size * factor.abs() + torch.linalg.vector_norm(self.u, dim=1)
        agrees: Tensor = (gap <= MISMATCH * self.rounding * reach) | ~self.touched
        return agrees

    def own_factor(self) -> Tensor:
        """(steps,): the κ that fits this account best."""
        w, _ = self.sums
        return _ratio((self.u * w).sum(1), w.square().sum(1))

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
                        term, steps = feed.terms[name], len(size)
                        size += probe_rows(feed.stream, term, plain, look, steps)[0]
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
    stream: Stream, term: Term, records: StreamRows, look: Look, steps: int
) -> tuple[Tensor, Tensor]:
    """The probe of some records by step (steps, numbers), and the size of its terms (steps,)."""
    wide = torch.promote_types(records.values.dtype, torch.float32)
    values = records.values.to(wide)
    if term.form == "lookup":
        return _probe_lookup(term, records, values, look, steps)
    keys = records.keys.to(wide)
    inner = None
    if term.form == "outer":
        assert look.vectors is not None
        inner = inner_products(stream, keys, _part(look.vectors, term, stream).to(keys))
    if stream.layout:
        values = at_positions(stream, values).flatten(0, 1)
    if term.form == "scale":
        values = values * keys
    return _probe_blocks(term, values, inner, records.segments[:, 0], look, steps)


def _part(vectors: Tensor, term: Term, stream: Stream) -> Tensor:
    """The vectors, as far as the term's block reaches."""
    keys = stream.keys[0] // term.groups * math.prod(stream.layout.get("kernel", ()))
    width = keys if stream.layout else math.prod(stream.keys)
    return vectors[term.at[1] : term.at[1] + width]


def _probe_blocks(
    term: Term, a: Tensor, inner: Tensor | None, at: Tensor, look: Look, steps: int
) -> tuple[Tensor, Tensor]:
    """For rows `a ⊗ b`: a at the rows looked at, times what b gives with the vectors.

    `at` has the step of each segment; all segments have the same number of rows.
    """
    top, height = term.at[0], a.shape[1]
    first, last = max(look.rows.start, top), min(look.rows.stop, top + height)
    w = torch.zeros(steps, look.height, look.numbers // look.height, dtype=torch.float64)
    if first >= last or not a.numel():
        return w.flatten(1), torch.zeros(steps, dtype=torch.float64)
    a = a.reshape(len(at), -1, height)[:, :, first - top : last - top]
    size = torch.linalg.vector_norm(a, dim=2)
    if inner is None:
        sums = a.sum(1)[..., None]
    else:
        inner = inner.reshape(len(at), -1, *inner.shape[1:])
        size = size * torch.linalg.vector_norm(inner, dim=(2, 3))
        groups = torch.arange(first - top, last - top, device=a.device) * inner.shape[2] // height
        sums = _products(a, inner, groups)
    w[:, first - look.rows.start : last - look.rows.start] = _sum_by(at, sums, steps)
    return w.flatten(1), _sum_by(at, size.sum(1), steps)


def _products(a: Tensor, inner: Tensor, groups: Tensor) -> Tensor:
    """`Σ a inner` over the rows of each segment; `groups` has the group of each entry of a."""
    if inner.shape[2] == 1:
        return a.mT @ inner[:, :, 0]
    return torch.einsum("snh,snhv->shv", a, inner[:, :, groups])


def _probe_lookup(
    term: Term, records: StreamRows, values: Tensor, look: Look, steps: int
) -> tuple[Tensor, Tensor]:
    """For rows of a table: what the errors give with the vectors, place by place."""
    assert look.vectors is not None
    at, left = records.at.to(values.device), term.at[1]
    inner = values @ look.vectors[left : left + values.shape[1]].to(values)
    local = records.keys[:, 0] + term.at[0] - look.rows.start
    seen = (local >= 0) & (local < look.height)
    where = at[seen] * look.height + local[seen]
    w = _sum_by(where, inner[seen], steps * look.height).reshape(steps, -1)
    return w, _sum_by(at[seen], torch.linalg.vector_norm(inner[seen], dim=1), steps)


def settle_factors(evidence: Sequence[Evidence]) -> tuple[list[Evidence], Tensor, Tensor]:
    """Finds κ for each step and account: evidence, factors and agreement (steps, accounts).

    One κ for all accounts where it fits (clipping by global norm, loss scales), because together
    they determine it best; each account its own where not. An account that agrees with neither
    is tried without its earlier backward passes: `zero_grad` may have thrown those away.
    """
    shared = _shared_factor(evidence)
    settled, factors, agreed = [], [], []
    for account in evidence:
        factor, agrees = _account_factor(account, shared)
        for at in torch.nonzero(~agrees).flatten().tolist():
            account, factor[at], agrees[at] = _without_discarded(account, at, factor[at])
        settled.append(account.of_touched())
        factors.append(torch.where(agrees & account.touched, factor, 0.0))
        agreed.append(agrees)
    return settled, torch.stack(factors, 1), torch.stack(agreed, 1)


def _shared_factor(evidence: Sequence[Evidence]) -> Tensor:
    """The least-squares κ over all accounts, each weighted by how exactly it is known."""
    above = below = torch.zeros(len(evidence[0].u), dtype=torch.float64)
    for account in evidence:
        w, size = account.sums
        weight = torch.where(account.touched & (size > 0), (account.rounding * size) ** -2, 0.0)
        above = above + weight * (account.u * w).sum(1)
        below = below + weight * w.square().sum(1)
    factor = _ratio(above, below)
    doubt = UNSCALED / below.clamp_min(1e-300).sqrt()
    return torch.where((factor - 1).abs() <= doubt, 1.0, factor)


def _account_factor(account: Evidence, shared: Tensor) -> tuple[Tensor, Tensor]:
    agrees = account.agrees(shared)
    own = account.own_factor()
    return torch.where(agrees, shared, own), agrees | account.agrees(own)


def _without_discarded(account: Evidence, at: int, factor: Tensor) -> tuple[Evidence, Tensor, bool]:
    for first in account.batches(at)[1:]:
        trial = account.from_batch(at, first)
        own = trial.own_factor()
        if bool(trial.agrees(own)[at]):
            return trial, own[at], True
    unexplained = account.from_batch(at, 2**62)  # rows that explain nothing are not kept
    return unexplained, factor, False


def _sum_by(at: Tensor, terms: Tensor, count: int) -> Tensor:
    sums = torch.zeros(count, *terms.shape[1:], dtype=terms.dtype, device=terms.device)
    return sums.index_add_(0, at.to(terms.device), terms).to("cpu", torch.float64)


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    return torch.where(below > 0, above / below.clamp_min(1e-300), 1.0)
