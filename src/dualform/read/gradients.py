"""Gradients of every query, from one backward pass for all of them.

A query's gradient is a sum of rank-one rows like any training gradient, so it is found as a
recorder finds those: the rows of all queries come out of one backward pass. Whether they are each
query's gradient is checked; where they are not, a parameter is differentiated query by query.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dualform.errors import ReadingError
from dualform.layers import (
    Finder,
    Rows,
    Seen,
    Watching,
    by_sample,
    kinds,
    packing_order,
    when_errors_come,
)
from dualform.ledger import Term
from dualform.memory.blocks import Sides, from_matrix, keeps_order, matrix_shape
from dualform.memory.forms import FORMS
from dualform.memory.shared import AnySides, SharedSides
from dualform.memory.views import Region
from dualform.read.samples_matrix.group_sums import add_segments
from dualform.read.targets import Asked, Parameters

PENDING_BYTES = 64 << 20
"""How many bytes of rows are kept before they are added up."""
ROUNDING = 1e-4
"""How far rows may be from a gradient, relative to what they add up, and still be it."""


class GradientPart(NamedTuple):
    """Rows of some queries, as many for each, sorted by query."""

    book: str
    term: Term
    sides: AnySides
    queries: int

    def total(self, shape: Sequence[int], weights: Tensor) -> Tensor:
        """The sum of all rows, each query's times its weight, as the parameter, in float64."""
        count = len(self.sides)
        each = weights.repeat_interleave(count // self.queries).to(self.sides.a.device)
        view, groups = self.term.view, self.term.groups
        return self.sides.totals([slice(0, count)], each, tuple(shape), view, groups)[0]

    def size(self) -> float:
        """The sum of the rows' sizes, `Σ ‖a‖ ‖b‖`."""
        if isinstance(self.sides, SharedSides):
            return float(self.sides.sizes().sum())
        a, b = self.sides.a, self.sides.b
        sizes = torch.ones(len(a), device=a.device) if a.ndim == 1 else a.norm(dim=1)
        if b is not None:
            sizes = sizes * b.flatten(1).norm(dim=1)
        return float(sizes.sum())


@dataclass
class Weighted:
    """Weighted sums of gradients, for some queries: (queries, *shape) for each parameter.

    Rows are collected, and turned into gradients when there are many.
    """

    directions: dict[str, Tensor]
    _pending: dict[tuple[Any, ...], list[Any]] = field(default_factory=dict)
    """(queries, rows of each, …) of both sides, by book, term and size of the blocks."""
    _bytes: int = 0

    def add(self, part: GradientPart, weight: float) -> None:
        """Takes rows, `weight` times."""
        if isinstance(part.sides, SharedSides):
            sides = replace(part.sides, plain=replace(part.sides.plain, a=part.sides.a * weight))
            _add_rows(self.directions[part.book], sides, part.term)
            return
        a, b = part.sides.a, part.sides.b
        if a.ndim == 1:  # places of a table cannot be scaled, what is added there can
            assert b is not None
            b = b * weight
        else:
            a = a * weight
        split = [None if t is None else _by_query(t, part.queries) for t in (a, b)]
        sizes = [None if t is None else t.shape[1:] for t in (a, b)]
        self._pending.setdefault((part.book, part.term, *sizes), []).append((split[0], split[1]))
        self._bytes += a.nbytes + (0 if b is None else b.nbytes)
        if self._bytes > PENDING_BYTES:
            self.settle()

    def settle(self) -> None:
        """Adds up what is pending."""
        for (book, term, *_), parts in self._pending.items():
            _add_sums(self.directions[book], parts, term)
        self._pending.clear()
        self._bytes = 0


def _by_query(rows: Tensor, queries: int) -> Tensor:
    return rows.reshape(queries, len(rows) // queries, *rows.shape[1:])


def _add_sums(into: Tensor, parts: Sequence[tuple[Tensor, Tensor | None]], term: Term) -> None:
    """Adds the sums of rows to gradients (queries, *shape)."""
    a = torch.cat([a for a, _ in parts], 1)
    b = [b for _, b in parts if b is not None]
    sides = Sides(a.flatten(0, 1), torch.cat(b, 1).flatten(0, 1) if b else None, term.at)
    _add_rows(into, sides, term)


def _add_rows(into: Tensor, sides: AnySides, term: Term) -> None:
    """The same for rows that are sorted by query."""
    shape = tuple(into.shape[1:])
    height, width = matrix_shape(shape, term.view, term.groups)
    counts = torch.full((len(into),), len(sides) // len(into))
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
        self._find, self._kinds = Finder(self._parameters), kinds()
        packing_order(self._model, self._find)
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
        parts = self._rows(queries)
        if len(queries) not in self._direct:
            self._direct[len(queries)] = self._unexplained(parts, queries)
        direct = self._direct[len(queries)]
        for part in parts:
            if part.book not in direct:
                total.add(part, weight)
        if direct:
            self._add_directly(weight, queries, total, sorted(direct))

    def _unexplained(self, parts: Sequence[GradientPart], queries: Sequence[int]) -> set[str]:
        """The parameters whose rows are not their gradients.

        What is asked is summed with a random weight for each query: rows that were taken for those
        of another query would have the same plain sum, but not this one.
        """
        generator = torch.Generator().manual_seed(len(queries))
        weights = torch.randn(len(queries), dtype=torch.float64, generator=generator)
        with _differentiable():
            asked = self._asked.asked_of(self._asked.output(self._model, queries), queries)
            value = (asked * weights.to(asked)).sum()
        gradients = self._gradients(value, list(self._parameters))
        gaps = {name: gradient.double() for name, gradient in gradients.items()}
        sizes = dict.fromkeys(gradients, 0.0)
        for part in parts:
            gaps[part.book] = gaps[part.book] - part.total(gaps[part.book].shape, weights)
            sizes[part.book] += part.size()
        return {name for name, gap in gaps.items() if float(gap.norm()) > ROUNDING * sizes[name]}

    def _rows(self, queries: Sequence[int]) -> list[GradientPart]:
        """The rows of all queries."""
        parts: list[GradientPart] = []
        hooks: list[RemovableHandle | None] = []

        def add(use: Seen, errors: Sequence[Tensor | None]) -> None:
            with torch.no_grad():  # now, while the graph of a computed weight is still there
                for rows in use.rows(errors):
                    parts.extend(self._parts(rows, len(queries)))

        def take(use: Seen) -> None:
            hooks.append(when_errors_come(use, partial(add, use)))

        try:
            with _differentiable():
                watching = Watching(self._find, self._kinds, take)
                output = self._asked.output(self._model, queries, watching)
                value = self._asked.asked_of(output, queries).sum()
            self._backward(value)
            return parts
        finally:
            # The graph's hooks hold uses, whose inputs' history is the graph: a circle that
            # Python does not see, so that it has to be broken by hand.
            for hook in filter(None, hooks):
                hook.remove()
            self._find.recent.clear()

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

    def _parts(self, rows: Rows, queries: int) -> Iterable[GradientPart]:
        """A use's rows by query; none where no dimension counts queries."""
        found = by_sample(rows, queries, self._asked.axis)
        if found is None:
            return
        for book, term in rows.site.terms.items():
            sides: AnySides = FORMS[term.form].rows(*found, term.groups, term.at)
            if rows.shared is not None:
                which = torch.zeros(len(sides), dtype=torch.long, device=sides.a.device)
                sides = SharedSides(Sides(sides.a, sides.b), rows.shared.detach()[None], which)
            yield GradientPart(book, term, sides, queries)

    def _add_directly(
        self, weight: float, queries: Sequence[int], total: Weighted, names: Sequence[str]
    ) -> None:
        for at, query in enumerate(queries):
            with _differentiable():
                value = self._asked.asked_of(self._asked.output(self._model, [query]), [query])[0]
            for name, gradient in self._gradients(value, names).items():
                total.directions[name][at].add_(gradient, alpha=weight)


@contextmanager
def _differentiable() -> Iterator[None]:
    """With gradients, also through recurrent layers in evaluation mode, which cuDNN refuses."""
    with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        yield
