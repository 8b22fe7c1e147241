"""The counterfactual read: which samples would change an output if they were left out of training.

Accounting says what a sample's rows added. Without it, others would have done part of the same: so
the accounts are solved against each other, `S = Σ (1 + C Cᵀ/λ)⁻¹ C g` over lines of parameters,
with C the samples' contributions to a line and g the target's gradient, averaged over the line
from the first weights to the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dualform.errors import ReadingError, UnknownSampleError
from dualform.read.contributions import Source
from dualform.read.display import attributed_words
from dualform.read.explain import ends, query_batches
from dualform.read.gradients import Gradients
from dualform.read.grouping import BySample
from dualform.read.path import trapezoid
from dualform.read.ridge import Lines, check_memory
from dualform.read.samples_matrix.columns import longest
from dualform.read.samples_matrix.coordinates import has_coordinates
from dualform.read.samples_matrix.matrix import SamplesMatrix, times
from dualform.read.samples_matrix.optimizer_metric import OptimizerMetric
from dualform.read.samples_matrix.visit_weights import StepWeights
from dualform.read.scores import Scores
from dualform.read.spotlight import nothing_by_row
from dualform.read.targets import Asked, Parameters, Target
from dualform.read.weights import attributed_share

PANELS = 4
"""Between how many equal parts of the line gradients are averaged: more would change little."""

OWN = 0.16
"""The mean share of a sample's account that others would not make up for, as measured by
retraining: solving gets the order of samples right, and leaves too little of their size."""


@dataclass(frozen=True, repr=False)
class Influence(Scores):
    """Estimates of how much each target would fall if a sample were left out of training.

    They are no account: they do not add up to the output (see `run.explain`).

    >>> from dualform.testing import tiny_run
    >>> run, model, x = tiny_run()
    >>> run.influence(model, x[:2], target=1).values.shape
    (8, 2)
    """

    method: str = "ridge"
    damping: float = 0.0
    """λ, in units of the mean diagonal of what is inverted; 0 where nothing is."""
    kept: float = 1.0
    """The share of the contributions within the leading directions; 1 if all were used."""
    attributed: float = 1.0
    """The share of the change of the weights that is attributed to samples; 1 if all is."""

    @property
    def note(self) -> str:
        """What they are, and how they were found."""
        damped = f"damped by {self.damping:g} × the mean diagonal, " if self.damping else ""
        return (
            "an estimate of what leaving a sample out would take away, not an account; "
            f"{damped}{self.kept:.0%} of the contributions within the directions kept"
            + (f"; {attributed_words(self.attributed)}" if self.attributed < 1 else "")
        )


@dataclass(frozen=True)
class InfluenceCall:
    """What a method answers: some of the queries, damped and kept as asked."""

    asked: Asked
    model: nn.Module
    queries: Any
    damping: float
    lines: Lines


class Influencer:
    """Answers by any of the methods; keeps what does not depend on the queries."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lines: dict[tuple[str, int | None], Lines] = {}
        self._methods: dict[str, tuple[float, Callable[[InfluenceCall], Tensor]]] = {
            "ridge": (3.0, self._ridge),
            "fisher": (1.0, self._fisher),
            "tracin": (0.0, self._tracin),
            "accounting": (0.0, self._accounting),
        }

    def __call__(
        self,
        model: nn.Module,
        x: Any,
        target: Target,
        method: str,
        damping: float | None,
        rank: int | None,
    ) -> Influence:
        """The scores of all queries, batch by batch."""
        usual, answer = self._method(method)
        chosen = usual if damping is None else damping
        if usual and not chosen > 0:
            raise ReadingError(
                f"damping={damping}: what is inverted must be damped by more than 0; it is given "
                f"in units of the mean diagonal, and is {usual} by default."
            )
        asked, source = Asked(model, x, target), self._source
        if not source.ids:
            raise UnknownSampleError(f"this run knows no samples: {nothing_by_row(source.ledger)}.")
        if method in ("ridge", "fisher"):
            self._check(rank, method == "ridge")
        lines = self._lines.setdefault((method, rank), Lines(rank))
        parts = [
            answer(InfluenceCall(asked, model, queries, chosen, lines))
            for queries in query_batches(asked, source)
        ]
        return Influence(
            source.ids,
            torch.cat(parts, 1).numpy(),
            asked.names,
            None,
            source.labels,
            f"influence ({method})",
            method,
            chosen if usual else 0.0,
            lines.kept,
            self._attributed,
        )

    def _method(self, name: str) -> tuple[float, Callable[[InfluenceCall], Tensor]]:
        if name not in self._methods:
            known = ", ".join(f"'{known}'" for known in self._methods)
            raise ReadingError(f"method='{name}' is not known; there are {known}.")
        return self._methods[name]

    def _check(self, rank: int | None, in_coordinates: bool) -> None:
        """Whether the lines can be inverted, of which the largest is a parameter's longer side."""
        samples = len(self._source.ids)
        if rank is not None and rank < 1:
            raise ReadingError(
                f"rank={rank}: keep at least one direction; {samples:,} and more are exact."
            )
        ledger = self._source.ledger
        books = (b for b in ledger.info.books if b.terms)
        large = [b for b in books if not (in_coordinates and has_coordinates(ledger, b))]
        check_memory(min(samples, max(map(longest, large), default=0)), rank)

    def _ridge(self, call: InfluenceCall) -> Tensor:
        first, last = ends(call.model, self._source)
        directions = trapezoid(call.asked, first, last, call.queries, PANELS)
        asked = self._metric.asked(directions)
        solved = call.lines.solve(self._metric, asked, call.damping)
        return solved.mul_(OWN / call.lines.left(call.damping))

    @cached_property
    def _attributed(self) -> float:
        return attributed_share(self._source.accounting, self._source.weights)

    @cached_property
    def _metric(self) -> OptimizerMetric:
        return OptimizerMetric(self._source.accounting, BySample(self._source.numbers))

    def _fisher(self, call: InfluenceCall) -> Tensor:
        matrix = self._matrix().of_last_visits()
        return call.lines.solve(matrix, self._gradients(call), call.damping)

    def _accounting(self, call: InfluenceCall) -> Tensor:
        return _products(self._matrix(), self._gradients(call))

    def _tracin(self, call: InfluenceCall) -> Tensor:
        """Learning rates in place of coefficients, gradients at the steps that were kept."""
        ledger, until = self._source.ledger, self._source.until
        kept = sorted({*(step for step in ledger.kept_steps if step < until), until})
        parts = [torch.zeros(len(self._source.ids), len(call.queries), dtype=torch.float64)]
        for begin, end in pairwise(kept):
            weights = self._source.weights if end == until else ledger.weights(end)
            point = {book.name: weights[book.name] for book in ledger.info.books}
            directions = gradients_at(call.asked, point, call.queries)
            parts.append(_products(self._matrix(self._rates(begin, end)), directions))
        return torch.stack(parts).sum(0)

    def _rates(self, begin: int, end: int) -> StepWeights:
        """The learning rates of the steps after `begin` up to `end`."""
        accounting, numbers = self._source.accounting, {}
        for book in (book for book in self._source.ledger.info.books if book.terms):
            history = accounting.history(book)
            rates = history.hyper[:, history.fields.index("lr")] * accounting.factors(book)
            numbers[book.name] = torch.zeros(len(rates) + 1, dtype=torch.float64)
            numbers[book.name][begin + 1 : end + 1] = -torch.from_numpy(rates[begin:end])
        return StepWeights(numbers)

    def _gradients(self, call: InfluenceCall) -> Parameters:
        _, last = ends(call.model, self._source)
        return gradients_at(call.asked, last, call.queries)

    def _matrix(self, weights: StepWeights | None = None) -> SamplesMatrix:
        grouping = BySample(self._source.numbers)
        return SamplesMatrix(self._source.accounting, grouping, None, weights)


def gradients_at(asked: Asked, point: Parameters, queries: Any) -> dict[str, Tensor]:
    """(queries, *shape) for each parameter: gradients at one point."""
    return Gradients(asked, list(point)).integrals([(1.0, point)], queries)


def _products(matrix: SamplesMatrix, directions: Parameters) -> Tensor:
    return torch.stack(list(times(matrix, directions).values())).sum(0)
