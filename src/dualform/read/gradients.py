"""Gradients of every query, from one backward pass for all of them.

A query's gradient is a sum of rank-one rows like any training gradient, so it is found as a
recorder finds those: the rows of all queries come out of one backward pass. Whether they are each
query's gradient is checked; where they are not, a parameter is differentiated query by query.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dualform.errors import ReadingError
from dualform.layers import (
    Finder,
    RowCollector,
    SampleRows,
    kinds,
    packing_order,
)
from dualform.ledger import Term
from dualform.memory.blocks import Sides, from_matrix, keeps_order, matrix_shape
from dualform.memory.forms import FORMS
from dualform.memory.shared import SharedSides
from dualform.memory.views import Region
from dualform.read.samples_matrix.group_sums import add_segments
from dualform.read.targets import Asked, Parameters

PENDING_BYTES = 64 << 20
"""How many bytes of rows are kept before they are added up."""
ROUNDING = 1e-4
"""How far rows may be from a gradient, relative to what they add up, and still be it."""


@dataclass
class Weighted:
    """Weighted sums of gradients, for some queries: (queries, *shape) for each parameter.

    Rows are collected, and turned into gradients when there are many.
    """

    directions: dict[str, Tensor]
    _pending: dict[tuple[Any, ...], list[SampleRows]] = field(default_factory=dict)
    """Rows by what they are added to, their site, and the size of keys and values."""
    _bytes: int = 0

    def add(self, rows: SampleRows, weight: float, books: tuple[str, ...]) -> None:
        """Takes what rows say to some books, `weight` times: they are linear in the values."""
        rows = rows._replace(values=rows.values * weight)
        if rows.shared is not None:
            self._add_up(rows, books)
            return
        key = (books, id(rows.site), rows.keys.shape[1:], rows.values.shape[1:])
        self._pending.setdefault(key, []).append(rows)
        self._bytes += rows.keys.nbytes + rows.values.nbytes
        if self._bytes > PENDING_BYTES:
            self.settle()

    def settle(self) -> None:
        """Adds up what is pending."""
        for (books, *_), pending in self._pending.items():
            keys, values = (
                torch.cat([self._by_query(t) for t in side], 1).flatten(0, 1)
                for side in ([rows.keys for rows in pending], [rows.values for rows in pending])
            )
            self._add_up(pending[0]._replace(keys=keys, values=values), books)
        self._pending.clear()
        self._bytes = 0

    def _by_query(self, rows: Tensor) -> Tensor:
        queries = len(next(iter(self.directions.values())))
        return rows.reshape(queries, len(rows) // queries, *rows.shape[1:])

    def _add_up(self, rows: SampleRows, books: tuple[str, ...]) -> None:
        for book in books:
            _add_rows(self.directions[book], row_blocks(rows, book), rows.site.terms[book])


def row_blocks(rows: SampleRows, book: str) -> Sides | SharedSides:
    """What rows add to one of the parameters that took part in their call."""
    term = rows.site.terms[book]
    sides = FORMS[term.form].rows(rows.keys, rows.values, term.groups, term.at)
    if rows.shared is None:
        return sides
    which = torch.zeros(len(sides), dtype=torch.long, device=sides.a.device)
    return SharedSides(Sides(sides.a, sides.b), rows.shared[None], which)


def _size(sides: Sides | SharedSides) -> float:
    """The sum of the rows' sizes, `Σ ‖a‖ ‖b‖`."""
    if isinstance(sides, SharedSides):
        return float(sides.sizes().sum())
    a, b = sides.a, sides.b
    sizes = torch.ones(len(a), device=a.device) if a.ndim == 1 else a.norm(dim=1)
    if b is not None:
        sizes = sizes * b.flatten(1).norm(dim=1)
    return float(sizes.sum())


