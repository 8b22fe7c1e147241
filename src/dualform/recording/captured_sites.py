"""From what was learned of a model's calls to taps, and from their probes to records."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dualform.layers import Site
from dualform.memory.forms import form_named
from dualform.owners import Batch, Owners
from dualform.recording.learning import (
    FOLLOWED,
    IN_PARTS,
    OFTEN,
    SEVERAL,
    TALL,
    WHOLE,
    Learned,
    Learning,
)
from dualform.recording.repeated import Reduced
from dualform.recording.streams import RowWriter, StreamWriter
from dualform.recording.taps import (
    ALONG,
    EXACT_PLACES,
    GROUPS,
    LOOKUP,
    RAW,
    SCALE,
    SUM,
    SUMMARY,
    How,
    Tap,
)


class CapturedSite:
    """A tap, and how the gradient of its probe becomes records of a stream."""

    def __init__(self, learned: Learned, stream: StreamWriter, patterns: Mapping[int, Any]) -> None:
        assert learned.parameter is not None
        assert stream.kept is not None
        self.stream, self.kind, self.parameter = stream, learned.kind, learned.parameter
        self._kept = stream.kept
        parts, each = self._kept.parts, self._kept.each
        self.parts = tuple([_part_of(part, learned.site) for part in parts]) or (RAW,)
        if learned.most > 1:  # probes add up what several calls leave: as whole summaries can be
            self.parts = tuple([SUMMARY if part == ALONG else part for part in self.parts])
        layout = stream.opened.stream
        wide = [part for part in parts if form_named(learned.site.terms[part.book].form).has_width]
        bases = next((part.bases for part in wide if part.bases is not None), None)
        U = None if bases is None else bases.outputs
        V = None if bases is None else bases.inputs
        like = self.parameter.detach()
        where = (like.device, self._kept.dtype)
        left, right = (torch.empty(0).to(*where) if t is None else t.to(*where) for t in (U, V))
        how = How(
            self.kind,
            self.parts,
            patterns,
            each if {RAW, ALONG, LOOKUP}.intersection(self.parts) else 0,
            U is not None,
            V is not None,
            layout if layout.layout else None,
            learned.broadcast,
        )
        self._storage = torch.empty(0, dtype=_probe_dtype(self._kept.dtype), device=like.device)
        self.tap = Tap(how, left, right, self._storage)
        self._places: list[tuple[slice, tuple[int, ...]]] = []
        """Where a probe holds what, and of which shape, for each sample."""

    @property
    def summary(self) -> Reduced | None:
        """What is kept of its rows, if it is one summary a sample and nothing else."""
        parts = self._kept.parts
        return parts[0] if self.parts == (SUMMARY,) and parts[0].value_dims == 2 else None

    @property
    def dtype(self) -> torch.dtype:
        """What its rows were recorded in."""
        return self._kept.dtype

    def _shapes(self) -> list[tuple[int, ...]]:
        """The shapes of what a probe holds of each sample, one after the other."""
        each, found = self.tap.how.each, list[tuple[int, ...]]()
        for at, part in enumerate(self.parts):
            if part == RAW:
                keys, values = self.stream.opened.stream.keys, self.stream.opened.stream.values
                found += [(each, *values), (each, *keys)]
                continue
            kept = self._kept.parts[at]
            width = tuple(kept.values.shape[1:])
            if part in (SUM, SCALE) and kept.bases is not None:  # projected when it is written
                width = (len(_basis(kept)),)
            if part in (SUMMARY, GROUPS) and kept.value_dims == 1:  # along, called several times
                width = (*width, kept.keys.shape[1])
            if part == ALONG:
                found += [(each, *width), (each, kept.keys.shape[1])]
            elif part == LOOKUP:
                found += [(each, *width), (each,)]
            else:
                found.append(width)
        return found

    def new_probe(self, samples: int) -> Tensor:
        """The probe of a forward pass: a leaf of its own, in memory that nobody reads."""
        if self._storage.shape[0] < samples or self._storage.ndim < 2:
            self._places, at = [], 0
            for shape in self._shapes():
                self._places.append((slice(at, at + math.prod(shape)), shape))
                at += math.prod(shape)
            self._storage = self._storage.new_empty(samples, at + bool(self.tap.how.each))
        self.tap.probe = self._storage.detach().requires_grad_()
        return self.tap.probe

    def grow(self, factor: int) -> None:
        """Samples may have so many times as many rows as before."""
        if self.tap.how.each and self.tap.how.layout is None:
            self.tap.how = self.tap.how._replace(each=self.tap.how.each * factor)
            self._storage = self._storage.new_empty(0)

    def write(self, gradient: Tensor, batch: Batch, rows: RowWriter) -> None:
        """Writes the records of a forward pass to their streams."""
        samples, each, dtype = batch.size, max(1, self.tap.how.each), self._kept.dtype
        of_each = gradient[:samples]
        pieces = [of_each[:, at].reshape(samples, *shape) for at, shape in self._places]
        times = of_each[:, -1]  # how often the graph was gone through, where there are rows
        left = iter(pieces)
        if self.parts == (RAW,):
            values, keys = (piece.flatten(0, 1) for piece in (next(left), next(left)))
            keys = keys / times.repeat_interleave(each).reshape(-1, *[1] * (keys.ndim - 1))
            rows.write_rows(self.stream, keys.to(dtype), values.to(dtype), batch, (samples, each))
            return
        found = [
            self._record(at, part, left, samples, each, times) for at, part in enumerate(self.parts)
        ]
        rows.write_records(self.stream, found, batch, dtype)

    def _record(
        self, at: int, part: str, left: Iterator[Tensor], samples: int, each: int, times: Tensor
    ) -> Reduced:
        kept, values = self._kept.parts[at], next(left)
        if part not in (ALONG, LOOKUP):
            none = values.new_empty(samples, 0)
            if part in (SUM, SCALE) and kept.bases is not None:
                values = (values @ _basis(kept).to(values))[..., None]
            dims = 2 if part in (SUMMARY, GROUPS) else kept.value_dims
            return kept._replace(
                keys=none, values=values, order=(samples, 1), key_dims=1, value_dims=dims
            )
        keys = next(left) / times.reshape(-1, *[1] * (2 if part == ALONG else 1))
        keys = keys.to(kept.keys.dtype) if part == ALONG else keys.round().to(kept.keys.dtype)
        values = values.to(kept.values.dtype).flatten(0, 1)
        return kept._replace(keys=keys.flatten(0, 1), values=values, order=(samples, each))


def _basis(offset: Reduced) -> Tensor:
    """What the sums of an offset are kept in."""
    assert offset.bases is not None
    assert offset.bases.outputs is not None
    return offset.bases.outputs


def _part_of(part: Reduced, site: Site) -> str:
    """What a tap computes, to give the records that a reducer gave of a site's rows."""
    form = form_named(site.terms[part.book].form)
    if not form.has_width:
        return SCALE if form.needs_keys else SUM
    if not form_named(part.term.form).has_sides:
        return LOOKUP
    if part.value_dims == 2:
        return GROUPS if part.term.groups > 1 else SUMMARY
    return ALONG


