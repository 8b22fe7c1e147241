"""Rows become summaries while the backward pass runs: one record a sample, in place of many rows.

`Reducer` does it for the rows of one site. A weight gets `S = Uᵀ (Σ e ⊗ x) V` of each sample, or
where a sample has few rows, these rows along U and V. A table gets its errors along V, at their
places, and an offset or a scale the sum over a sample's rows. Until the bases of a weight are
known, its rows are kept as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec

import torch
from torch import Tensor

from dualform.layers import Site, expand, inner_products, sample_major
from dualform.layers.conv import at_positions, patches
from dualform.ledger import Stream, Term
from dualform.memory.blocks import matrix_shape
from dualform.memory.forms import form_named
from dualform.memory.summary import Bases
from dualform.recording.bases import MOST_ROWS, BookBases
from dualform.recording.keep import ROWS, STEPS, Policy, Summaries
from dualform.recording.pages import Order
from dualform.recording.repeated import Reduced, Repeated, repeated

TRITON = find_spec("triton") is not None
WIDEST = 8192
"""Rows of more numbers than these are added up by torch's own operations."""
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
        self, keys: Tensor, values: Tensor, order: Order, with_reach: bool
    ) -> list[Reduced] | None:
        """The records of a use; None while the bases of its weight are not known.

        The reach of offsets and scales is only added up where it is asked for.
        """
        if self._last and not with_reach:
            records = self._last[0].records(keys, values, order, self.bases)
            if records is not None:
                return records
        samples, stretch = order
        x = sample_major(keys[None], samples, stretch, self.site.key_dims)
        e = sample_major(values[None], samples, stretch, self.site.value_dims)
        wide = _Wide(self.site, self.stream, x, e, samples, with_reach)
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
        again = own and repeated(keys, values, order, found, own[1], self.stream)
        self._last[:] = [again] if again else []
        return found

    def awaits_bases(self) -> bool:
        """Whether a weight or a table has no bases yet."""
        return any(book not in self.bases.found for book in self.large)

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

    def _bases(self, book: str, term: Term, wide: _Wide) -> Bases | None:
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
            return self.bases.of(book, self.policy, errors, inputs)
        assert known is not None
        tall = known.outputs is None and height > self.policy.outputs
        return None if tall and form_named(term.form).has_sides else known

    def _weight(self, book: str, term: Term, wide: _Wide, bases: Bases) -> Reduced | None:
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
        return Reduced(book, seen, x, e, order, 1, 1, bases, self.policy.numbers)

    def _own(self, book: str, bases: Bases, term: Term, wide: _Wide) -> Bases:
        """The bases as far as the block of a row reaches, in the type of the errors."""
        known = self._cast.get((book, wide.dtype))
        if known is None or known[0] is not bases:
            (top, left), (height, width) = term.at, wide.sides(term.groups)
            part = bases.part(slice(top, top + height), slice(left, left + width))
            known = self._cast[book, wide.dtype] = (bases, part.to(wide.dtype))
        return known[1]

    def _summary(self, book: str, term: Term, wide: _Wide, bases: Bases) -> Reduced:
        """(samples, k_o, k_i): `Uᵀ (Σ e ⊗ x) V` of each sample."""
        own, (top, left) = self._own(book, bases, term, wide), term.at
        if term.groups > 1:
            summaries = wide.by_groups(term.groups)
        else:
            summaries = wide.along_errors(own.outputs).mT @ wide.along_inputs(own.inputs)
        height, width = matrix_shape(self.shapes[book], term.view, term.groups)
        if bases.outputs is None:
            summaries = _placed(summaries.mT, top, height).mT
        if bases.inputs is None:
            summaries = _placed(summaries, left, width)
        none, seen = summaries.new_empty(wide.samples, 0), Term("outer", term.view, term.groups)
        numbers = ROWS if bases.is_whole else self.policy.numbers
        return Reduced(book, seen, none, summaries, (wide.samples, 1), 1, 2, bases, numbers)

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
        return Reduced(book, at, keys, along, order, *dims, kept, self.policy.numbers)

    def _totals(self, book: str, term: Term, wide: _Wide) -> Reduced:
        """(samples, numbers): what each sample adds to an offset or a scale."""
        scaled = form_named(term.form).needs_keys
        total = wide.products if scaled else wide.sums
        reach = wide.reach(scaled) if wide.with_reach else None
        none, at = total.new_empty(wide.samples, 0), Term("sum", term.view, term.groups, term.at)
        return Reduced(book, at, none, total, (wide.samples, 1), 1, 1, None, ROWS, reach)


