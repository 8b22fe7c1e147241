"""Rows become summaries while the backward pass runs: one record a sample, in place of many rows.

`Reducer` does it for the rows of one site. A weight gets `S = Uᵀ (Σ e ⊗ x) V` of each sample, or
where a sample has few rows, these rows along U and V. A table gets its errors along V, at their
places, and an offset or a scale the sum over a sample's rows, in a basis as well. Until the bases
of a weight are known, its rows are kept as they are, and sums are kept whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dualform.layers import Site, sample_major
from dualform.ledger import Stream, Term
from dualform.memory.blocks import matrix_shape
from dualform.memory.forms import form_named
from dualform.memory.summary import Bases
from dualform.recording.bases import BookBases, offset_directions
from dualform.recording.keep import ROWS, STEPS, SUMMARIES, Policy, Summaries
from dualform.recording.pages import Order
from dualform.recording.repeated import Reduced, Repeated, repeated
from dualform.recording.use_rows import UseRows

LARGEST_IN_GROUPS = 8
"""Weights in groups are kept whole, if they have at most so many times the numbers of a summary."""


@dataclass(frozen=True, slots=True)
class KeptRecords:
    """What was last kept of a stream's rows, without the records themselves."""

    parts: tuple[Reduced, ...]
    """One for each book, with keys and values of no records; none where rows were kept whole."""
    each: int
    """How many records of rows a sample had."""
    dtype: torch.dtype
    settled: bool
    """Whether rows to come are kept in the same way."""