def _add_rows(into: Tensor, sides: Sides | SharedSides, term: Term) -> None:
    """Adds the sums of rows, sorted by query, to gradients (queries, *shape)."""
    shape = tuple(into.shape[1:])
    height, width = matrix_shape(shape, term.view, term.groups)
    counts = torch.full((len(into),), len(sides.a) // len(into))
    whole = Region.whole(height, width)
    if keeps_order(term.view):
        add_segments(into.view(len(into), height, width), sides, counts, whole)
        return
    dense = into.new_zeros(len(into), height, width)
    add_segments(dense, sides, counts, whole)
    into += torch.stack([from_matrix(m, shape, term.view, term.groups) for m in dense])


class Gradients:
    """Computes gradients of what is asked, at any parameters, on a copy of the model."""

    def __init__(self, asked: Asked, names: Sequence[str]) -> None:
        self._asked, self._model = asked, copy.deepcopy(asked.model).requires_grad_(False)
        for module in self._model.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                module.scale_grad_by_freq = False  # what it scales is no derivative
        known = dict(self._model.named_parameters())
        self._parameters = {name: known[name].requires_grad_() for name in names}
        find = Finder(self._parameters)
        packing_order(self._model, find)
        self._collector = RowCollector(find, kinds(), asked.axis)
        self._direct: dict[int, set[str]] = {}
        """The parameters whose rows are not their gradients, by how many queries are asked.

        Shapes say whose rows they are, and so it depends on the number of queries.
        """

    def integral(
        self, nodes: Iterable[tuple[float, Parameters]], queries: Sequence[int]
    ) -> dict[str, Tensor]:
        """(queries, *shape) for each parameter: `Σ w ∇f(W)` over some weights w and parameters W.

        The queries are few enough for one call of the model.
        """
        directions = self._zeros(len(queries))
        self._add_integral(directions, nodes, queries)
        return directions

    def integrals(
        self, nodes: Sequence[tuple[float, Parameters]], queries: Sequence[int]
    ) -> dict[str, Tensor]:
        """The same for any number of queries."""
        directions, begin = self._zeros(len(queries)), 0
        for batch in self._asked.batches(queries):
            here = slice(begin, begin + len(batch))
            self._add_integral({n: d[here] for n, d in directions.items()}, nodes, batch)
            begin = here.stop
        return directions

    def _zeros(self, queries: int) -> dict[str, Tensor]:
        return {name: p.new_zeros(queries, *p.shape) for name, p in self._parameters.items()}

    @torch.no_grad()
    def _add_integral(
        self,
        directions: dict[str, Tensor],
        nodes: Iterable[tuple[float, Parameters]],
        queries: Sequence[int],
    ) -> None:
        total = Weighted(directions)
        for weight, point in nodes:
            for name, parameter in self._parameters.items():
                parameter.copy_(point[name])
            self._add(weight, queries, total)
        total.settle()

    def _add(self, weight: float, queries: Sequence[int], total: Weighted) -> None:
        with self._collector.rows_of(len(queries)) as found:
            with differentiable():
                value = self._asked.numbers(self._model, queries, self._collector).sum()
            self._backward(value)
        if len(queries) not in self._direct:
            self._direct[len(queries)] = self._unexplained(found, queries)
        direct = self._direct[len(queries)]
        for rows in found:
            books = tuple(book for book in rows.site.terms if book not in direct)
            if books:
                total.add(rows, weight, books)
        if direct:
            self._add_directly(weight, queries, total.directions, sorted(direct))

    def _unexplained(self, found: Sequence[SampleRows], queries: Sequence[int]) -> set[str]:
        """The parameters whose rows are not their gradients.

        What is asked is summed with a random weight for each query: rows that were taken for those
        of another query would have the same plain sum, but not this one.
        """
        generator = torch.Generator().manual_seed(len(queries))
        weights = torch.randn(len(queries), dtype=torch.float64, generator=generator)
        with differentiable():
            asked = self._asked.numbers(self._model, queries)
            value = (asked * weights.to(asked)).sum()
        gradients = self._gradients(value, list(self._parameters))
        gaps = {name: gradient.double() for name, gradient in gradients.items()}
        sizes = dict.fromkeys(gradients, 0.0)
        for rows in found:
            count = len(rows.values)
            each = weights.repeat_interleave(count // len(queries)).to(rows.values.device)
            for book, term in rows.site.terms.items():
                sides, shape = row_blocks(rows, book), tuple(gaps[book].shape)
                (sum_,) = sides.totals([slice(0, count)], each, shape, term.view, term.groups)
                gaps[book] = gaps[book] - sum_
                sizes[book] += _size(sides)
        return {name for name, gap in gaps.items() if float(gap.norm()) > ROUNDING * sizes[name]}

    def _gradients(self, value: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        self._backward(value)
        found = {name: self._parameters[name] for name in names}
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in found.items()}

    def _backward(self, value: Tensor) -> None:
        if not value.requires_grad:
            raise ReadingError(
                "the target cannot be differentiated: nothing connects it with the parameters "
                "(argmax, or a detached tensor?). Ask for a logit, a probability or a loss."
            )
        self._model.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]  # reentrant checkpoints need it

    def _add_directly(
        self, weight: float, queries: Sequence[int], directions: Parameters, names: Sequence[str]
    ) -> None:
        for at, query in enumerate(queries):
            with differentiable():
                value = self._asked.numbers(self._model, [query])[0]
            for name, gradient in self._gradients(value, names).items():
                directions[name][at].add_(gradient, alpha=weight)


@contextmanager
def differentiable() -> Iterator[None]:
    """With gradients, also through recurrent layers in evaluation mode, which cuDNN refuses."""
    with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        yield
