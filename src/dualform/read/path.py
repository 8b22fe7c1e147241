"""The straight line from the first weights to the last, and gradients averaged along it.

`f(W_T) − f(W_0) = ⟨Ḡ, W_T − W_0⟩` with `Ḡ = ∫₀¹ ∇f(W_0 + α (W_T − W_0)) dα`: a change of the output
becomes linear in the change of the weights, and so in the rows that made it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualform.read.gradients import Gradients
from dualform.read.targets import Asked, Parameters

NODES = 8
"""How many points are looked at in each panel of the line."""
HALVINGS = 16
"""How often a panel may be halved."""
PIECES = 512
"""In how many panels a query may need to be halved at once; beyond, it is no matter of kinks."""
SHARE = 16
"""A panel is good enough if it misses this part of what the whole line may."""


@dataclass(frozen=True)
class LineGradients:
    """Averaged gradients of some queries, and how well they account for the change of the target.

    `initial` and `final` are the targets at both ends of the line; `explained` is `⟨Ḡ, W_T − W_0⟩`.
    """

    directions: dict[str, Tensor]
    """(queries, *shape) for each parameter: Ḡ."""
    initial: Tensor
    final: Tensor
    explained: Tensor

    @property
    def completeness(self) -> Tensor:
        """(queries,): `|explained − change| / |change|`, what the integration missed."""
        change = self.final - self.initial
        return (self.explained - change).abs() / change.abs().clamp_min(1e-300)


def along_line(
    asked: Asked, first: Parameters, last: Parameters, queries: Sequence[int], tolerance: float
) -> LineGradients:
    """Integrates by Gauss and Legendre, in panels that are halved where they miss a change.

    Networks with kinks are smooth in pieces. A panel with a kink misses part of the target's change
    from its begin to its end, which is known; so only such panels are halved, query by query.
    """
    line = _Line(Gradients(asked, list(first)), asked, first, last)
    initial, final = (asked.values(p, queries) for p in (first, last))
    directions = {name: p.new_zeros(len(queries), *p.shape) for name, p in first.items()}
    for some in asked.batches(range(len(queries))):
        ends = initial[some], final[some]
        for name, found in line.integral([queries[at] for at in some], *ends, tolerance).items():
            directions[name][some] = found
    return LineGradients(directions, initial, final, _along(directions, line.change))


def trapezoid(
    asked: Asked, first: Parameters, last: Parameters, queries: Sequence[int], panels: int
) -> dict[str, Tensor]:
    """(queries, *shape) for each parameter: Ḡ by the trapezoidal rule, as good as its panels."""
    gradients = Gradients(asked, list(first))
    line = _Line(gradients, asked, first, last)
    weights = [0.5, *[1.0] * (panels - 1), 0.5]
    nodes = [(weight / panels, line.at(node / panels)) for node, weight in enumerate(weights)]
    return gradients.integrals(nodes, queries)


@dataclass(frozen=True)
class _Panel:
    """A part of the line, the queries that it is looked at for, and their targets at its ends."""

    begin: float
    end: float
    queries: Tensor
    before: Tensor
    after: Tensor

    def of(self, chosen: Tensor) -> _Panel:
        """The panel for some of its queries."""
        parts = (t[chosen] for t in (self.queries, self.before, self.after))
        return _Panel(self.begin, self.end, *parts)


@dataclass
class _Sums:
    """What the panels that are good enough add up to."""

    total: dict[str, Tensor]
    allowed: Tensor
    """(queries,): how much of the change may be missed."""

    def __post_init__(self) -> None:
        self._missed = torch.zeros_like(self.allowed)

    def take(self, found: Parameters, queries: Tensor, gaps: Tensor, chosen: Tensor) -> None:
        """Adds the chosen ones of some queries' gradients, and what they miss."""
        _add(self.total, found, queries, chosen)
        self._missed.index_add_(0, queries[chosen], gaps[chosen])

    def done(self, rest: Sequence[_Panel], gaps: Tensor) -> Tensor:
        """(queries,): which could take the rest as it is, or have to, since it is too much."""
        open_ = torch.cat([panel.queries for panel in rest])
        pieces = torch.bincount(open_, minlength=len(gaps))
        return ((self._missed + gaps).abs() <= self.allowed) | (pieces > PIECES)


