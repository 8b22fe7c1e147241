"""The rows of one use of a layer, sample after sample, and what is added up of them."""

from __future__ import annotations

import math
from functools import cached_property
from importlib.util import find_spec

import torch
from torch import Tensor

from dualform.layers import Site, expand, inner_products
from dualform.layers.patches import at_positions, patches
from dualform.ledger import Stream
from dualform.memory.forms import form_named
from dualform.memory.summary import Bases
from dualform.recording.bases import MOST_ROWS
from dualform.recording.contraction import errors_along, summaries_of

TRITON = find_spec("triton") is not None
WIDEST = 8192
"""Rows of more numbers than these are added up by torch's own operations."""


class UseRows:
    """The rows of a use, sample after sample, as its reductions need them."""

    def __init__(
        self, site: Site, stream: Stream, x: Tensor, e: Tensor, samples: int, is_new: bool
    ) -> None:
        self._stream, self._keys, self._values = stream, x, e
        self.samples, self.is_new = samples, is_new
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
        return errors_along(self._stream, self._values, U, self.samples)

    def summaries(self, bases: Bases) -> Tensor:
        """(samples, k_o, k_i): `Uᵀ (Σ e ⊗ x) V` of each sample."""
        errors, keys = self.along_errors(bases.outputs), self._keys.to(self._values)
        return summaries_of(self._stream, keys, errors, bases.inputs)

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


def _at_least_32_bits(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
