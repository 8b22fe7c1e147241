"""Streams: where the backward pass writes the rows of each use of a parameter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dualform.layers import Rows, Site, stream_name
from dualform.ledger import Declaration, Stream, Term
from dualform.memory.blocks import matrix_shape
from dualform.memory.forms import form_named
from dualform.memory.summary import Bases
from dualform.owners import UNCLEAR, Batch, BatchSamples, Owners, Sighting
from dualform.recording.automatic import Automatic, RowCounts
from dualform.recording.bases import BookBases
from dualform.recording.book_states import BookStates
from dualform.recording.bundle import Bundle, BundlePlace
from dualform.recording.keep import ROWS
from dualform.recording.pages import Order, Page, PagePool, PageWriter
from dualform.recording.reached import Reached
from dualform.recording.reduction import KeptRecords, Reducer, kept_records, reducer_for
from dualform.recording.repeated import Reduced


@dataclass(frozen=True, slots=True)
class OpenStream:
    """A stream whose rows have been seen: its site, and its declaration in the ledger."""

    site: Site
    stream: Stream
    terms: Mapping[str, Term]
    order: int
    """When its layer was first called: backward passes meet streams the other way round."""
    layer: OpenStream | None = None
    """The stream whose rows are summarized here."""
    bases: Bases | None = None
    """What its records are kept in, where they are summaries."""
    numbers: str = ""
    """The policy by which its records are stored; empty for that of its books."""
    rounding: torch.dtype | None = None
    """The type whose rounding the rows have, where it is not that of the records."""
    repeats: bool = False
    """Whether the same keys may come again, with the same samples."""

    @property
    def declaration(self) -> Declaration:
        """What readers must know."""
        return Declaration(self.stream, dict(self.terms))


class StreamWriter:
    """Where the rows of one stream are written."""

    def __init__(self, opened: OpenStream, pool: PagePool) -> None:
        self.opened, self.terms = opened, opened.terms
        self.pages = PageWriter(pool)
        self.reducer: Reducer | None = None
        """What makes summaries of its rows, where no rows are kept."""
        self.kept: KeptRecords | None = None
        """What was last kept of its rows, if somebody learns of it."""
        self.summaries: dict[str, tuple[Any, Any, torch.Size, torch.dtype, StreamWriter]] = {}
        """Where its last summary of each book went: its bases, term, shape and rounding."""
        self.arranged: tuple[Any, int] = (None, 0)
        """The shape of keys and batch last seen, and how many neighbors then shared a sample."""


class Streams:
    """The streams met so far, by site."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        known: Iterable[Declaration],
        keep: Automatic,
        bases: BookBases,
    ) -> None:
        self._parameters, self._keep, self._bases = parameters, keep, bases
        self._summaries: dict[tuple[Any, ...], StreamWriter] = {}
        """Streams of summaries, by their layer, book and bases."""
        self.pool = PagePool()
        self.all: list[StreamWriter] = []
        self._by_site: dict[int, StreamWriter | None] = {}
        self._known = {d.stream.name: d for d in known}
        self._views: dict[str, tuple[str, int]] = {
            book: (term.view, term.groups)
            for d in self._known.values()
            for book, term in d.terms.items()
        }
        self._taken: set[str] = set()
        self.expects_repeats = True
        """Whether samples may come again."""

    def of(self, rows: Rows, order: int) -> StreamWriter | None:
        """The stream of a site; None where its books are already seen in another way."""
        at = id(rows.site)
        if at not in self._by_site:
            self._by_site[at] = self._open(rows, order)
        return self._by_site[at]

    def forget(self) -> None:
        """Frees the memory of all that was written, when nothing more will be."""
        for writer in self.all:
            writer.pages.take()
        self.pool.forget()

    def _open(self, rows: Rows, order: int) -> StreamWriter | None:
        site = rows.site
        assert rows.values is not None
        for book, term in site.terms.items():
            if self._views.setdefault(book, (term.view, term.groups)) != (term.view, term.groups):
                return None
        values = tuple(rows.values.shape[rows.values.ndim - site.value_dims :])
        shared = () if rows.shared is None else tuple(rows.shared.shape)
        stream = Stream(stream_name(site.label), rows.record, values, dict(site.layout), shared)
        for writer in self.all:  # the same use by another call, as x @ W after linear(x, W.T)
            known = writer.opened
            if known.site == site and known.stream == replace(stream, name=known.stream.name):
                return writer
        stream = self._named(site, stream)
        self._taken.add(stream.name)
        repeats = rows.is_data and self.expects_repeats
        given = (site, stream, dict(site.terms), order)
        opened = OpenStream(*given, rounding=rows.rounding, repeats=repeats)
        self.all.append(StreamWriter(opened, self.pool))
        self._choose(self.all[-1])
        return self.all[-1]

    def choose_again(self) -> None:
        """It was decided what is kept of rows: also of layers that were met before."""
        for writer in self.all:
            if writer.opened.layer is None:
                self._choose(writer)

    def _choose(self, writer: StreamWriter) -> None:
        """How rows of a layer are kept."""
        opened, site = writer.opened, writer.opened.site
        keep = self._keep.policies(site.terms)
        writer.opened = replace(opened, numbers=self._keep.numbers(keep))
        shapes = {book: tuple(self._parameters[book].shape) for book in site.terms}
        writer.reducer = reducer_for(site, opened.stream, keep, shapes, self._bases)

    def of_summary(self, layer: StreamWriter, part: Reduced, rounding: torch.dtype) -> StreamWriter:
        """The stream of what is kept of a layer's rows for one book."""
        usual = layer.summaries.get(part.book)
        if usual is not None:
            bases, term, shape, dtype, writer = usual
            alike = part.bases is bases and part.term is term and dtype is rounding
            if alike and part.values.shape[1:] == shape:
                return writer
        U, V = (None, None) if part.bases is None else (part.bases.outputs, part.bases.inputs)
        sides = () if part.bases is None else tuple(0 if t is None else t.shape[1] for t in (U, V))
        width = tuple(part.values.shape[part.values.ndim - part.value_dims :])
        key = (id(layer), part.book, id(U), id(V), width, rounding)
        if key not in self._summaries:
            dims = (part.key_dims, part.value_dims)
            site = Site(part.book, {part.book: part.term}, *dims)
            keys = tuple(part.keys.shape[part.keys.ndim - part.key_dims :]) or (1,)
            of = layer.opened
            stream = Stream("", keys, width, {}, (), of.stream.name, sides)
            own = self._bases.name(part.book, part.bases, by_row=math.prod(keys) > 0)
            name = f"{of.stream.name}~{own}"
            stream = self._named(site, replace(stream, name=name))
            self._taken.add(stream.name)
            given = (site, stream, {part.book: part.term}, of.order, of)
            opened = OpenStream(*given, part.bases, part.numbers, rounding)
            self._summaries[key] = StreamWriter(opened, self.pool)
            self.all.append(self._summaries[key])
        found, shape = self._summaries[key], part.values.shape[1:]
        layer.summaries[part.book] = (part.bases, part.term, shape, rounding, found)
        return found

    def _named(self, site: Site, stream: Stream) -> Stream:
        """The stream under a name that no other has; the one it had in an earlier part of a run."""
        base = stream.name + ("" if stream.layer else self._part(site, stream))
        for number in itertools.count(1):
            named = replace(stream, name=base if number == 1 else f"{base}@{number}")
            known = self._known.get(named.name, Declaration(named, dict(site.terms)))
            if stream.bases and named.name in self._known:
                continue  # a part of the run before this one had bases of its own
            if named.name not in self._taken and known == Declaration(named, dict(site.terms)):
                break
        return named

    def _part(self, site: Site, stream: Stream) -> str:
        """Which part of its parameter a stream is about, where it is not about all of it."""
        book, term = next(iter(site.terms.items()))
        form = form_named(term.form)
        if not form.has_sides or stream.shared:
            return ""
        shape = tuple(self._parameters[book].shape)
        (top, left), (height, width) = term.at, matrix_shape(shape, term.view, term.groups)
        rows = stream.values[0] if stream.layout else math.prod(stream.values)
        columns = math.prod(stream.keys) if form.is_product else width
        part = f"{top}:{top + rows}" if rows < height else ""
        if columns < width and not stream.layout:
            part = f"{part or ':'},{left}:{left + columns}"
        return f"[{part}]" if part else ""


