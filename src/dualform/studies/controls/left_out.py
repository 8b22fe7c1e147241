"""How wrong the plain formula gets: coefficients without momentum, without clipping, and neither.

`W_T = W_0 + Σ_t a_t κ_t g_t`: κ is what clipping left of a step's gradient, and a is what
momentum made of it. The formula for plain SGD has −η in the place of both.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.evaluate.ranks import spearman
from dualform.ledger import Book
from dualform.read import Run
from dualform.read.coefficients import Accounting, Span, StepNumbers
from dualform.read.contributions import NO_STEPS, AnswerSums
from dualform.read.grouping import BySample
from dualform.read.scores import Array
from dualform.read.spotlight import Reading
from dualform.read.step_gradients import streams_of
from dualform.read.weights import RowSum, initial_part

EXACT = "with both"
PLAIN = "plain: −η"
SCALED = "−η / (1 − μ)"
VARIANTS = (PLAIN, SCALED, "clipping only", "momentum only", EXACT)
TOP = 10
"""How many of the largest contributions are compared."""


def coefficients(accounting: Accounting, book: Book) -> dict[str, Tensor]:
    """(T + 1,) for each variant: how much a row counts by its step's number."""
    exact, factors = accounting.numbers(book).cpu().numpy(), np.ones(accounting.until + 1)
    factors[1:] = accounting.factors(book)
    rates, kept = (np.zeros(accounting.until + 1) for _ in range(2))
    history = accounting.history(book)
    rates[1:], kept[1:] = (history.hyper[:, history.fields.index(n)] for n in ("lr", "momentum"))
    unclipped = np.divide(exact, factors, out=np.zeros_like(exact), where=factors > 0)
    found = (-rates, -rates / (1 - kept), -rates * factors, unclipped, exact)
    return {name: torch.from_numpy(one) for name, one in zip(VARIANTS, found, strict=True)}


def clipped(accounting: Accounting) -> dict[str, float]:
    """The share of the steps that were clipped, and the mean of what was left of a gradient."""
    factors = accounting.factors(accounting.ledger.info.books[0])
    return {"share": float((factors < 1 - 1e-6).mean()), "left": float(factors.mean())}


def rebuilt_errors(run: Run) -> dict[str, dict[str, float]]:
    """‖W_rebuilt − W_T‖ / ‖W_T − W_0‖ for each variant, by layer: its weight and its bias."""
    source = run.source
    squares: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in VARIANTS}
    for book in source.ledger.info.books:
        first = initial_part(source.accounting, book)
        change = source.weights[book.name].double().cpu() - first
        for name, numbers in coefficients(source.accounting, book).items():
            fold = RowSum(book, streams_of(source.ledger, book), numbers.to(source.device))
            rebuilt = source.reader.reduce(fold, source.until).cpu()
            both = (float((rebuilt - change).norm()), float(change.norm()))
            squares[name].setdefault(book.name.rpartition(".")[0], []).append(both)
    return {
        name: {
            layer: math.hypot(*(miss for miss, _ in books))
            / math.hypot(*(size for _, size in books))
            for layer, books in layers.items()
        }
        for name, layers in squares.items()
    }


def contributions(reading: Reading) -> dict[str, Array]:
    """(samples, queries) for each variant: what the samples contribute to a layer's output."""
    source, (asked,) = reading.source, reading.row_questions
    fold = AnswerSums(asked, NO_STEPS, (BySample(source.numbers),))
    numbers = {book.name: coefficients(source.accounting, book) for book in asked.books}
    found = {}
    for name in VARIANTS:
        steps = {book: StepNumbers(own[name][:, None]) for book, own in numbers.items()}
        sums = fold.over(source.accounting, [Span(1, source.until, dict(steps))])
        found[name] = sums[""][0].cpu().numpy()
    return found


def agreements(found: dict[str, Array]) -> dict[str, dict[str, float]]:
    """How well the contributions of each variant agree with the exact ones, mean over queries.

    >>> exact = np.array([[1.0], [-2.0], [3.0]])
    >>> one = agreements({EXACT: exact, "half": exact / 2, "sizes": abs(exact)})
    >>> one["half"]["ranks"], one["sizes"]["ranks"], round(one["sizes"]["signs"], 2)
    (1.0, 0.5, 0.67)
    """
    exact = found[EXACT]
    return {
        name: {
            "ranks": float(spearman(values, exact).mean()),
            "signs": float((np.sign(values) == np.sign(exact)).mean()),
            "top": _shared(values, exact),
        }
        for name, values in found.items()
        if name != EXACT
    }


def _shared(values: Array, exact: Array) -> float:
    """Which share of the largest contributions is among the largest exact ones."""
    count = min(TOP, len(exact))
    best = (np.argsort(-one, 0, kind="stable")[:count] for one in (values, exact))
    pairs = zip(*(one.T for one in best), strict=True)
    return float(np.mean([len(np.intersect1d(a, b)) / count for a, b in pairs]))


def left_out(run: Run, readings: dict[str, Reading]) -> dict[str, Any]:
    """What is wrong without momentum, without clipping, and without both."""
    return {
        "clipped": clipped(run.source.accounting),
        "errors": rebuilt_errors(run),
        "agreements": {
            layer: agreements(contributions(reading)) for layer, reading in readings.items()
        },
    }
