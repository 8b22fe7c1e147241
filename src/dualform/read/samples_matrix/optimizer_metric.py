"""Contributions in the metric of the optimizer, which moves parameters by very different amounts.

`h` is how far a parameter moves for a gradient of size 1, relative to the learning rate. It is what
the optimizer's memory says, wherever that was kept: no row is read for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dualform.ledger import Book
from dualform.optimizers import (
    BY_ROW,
    History,
    Operator,
    as_operator,
    times,
)
from dualform.read.coefficients import Accounting
from dualform.read.contributions import row_sums
from dualform.read.engine.interface import Partial
from dualform.read.grouping import Grouping
from dualform.read.moves import computable
from dualform.read.replay import kept_moment
from dualform.read.samples_matrix.block_sums import Make
from dualform.read.samples_matrix.columns import Columns
from dualform.read.samples_matrix.coordinates import Coordinates, has_coordinates
from dualform.read.samples_matrix.cost import work_of
from dualform.read.samples_matrix.matrix import SamplesMatrix, by_blocks
from dualform.read.samples_matrix.visit_weights import StepWeights
from dualform.read.step_gradients import step_gradients

MOMENTS = 8
"""At how many of the kept steps the optimizer's memory is looked at."""
SMALLEST = 1e-12


class OptimizerMetric:
    """`C h^(−½)`: contributions in the metric of the optimizer.

    Where a step's coefficients are one for each element, contributions are taken for `h` times the
    gradients, each with its step's learning rate: their change over time is left out, which spares
    applying every step's coefficients to every sample.

    Books that are summarized are in the coordinates of their bases.
    """

    def __init__(self, accounting: Accounting, grouping: Grouping) -> None:
        self.groups, self._accounting, self._grouping = grouping.count, accounting, grouping
        self._sizes: dict[str, Tensor | None] = {}
        self.coordinates: Mapping[str, Coordinates] = {
            book.name: found
            for book in accounting.ledger.info.books
            if book.terms and (found := self._in_coordinates(book)) is not None
        }
        self._exact = SamplesMatrix(accounting, grouping, coordinates=self.coordinates)
        self._rated = self._exact
        """Gradients with each step's learning rate, where a step has more than one coefficient."""
        if not self._by_numbers:
            weights = StepWeights({book.name: self._by_step(book) for book in self.books})
            self._rated = SamplesMatrix(
                accounting, grouping, None, weights, coordinates=self.coordinates
            )

    def _in_coordinates(self, book: Book) -> Coordinates | None:
        """A book that is summarized, in its bases; None for others, and where steps turn it."""
        accounting = self._accounting
        if not has_coordinates(accounting.ledger, book):
            return None
        moved = None if self._by_numbers else self._size(book)
        if moved is None and not self._by_numbers:
            return None
        self._sizes.pop(book.name, None)  # the coordinates have it
        return Coordinates.of(accounting.ledger, book, moved, accounting.device)

    def asked(self, directions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Directions (directions, *shape) as they are asked of each book."""
        found = self.coordinates
        return {n: found[n].asked(d) if n in found else d for n, d in directions.items()}

    @property
    def books(self) -> Sequence[Book]:
        """The parameters it is made of."""
        return self._exact.books

    def columns(self, books: Sequence[Book]) -> Iterator[Columns]:
        """All columns of some books, some at a time; each is valid until the next."""
        if self._by_numbers:
            yield from self._exact.columns(books)
            return
        yield from self._rated.columns([b for b in books if b.name in self.coordinates])
        others = [book for book in books if book.name not in self.coordinates]
        for columns in self._rated.columns([b for b in others if self._size(b) is not None]):
            yield self._stretched(columns)
        for book in (book for book in others if self._size(book) is None):
            yield from self._turned(book)

    def sum_blocks(self, parts: Sequence[Columns], make: Make[Partial]) -> Partial:
        """What the blocks of some parts add up to; a part with a scale is multiplied by it."""
        return (self._exact if self._by_numbers else self._rated).sum_blocks(parts, make)

    def is_large(self, book: Book) -> bool:
        """Whether a book is better gone through some groups at a time."""
        if self._by_numbers:
            return self._exact.is_large(book)
        scaled = book.name in self.coordinates or self._size(book) is not None
        return scaled and self._rated.is_large(book)

    def whole(self, book: Book) -> Columns:
        """All of a book, to be filled."""
        plain = self._by_numbers or book.name in self.coordinates
        found, h = self._exact.whole(book), None if plain else self._size(book)
        return found if h is None else replace(found, scale=found.of(h[None].sqrt())[0])

    def product(self, solved: Sequence[tuple[Columns, Tensor]]) -> Tensor:
        """(groups, queries): `Σ C xᵀ` over some parts, for x (queries, lines, side).

        Row by row where that costs less: each step's rows have one weight.
        """
        found = [self.coordinates.get(part.book.name) for part, _ in solved]
        owners = [
            part.book if own is None else own.book
            for (part, _), own in zip(solved, found, strict=True)
        ]
        books = list({book.name: book for book in owners}.values())
        work = work_of(self._accounting, self._grouping, books, by_numbers=True)
        if not work.row_by_row(queries=len(solved[0][1])):
            return by_blocks(self, solved)
        directions = {book.name: torch.zeros(()) for book in books}
        for (part, x), own in zip(solved, found, strict=True):
            asked = part.back(x) if own is None else own.whole(part.back(x))
            directions[part.book.name] = directions[part.book.name] + asked
        numbers = {book.name: self._by_step(book) for book in books}
        sums = row_sums(self._accounting, directions, self._grouping, books, numbers, by_book=False)
        return torch.from_numpy(sums[""])

    def _by_step(self, book: Book) -> Tensor:
        """(T + 1,): how much each step's rows count, before they are scaled."""
        if self._by_numbers:
            return self._accounting.numbers(book)
        rates = torch.cat([torch.zeros(1, dtype=torch.float64), -self._rates(book)])
        return rates.to(self._accounting.device)

    @property
    def _by_numbers(self) -> bool:
        return self._accounting.rule.by_numbers

    def _turned(self, book: Book) -> Iterator[Columns]:
        """Where a step turns gradients, how far it moves a parameter is seen from both."""
        pairs = zip(self._exact.columns([book]), self._rated.columns([book]), strict=True)
        for columns, rated in pairs:
            moved, gradient = (c.values.square().mean(0).sqrt_() for c in (columns, rated))
            h = torch.where(gradient > 0, moved / gradient, 1.0).clamp_min_(SMALLEST)
            yield _divided(columns, h.sqrt_())

    def _stretched(self, columns: Columns) -> Columns:
        """Gradients as contributions `h` times as large, divided by `h^(½)`; in place."""
        h = self._size(columns.book)
        assert h is not None
        scale = columns.of(h[None].sqrt())[0]
        columns.values.mul_(scale)
        return replace(columns, scale=scale)

    def _rates(self, book: Book) -> Tensor:
        """(T,): the rate and the factor of each step's rows."""
        history = self._accounting.history(book)
        by_row = torch.from_numpy(history.states == BY_ROW)
        rates = torch.from_numpy(history.hyper[:, history.fields.index("lr")])
        return torch.where(by_row, rates * torch.from_numpy(self._accounting.factors(book)), 0.0)

    def _size(self, book: Book) -> Tensor | None:
        """h, one for each element, or None where a step turns gradients."""
        if book.name not in self._sizes:
            self._sizes[book.name] = self._remembered(book)
        return self._sizes[book.name]

    def _remembered(self, book: Book) -> Tensor | None:
        """h as the optimizer's memory says, at some of the steps at which it was kept."""
        accounting = self._accounting
        history, until = accounting.history(book), accounting.until
        kept = [step for step in accounting.ledger.kept_steps if 0 < step <= until]
        by_row = [step for step in kept if history.states[step - 1] == BY_ROW]
        inverse = []
        for step in by_row[:: -max(1, -(-len(by_row) // MOMENTS))]:  # the last among them
            moved = self._move(book, history, step).diagonal(book.shape)
            if moved is None:
                return None
            inverse.append(moved.square().reciprocal().expand(book.shape))
        if inverse and all(bool(part.isfinite().all()) for part in inverse):
            return torch.stack(inverse).mean(0).rsqrt().clamp_min_(SMALLEST)
        return self._measured(book)

    def _move(self, book: Book, history: History, step: int) -> Operator:
        """How far one more gradient would move a parameter, relative to the rate: h by then."""
        rule = self._accounting.rule.replayed
        hyper = history.at(step, rule.fields)
        W, b, state = kept_moment(self._accounting.reader, rule, book, step)
        with computable(rule):
            transition, _ = rule.transition(hyper, state, W, b, torch.zeros_like(W))
        return as_operator(times(transition.in_the_end(), 1 / (hyper["lr"] or 1.0)))

    def _measured(self, book: Book) -> Tensor | None:
        """`h² = Σ (H g)² / Σ (η g)²` over the steps and their gradients g, where nothing was kept.

        Signs of gradients (Lion, Rprop) also need it: without a gradient, they move nothing.
        """
        accounting, rates = self._accounting, self._rates(book).tolist()
        moved = torch.zeros(book.shape, dtype=torch.float64, device=accounting.device)
        rated = torch.zeros_like(moved)
        for span in accounting.spans([book]):
            operators = span.coefficients[book.name].operators
            found = step_gradients(accounting.reader, book, span.first, span.last)
            for step, gradient in found.items():
                if step in operators:
                    numbers = operators[step].diagonal(book.shape)
                    if numbers is None:
                        return None
                    moved += (numbers.to(gradient) * gradient).square_()
                rated += (rates[step - 1] * gradient).square_()
        return torch.where(rated > 0, moved / rated, 1.0).sqrt_().clamp_min_(SMALLEST)


def _divided(columns: Columns, scale: Tensor | float) -> Columns:
    """The same in other units, in place."""
    columns.values.div_(scale)
    return replace(columns, scale=scale)