class RowWriter:
    """Writes rows to the pages of their streams.

    It belongs to the training loop: the loop's thread, or autograd's, which works while the loop
    waits in `backward()`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        known: Iterable[Declaration],
        states: BookStates,
        owners: Owners,
        split: Callable[[Batch, Tensor], Batch],
        step: int,
        keep: Automatic,
        bases: BookBases,
    ) -> None:
        self.streams = Streams(parameters, known, keep, bases)
        self._states, self._owners, self._split = states, owners, split
        self.reached = Reached(parameters)
        """Whether a backward pass adds to parameters."""
        self._bundle, self._places = Bundle(), dict[int, BundlePlace]()
        """Passes whose records lie in one tensor, and where that has those of each stream."""
        self.step = step
        """The step under way."""
        self.bytes = 0
        """How much has been written since `take`."""
        self.unnamed: set[int] = set()
        """The batches without ids that left rows in this step."""
        self.learns = False
        """Whether streams remember what was kept of their rows."""
        self.tally: RowCounts | None = None
        """Counts what rows take, where somebody wants to know it."""

    def write(self, rows: Rows, batch: Batch, order: int, seen: Sighting | None) -> None:
        """Writes the rows of one call, where they are needed and their samples are known."""
        stream = self.streams.of(rows, order)
        keys, values = rows.keys, rows.values
        if stream is None or values is None or self._states.by_step.issuperset(stream.terms):
            return
        if not self.reached(stream.terms):
            return
        lead = keys.shape[: keys.ndim - rows.site.key_dims]
        if batch.size < 0:
            batch.begin_inside(lead)
        if batch.size == 0 or not math.prod(lead):
            return
        shape = (keys.shape, batch.size)
        if stream.arranged[0] != shape or seen is not None:
            found = self._owners.of(rows.site, lead, batch, seen)
            if isinstance(found, str):  # then the probe will miss them
                self._owners.refuse(rows.site, found)
                return
            if isinstance(found, Tensor):
                self._write_one_by_one(stream, rows, batch, found)
                return
            stream.arranged = (shape, found)
        self._put(stream, rows, batch, stream.arranged[1])

    def _write_one_by_one(
        self, stream: StreamWriter, rows: Rows, batch: Batch, owners: Tensor
    ) -> None:
        """Rows in the order of their data: each is a sample of a batch of its own."""
        site = rows.site
        assert rows.values is not None
        keys = rows.keys.flatten(0, rows.keys.ndim - site.key_dims - 1)
        values = rows.values.flatten(0, rows.values.ndim - site.value_dims - 1)
        known = (owners >= 0).to(values.device)
        if not known.all():
            if bool(values[~known].any()):
                self._owners.refuse(site, UNCLEAR)
                return
            keys, values, owners = keys[known], values[known], owners[owners >= 0]
        if len(owners):
            rows = rows._replace(keys=keys, values=values)
            self._put(stream, rows, self._split(batch, owners), 1)

    def _put(self, stream: StreamWriter, rows: Rows, batch: Batch, stretch: int) -> None:
        keys, values = rows.keys, rows.values
        assert values is not None
        if keys.dtype != values.dtype and keys.is_floating_point():
            keys = keys.to(values.dtype)  # as the kernel saw it under autocast
        order, parts = (batch.size, stretch), None
        if stream.reducer is not None:
            new = not self._states.new.isdisjoint(stream.terms)
            parts = stream.reducer.reduce(keys, values, order, is_new=new)
        if self.learns:
            waits = stream.reducer is not None and stream.reducer.awaits_bases()
            stream.kept = kept_records(rows.site, parts, keys, values, batch.size, not waits)
        if self.tally is not None:
            self.tally.see(stream.opened.stream, keys, values)
        if parts is None:
            self.write_rows(stream, keys, values, batch, order, rows.shared)
        else:
            self.write_records(stream, parts, batch, rows.rounding or values.dtype)

    def write_rows(
        self,
        stream: StreamWriter,
        keys: Tensor,
        values: Tensor,
        batch: Batch,
        order: Order,
        shared: Tensor | None = None,
    ) -> None:
        """Writes rows as they are, in a known order."""
        if self.tally is not None:
            self.tally.store(ROWS, stream.opened.stream, keys, values)
        samples = self._samples(batch)
        self.bytes += stream.pages.write(self.step, samples, keys, values, order, shared)

    def write_records(
        self, stream: StreamWriter, parts: Iterable[Reduced], batch: Batch, rounding: torch.dtype
    ) -> None:
        """Writes what is kept of the rows of a layer, which were rounded as this type is."""
        samples = self._samples(batch)
        for part in parts:
            summary = self.streams.of_summary(stream, part, rounding)
            if self.tally is not None:
                kept = summary.opened.stream
                self.tally.store(part.numbers, kept, part.keys, part.values)
            given = (part.keys, part.values, part.order)
            self.bytes += summary.pages.write(
                self.step, samples, *given, reach=part.reach, is_ours=part.is_made
            )

    def bundle(self, stream: StreamWriter, part: Reduced, rounding: torch.dtype, at: slice) -> None:
        """From now on, bundles have the summaries of a layer in these columns."""
        summary = self.streams.of_summary(stream, part, rounding)
        height, width = part.values.shape[1:]
        self._places[id(summary)] = BundlePlace(at, (height, width))

    def write_bundle(self, records: Tensor, batch: Batch) -> None:
        """Writes the summaries of all layers that have a place in bundles."""
        self.bytes += self._bundle.add(self.step, self._samples(batch), records)

    def _samples(self, batch: Batch) -> BatchSamples:
        """Whose records are written."""
        if (batch.whole or batch).ids is None:
            self.unnamed.add(batch.number)
        return batch.fixed or batch.fix()

    @property
    def is_midway(self) -> bool:
        """Whether the step under way has rows already."""
        pages = [page for stream in self.streams.all for page in stream.pages.pages[-1:]]
        marks = [*(page.marks for page in pages), self._bundle.marks]
        return any(filled[-1][0] == self.step for filled in marks if filled)

    def peek(self) -> list[tuple[OpenStream, list[Page]]]:
        """The pages of each stream, without taking them."""
        return [
            (stream.opened, [*stream.pages.pages, *self._bundled(stream, self._bundle)])
            for stream in self.streams.all
        ]

    def _bundled(self, stream: StreamWriter, bundle: Bundle) -> Sequence[Page]:
        place = self._places.get(id(stream))
        return () if place is None else bundle.pages(place)

    def take(self) -> tuple[tuple[OpenStream, tuple[Page, ...]], ...]:
        """The pages of each stream; `pool.give_back` them once they are written.

        Rows of the step under way (a checkpoint between backward and step) move to new pages.
        """
        self.bytes = 0
        taken = [(stream, tuple(stream.pages.take())) for stream in self.streams.all]
        for stream, pages in taken:
            for page in pages:
                for at, (step, samples) in enumerate(page.marks):
                    if step == self.step:
                        x, error = page.key_slots[at], page.value_slots[at]
                        shared = page.shared[at] if page.shared else None
                        reach = page.reach.get(at)
                        order = page.slot_type[4]
                        given = (x, error, order, shared, reach)
                        self.bytes += stream.pages.write(step, samples, *given)
        bundle, self._bundle = self._bundle.split(self.step)
        self.bytes += sum(records.nbytes for records in self._bundle.passes)
        return tuple(
            [(stream.opened, (*pages, *self._bundled(stream, bundle))) for stream, pages in taken]
        )

    def forget(self) -> None:
        """Frees the memory of what will not be written."""
        self._bundle.clear()
        self.streams.forget()

    def end_step(self) -> None:
        """The optimizer has stepped; what comes belongs to the next step."""
        self.step += 1
        self.unnamed.clear()