@dataclass(frozen=True)
class Reducer:
    """Makes records of the rows of one site."""

    site: Site
    stream: Stream
    policy: Summaries
    shapes: Mapping[str, tuple[int, ...]]
    """Of the site's parameters."""
    bases: BookBases
    _cast: dict[tuple[str, torch.dtype], tuple[Bases, Bases]] = field(default_factory=dict)
    """The bases of each book, and the same as far as a row reaches, in the type of its errors."""
    _last: list[Repeated] = field(default_factory=list)
    """How the last use was reduced, where the next can be reduced in the same way."""

    def reduce(
        self, keys: Tensor, values: Tensor, order: Order, is_new: bool
    ) -> list[Reduced] | None:
        """The records of a use; None while the bases of its weight are not known.

        Where one of the site's books `is_new`, the reach of offsets and scales is added up, and
        their bases are used at once: none of their rows were kept otherwise yet.
        """
        if self._last and not is_new:
            records = self._last[0].records(keys, values, order, self.bases)
            if records is not None:
                return records
        samples, stretch = order
        x = sample_major(keys[None], samples, stretch, self.site.key_dims)
        e = sample_major(values[None], samples, stretch, self.site.value_dims)
        wide = UseRows(self.site, self.stream, x, e, samples, is_new)
        found = []
        for book, term in self.site.terms.items():
            form = form_named(term.form)
            if not form.has_width:
                found.append(self._totals(book, term, wide))
                continue
            bases = self._bases(book, term, wide)
            if bases is None:
                return None
            if form.has_sides:
                part = self._weight(book, term, wide, bases)
            else:
                part = self._lookup(book, term, keys, values, order, bases)
            if part is None:
                return None
            found.append(part)
        own = self._cast.get((found[0].book, values.dtype))
        sides = wide.sides(1)
        again = own and repeated(keys, values, order, found, own[1], sides, self.stream)
        self._last[:] = [again] if again else []
        return found

    def awaits_bases(self) -> bool:
        """Whether a weight, a table or an offset has no bases yet that it will have."""
        awaited = [*self.large, *(book for book in self.site.terms if self._has_own_basis(book))]
        return any(book not in self.bases.found for book in awaited)

    @property
    def large(self) -> list[str]:
        """The weights and tables that need bases."""
        return [
            book
            for book, term in self.site.terms.items()
            if form_named(term.form).has_width and not self._is_small(book, term)
        ]

    def _is_small(self, book: str, term: Term) -> bool:
        """Whether a weight is kept whole."""
        height, width = matrix_shape(self.shapes[book], term.view, term.groups)
        return height * width <= self.policy.size or term.groups > 1

    def _bases(self, book: str, term: Term, wide: UseRows) -> Bases | None:
        """The bases of a weight, or of a table, whose height is kept whole."""
        height, width = matrix_shape(self.shapes[book], term.view, term.groups)
        if self._is_small(book, term):
            return Bases(None, None)
        known = self.bases.found.get(book)
        is_open = known is None or book in self.bases.stale
        if is_open and not form_named(term.form).has_sides:
            errors, _ = wide.some()
            return self.bases.of(book, self.policy, None, _placed(errors, term.at[1], width))
        if is_open:
            errors, inputs = wide.some()
            errors, inputs = _placed(errors, term.at[0], height), _placed(inputs, term.at[1], width)
            return self.bases.of(
                book, self.policy, errors, inputs, self._offsets_along(term, height)
            )
        assert known is not None
        most = (2 if self.policy.shape is None else 1) * self.policy.size
        tall = math.prod(known.size((height, width))) > most  # bases of a table that is read
        return None if tall and form_named(term.form).has_sides else known

    def _weight(self, book: str, term: Term, wide: UseRows, bases: Bases) -> Reduced | None:
        """A weight's summaries; or its rows along the bases, where these have fewer numbers.

        None for rows that are whole: they are kept as they are.
        """
        height, width = matrix_shape(self.shapes[book], term.view, term.groups)
        k_o, k_i = bases.size((height, width))
        if wide.each * (k_o + k_i) >= k_o * k_i or term.groups > 1:
            return self._summary(book, term, wide, bases)
        if bases.is_whole:
            return None
        own = self._own(book, bases, term, wide)
        e, x = (
            t.flatten(0, 1) for t in (wide.along_errors(own.outputs), wide.along_inputs(own.inputs))
        )
        at = (term.at[0] if bases.outputs is None else 0, term.at[1] if bases.inputs is None else 0)
        seen = Term("outer", term.view, term.groups, at)
        order = (wide.samples, wide.each)
        is_made = own.outputs is not None and own.inputs is not None
        numbers = self.policy.numbers
        return Reduced(book, seen, x, e, order, 1, 1, bases, numbers, is_made=is_made)

    def _own(self, book: str, bases: Bases, term: Term, wide: UseRows) -> Bases:
        """The bases as far as the block of a row reaches, in the type of the errors."""
        known = self._cast.get((book, wide.dtype))
        if known is None or known[0] is not bases:
            (top, left), (height, width) = term.at, wide.sides(term.groups)
            part = bases.part(slice(top, top + height), slice(left, left + width))
            known = self._cast[book, wide.dtype] = (bases, part.to(wide.dtype))
        return known[1]

    def _summary(self, book: str, term: Term, wide: UseRows, bases: Bases) -> Reduced:
        """(samples, k_o, k_i): `Uᵀ (Σ e ⊗ x) V` of each sample."""
        own, (top, left) = self._own(book, bases, term, wide), term.at
        summaries = wide.by_groups(term.groups) if term.groups > 1 else wide.summaries(own)
        height, width = matrix_shape(self.shapes[book], term.view, term.groups)
        if bases.outputs is None:
            summaries = _placed(summaries.mT, top, height).mT
        if bases.inputs is None:
            summaries = _placed(summaries, left, width)
        none, seen = summaries.new_empty(wide.samples, 0), Term("outer", term.view, term.groups)
        order, numbers = (wide.samples, 1), self.policy.numbers
        return Reduced(book, seen, none, summaries, order, 1, 2, bases, numbers)

    def _lookup(
        self, book: str, term: Term, keys: Tensor, values: Tensor, order: Order, bases: Bases
    ) -> Reduced:
        """Each row's place, and its error along V."""
        V = bases.part(slice(None), slice(term.at[1], term.at[1] + values.shape[-1])).inputs
        along = values if V is None else values @ V.to(values)
        kept = Bases(None, bases.inputs)
        at = Term(
            "lookup", term.view, term.groups, (term.at[0], 0 if V is not None else term.at[1])
        )
        dims = (self.site.key_dims, 1)
        numbers = ROWS if kept.is_whole else self.policy.numbers
        return Reduced(book, at, keys, along, order, *dims, kept, numbers, is_made=False)

    def _offsets_along(self, weight: Term, height: int) -> list[str]:
        """The offsets that are kept along the errors of a weight."""
        if self.policy.offsets != SUMMARIES:
            return []
        return [
            book
            for book, term in self.site.terms.items()
            if self._is_offset(book) and not form_named(term.form).needs_keys
            if self.shapes[book] == (height,) and term.at[0] == weight.at[0]
        ]

    def _is_offset(self, book: str) -> bool:
        """Whether a book is a bias or a normalization."""
        wide = form_named(self.site.terms[book].form).has_width
        return not wide and len(self.shapes[book]) < 2

    def _has_own_basis(self, book: str) -> bool:
        """Whether an offset is kept in a basis of its own, unless it gets that of a weight."""
        if self.policy.offsets != SUMMARIES or not self._is_offset(book):
            return False
        beside_whole = [
            other
            for other, term in self.site.terms.items()
            if form_named(term.form).has_width and self._is_small(other, term)
        ]
        too_large = math.prod(self.shapes[book]) > offset_directions(self.policy)
        return too_large and not beside_whole

    def _totals(self, book: str, term: Term, wide: UseRows) -> Reduced:
        """(samples, numbers): what each sample adds to an offset or a scale; or that along U."""
        scaled = form_named(term.form).needs_keys
        bases = self._offset_bases(book, term, wide, scaled)
        reach = wide.reach(scaled) if wide.is_new else None
        at = Term("sum", term.view, term.groups, term.at)
        if bases is None:
            total = wide.products if scaled else wide.sums
            none = total.new_empty(wide.samples, 0)
            return Reduced(book, at, none, total, (wide.samples, 1), 1, 1, None, ROWS, reach)
        top, height = term.at[0], wide.sides(1)[0]
        assert bases.outputs is not None
        U = bases.outputs[top : top + height]
        if scaled:
            total = wide.products @ U.to(wide.products)
        else:
            total = wide.along_errors(U.to(wide.dtype)).sum(1)
        if reach is not None:
            reach = reach @ U.abs().to(reach)
        none, at = total.new_empty(wide.samples, 0), replace(at, at=(0, 0))
        order, numbers = (wide.samples, 1), self.policy.numbers
        return Reduced(book, at, none, total[..., None], order, 1, 2, bases, numbers, reach)

    def _offset_bases(self, book: str, term: Term, wide: UseRows, scaled: bool) -> Bases | None:
        """The basis of an offset or a scale; None while it is not known, or where there is none."""
        known = self.bases.found.get(book)
        if self._has_own_basis(book) and (known is None or book in self.bases.stale):
            errors, inputs = wide.some()
            rows = errors * inputs if scaled else errors
            rows = _placed(rows, term.at[0], math.prod(self.shapes[book]))
            return self.bases.of(book, self.policy, rows, None, at_once=wide.is_new)
        return known