class _Wide:
    """The rows of a use, sample after sample, as its reductions need them."""

    def __init__(
        self, site: Site, stream: Stream, x: Tensor, e: Tensor, samples: int, with_reach: bool
    ) -> None:
        self._stream, self._keys, self._values = stream, x, e
        self.samples, self.with_reach = samples, with_reach
        forms = [form_named(term.form) for term in site.terms.values()]
        self._scaled = any(form.needs_keys and not form.has_width for form in forms)

    @property
    def dtype(self) -> torch.dtype:
        """Of the errors."""
        return self._values.dtype

    @property
    def each(self) -> int:
        """How many rows a sample has."""
        return len(self._values) * self._positions // self.samples

    @property
    def _positions(self) -> int:
        return math.prod(self._stream.values[1:]) if self._stream.layout else 1

    @property
    def errors(self) -> Tensor:
        """(rows, height)."""
        if not self._stream.layout:
            return self._values
        return at_positions(self._stream, self._values).flatten(0, 1)

    @property
    def rows(self) -> Tensor:
        """(rows, width): the inputs; of a convolution its patches."""
        return expand(self._stream, self._keys, None)[0]

    def some(self) -> tuple[Tensor, Tensor]:
        """Errors and inputs of some rows; the patches of a few records only."""
        few = slice(None, None, max(1, len(self._values) * self._positions // MOST_ROWS))
        if not self._stream.layout:
            return self._values[few], self._keys[few]
        errors = at_positions(self._stream, self._values[few])
        return errors.flatten(0, 1), patches(self._stream, self._keys[few]).flatten(0, 1)

    def sides(self, groups: int) -> tuple[int, int]:
        """Height and width of the block that a row adds."""
        if not self._stream.layout:
            return self._values.shape[1], self._keys.shape[1] // groups
        channels = self._stream.keys[0] // self._stream.layout["groups"]
        return self._stream.values[0], channels * math.prod(self._stream.layout["kernel"])

    @property
    def sums(self) -> Tensor:
        """(samples, height): the errors of each sample, added up."""
        return self._totals[0]

    @property
    def products(self) -> Tensor:
        """(samples, height): errors times inputs, number by number, added up."""
        found = self._totals[1]
        return self._added(self.rows * self.errors) if found is None else found

    @cached_property
    def _totals(self) -> tuple[Tensor, Tensor | None]:
        e, x = self._values, self._keys
        plain = self._scaled and not self._stream.layout and x.shape == e.shape
        lies = e.is_cuda and e.is_contiguous() and x.is_contiguous() and e.shape[1] <= WIDEST
        if not (plain and lies and TRITON):
            return self._added(self.errors), None
        from dualform.recording.kernels_sums import sample_sums

        return sample_sums(self._by_sample(e), self._by_sample(x))

    def reach(self, scaled: bool) -> Tensor:
        """(height,): the sizes of all terms, added up."""
        errors = self.errors.abs()
        return self._added(errors * self.rows.abs() if scaled else errors).sum(0)

    def _added(self, rows: Tensor) -> Tensor:
        return self._by_sample(rows).sum(1, dtype=_at_least_32_bits(rows))

    def along_errors(self, U: Tensor | None) -> Tensor:
        """(samples, rows, k_o): errors in the directions of U."""
        errors = self.errors
        return self._by_sample(errors if U is None else errors @ U)

    def along_inputs(self, V: Tensor | None) -> Tensor:
        """(samples, rows, k_i): inputs in the directions of V."""
        if V is None:
            return self._by_sample(self.rows.to(self._values))
        keys = self._keys.to(self._values)
        if not self._stream.layout:
            return self._by_sample(keys @ V)
        return self._by_sample(inner_products(self._stream, keys, V)[:, 0])

    def by_groups(self, groups: int) -> Tensor:
        """(samples, height, width): the whole gradient of each sample, group by group."""
        e, x = self._by_sample(self.errors), self._by_sample(self.rows.to(self._values))
        split = [t.reshape(*t.shape[:2], groups, -1) for t in (e, x)]
        return torch.einsum("npgo,npgi->ngoi", *split).flatten(1, 2)

    def _by_sample(self, rows: Tensor) -> Tensor:
        return rows.reshape(self.samples, -1, rows.shape[-1])


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


def _at_least_32_bits(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


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