class _Line:
    """Integrates gradients between two sets of parameters."""

    def __init__(
        self, gradients: Gradients, asked: Asked, first: Parameters, last: Parameters
    ) -> None:
        self._gradients, self._asked, self._first = gradients, asked, first
        self.change = {name: last[name] - first[name] for name in first}

    def integral(
        self, queries: Sequence[int], initial: Tensor, final: Tensor, tolerance: float
    ) -> dict[str, Tensor]:
        """(queries, *shape) for each parameter: Ḡ."""
        sums = _Sums(self._zeros(queries), self._allowed(initial, final, tolerance))
        panels = [_Panel(0.0, 1.0, torch.arange(len(queries)), initial, final)]
        for halving in range(HALVINGS + 1):
            open_ = self._zeros(queries)
            gaps = torch.zeros_like(initial)
            rest = [self._looked_at(panel, queries, sums, open_, gaps) for panel in panels]
            done = sums.done(rest, gaps) | (halving == HALVINGS)
            sums.take(open_, torch.arange(len(queries)), gaps, done)
            panels = [half for p in rest for half in self._halves(p.of(~done[p.queries]), queries)]
            if not panels:
                break
        return sums.total

    def _looked_at(
        self,
        panel: _Panel,
        queries: Sequence[int],
        sums: _Sums,
        open_: dict[str, Tensor],
        gaps: Tensor,
    ) -> _Panel:
        """Adds up where the panel is good enough; elsewhere, notes its sum and what it misses."""
        found = self._gradients.integral(self._points(panel), _of(queries, panel))
        gap = panel.after - panel.before - _along(found, self.change)
        enough = gap.abs() <= sums.allowed[panel.queries] / SHARE
        good = enough | ~gap.isfinite()  # halves of what is no number are none either
        sums.take(found, panel.queries, gap, good)
        _add(open_, found, panel.queries, ~good)
        gaps.index_add_(0, panel.queries[~good], gap[~good])
        return panel.of(~good)

    def _zeros(self, queries: Sequence[int]) -> dict[str, Tensor]:
        return {name: p.new_zeros(len(queries), *p.shape) for name, p in self._first.items()}

    def _allowed(self, initial: Tensor, final: Tensor, tolerance: float) -> Tensor:
        """(queries,): what may be missed of the change, at least what rounding makes of it."""
        rounding = max(torch.finfo(p.dtype).eps for p in self._first.values())
        floor = SHARE * rounding * torch.maximum(initial.abs(), final.abs())
        return torch.maximum(tolerance * (final - initial).abs(), floor)

    def _halves(self, panel: _Panel, queries: Sequence[int]) -> list[_Panel]:
        if not len(panel.queries):
            return []
        middle = (panel.begin + panel.end) / 2
        value = self._asked.values(self.at(middle), _of(queries, panel))
        return [
            _Panel(panel.begin, middle, panel.queries, panel.before, value),
            _Panel(middle, panel.end, panel.queries, value, panel.after),
        ]

    def _points(self, panel: _Panel) -> Iterator[tuple[float, dict[str, Tensor]]]:
        """The weights of the nodes, and the parameters there."""
        width = panel.end - panel.begin
        for node, weight in zip(*np.polynomial.legendre.leggauss(NODES), strict=True):
            yield float(weight) / 2 * width, self.at(panel.begin + float(node + 1) / 2 * width)

    def at(self, alpha: float) -> dict[str, Tensor]:
        """The parameters at a point of the line."""
        change = self.change
        return {name: torch.add(w, change[name], alpha=alpha) for name, w in self._first.items()}


def _of(queries: Sequence[int], panel: _Panel) -> list[int]:
    return [queries[at] for at in panel.queries.tolist()]


def _add(into: dict[str, Tensor], found: Parameters, queries: Tensor, chosen: Tensor) -> None:
    """Adds the chosen ones of some queries' gradients."""
    for name, total in into.items() if bool(chosen.any()) else ():
        at = chosen.to(total.device)
        total.index_add_(0, queries.to(total.device)[at], found[name][at])


def _along(directions: Parameters, change: Parameters) -> Tensor:
    """(queries,): `⟨Ḡ, W_T − W_0⟩`, in float64."""
    parts = [
        (directions[name].double().reshape(-1, step.numel()) @ step.flatten().double()).cpu()
        for name, step in change.items()
    ]
    return torch.stack(parts).sum(0)