def _probe_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class Captured(NamedTuple):
    """What can be tapped, and the books that cannot, with the reasons."""

    sites: list[CapturedSite]
    lost: dict[str, str]


def find_taps(
    learning: Learning, streams: Sequence[StreamWriter], owners: Owners, dropped: frozenset[str]
) -> Captured | None:
    """The taps of all streams that were met; None while some are not ready.

    `dropped` are books that are kept by step.
    """
    ready: list[tuple[Learned, StreamWriter, Any]] = []
    lost: dict[str, str] = {}
    met = {id(learned.site): learned for learned in learning.sites.values()}
    for stream in streams:
        if stream.opened.layer is not None or dropped.issuperset(stream.terms):
            continue
        site = stream.opened.site
        if any(book in owners.refused for book in site.terms):
            continue
        arranged = owners.arranged(site)
        if arranged is None or (stream.kept is not None and not stream.kept.settled):
            return None
        learned = met.get(id(site))
        reason = _why_not(learned, stream, arranged)
        if reason:
            lost |= dict.fromkeys(stream.terms, reason)
        else:
            ready.append((learned, stream, arranged))  # type: ignore[arg-type]
    taken: dict[tuple[int, str], Learned] = {}
    for learned, _, _ in ready:
        key = (id(learned.parameter), learned.kind)
        if key in taken:
            for site in (taken[key].site, learned.site):
                lost |= dict.fromkeys(site.terms, SEVERAL)
        taken[key] = learned
    sites = [
        CapturedSite(learned, stream, {ndim: (p.dim, p.folded) for ndim, p in arranged.items()})
        for learned, stream, arranged in ready
        if not set(lost).issuperset(stream.terms)
    ]
    return Captured(sites, lost)


def _why_not(learned: Learned | None, stream: StreamWriter, arranged: Any) -> str:
    """Why a compiled model leaves no records of a stream; empty where it does."""
    if isinstance(arranged, str):
        return FOLLOWED
    if learned is None:
        return IN_PARTS
    if learned.problem or learned.parameter is None:
        return learned.problem or IN_PARTS
    if stream.reducer is None or stream.kept is None:
        return WHOLE
    if not stream.kept.parts and stream.reducer.large:
        return WHOLE
    is_read = any(not form_named(part.term.form).has_sides for part in stream.kept.parts)
    if learned.most > 1 and (is_read or not stream.kept.parts):
        return OFTEN
    if learned.kind == "lookup" and len(learned.parameter) > EXACT_PLACES:
        return TALL
    return ""


class BundledSites:
    """Sites that leave one summary a sample: what their probes were given is kept as one tensor."""

    def __init__(self, sites: Sequence[CapturedSite]) -> None:
        found = [(at, part) for at, site in enumerate(sites) if (part := site.summary) is not None]
        kinds = [(sites[at].dtype, sites[at].tap.probe.device) for at, _ in found]
        chosen = [own for own, kind in zip(found, kinds, strict=True) if kind == kinds[0]]
        self._sites, self._parts = [sites[at] for at, _ in chosen], [part for _, part in chosen]
        self.numbers = [at for at, _ in chosen]
        """Which of the sites they are."""
        self._is_placed = False

    def write(self, probes: Sequence[Tensor], batch: Batch, rows: RowWriter) -> None:
        """Writes the records of a forward pass, if it has left any."""
        own = [probes[at] for at in self.numbers]
        found = [probe.grad for probe in own]
        if all(gradient is None for gradient in found):
            return
        if not self._is_placed:
            self._place(rows)
        whole = [
            torch.zeros_like(probe) if gradient is None else gradient
            for probe, gradient in zip(own, found, strict=True)
        ]
        rows.write_bundle(torch.cat(whole, 1).to(self._sites[0].dtype), batch)
        for probe in own:
            probe.grad = None

    def _place(self, rows: RowWriter) -> None:
        """Says where bundles have the records of each site."""
        start, self._is_placed = 0, True
        for site, part in zip(self._sites, self._parts, strict=True):
            stop = start + math.prod(part.values.shape[1:])
            rows.bundle(site.stream, part, site.dtype, slice(start, stop))
            start = stop