def reducer_for(
    site: Site,
    stream: Stream,
    keep: Mapping[str, Policy],
    shapes: Mapping[str, tuple[int, ...]],
    bases: BookBases,
) -> Reducer | None:
    """What makes records of a site's rows; None where its rows are kept as they are.

    If one of its weights asks for rows, they are there for all. Rows that share a matrix, and those
    of large weights in groups, are not summarized.
    """
    asked = {book: keep[book] for book in site.terms if keep[book] != STEPS}
    weights = [book for book in asked if form_named(site.terms[book].form).has_width]
    deciding = [asked[book] for book in weights or asked]
    policy = next((found for found in deciding if isinstance(found, Summaries)), None)
    if policy is None or stream.shared or not all(isinstance(p, Summaries) for p in deciding):
        return None
    for book in weights:
        size = math.prod(shapes[book])
        if site.terms[book].groups > 1 and size > LARGEST_IN_GROUPS * policy.size:
            return None
    terms = {book: term for book, term in site.terms.items() if book in asked}
    return Reducer(replace(site, terms=terms), stream, policy, shapes, bases)


def _placed(rows: Tensor, start: int, size: int) -> Tensor:
    """Rows of a block in the width of the whole."""
    return torch.nn.functional.pad(rows, (start, size - start - rows.shape[-1]))


def kept_records(
    site: Site,
    parts: Sequence[Reduced] | None,
    keys: Tensor,
    values: Tensor,
    samples: int,
    settled: bool,
) -> KeptRecords:
    """What was kept of the rows of a use, without the records."""
    each = math.prod(keys.shape[: keys.ndim - site.key_dims]) // samples
    found = [
        part._replace(
            keys=part.keys.new_empty(0, *part.keys.shape[part.keys.ndim - part.key_dims :]),
            values=part.values.new_empty(
                0, *part.values.shape[part.values.ndim - part.value_dims :]
            ),
            reach=None,
        )
        for part in parts or ()
    ]
    return KeptRecords(tuple(found), each, values.dtype, settled)
