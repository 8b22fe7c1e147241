"""The straight line from the first weights to the last, and gradients averaged along it.

`f(W_T) − f(W_0) = ⟨Ḡ, W_T − W_0⟩` with `Ḡ = ∫₀¹ ∇f(W_0 + α (W_T − W_0)) dα`: a change of the output
becomes linear in the change of the weights, and so in the rows that made it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from dualform.read.gradients import Gradients
from dualform.read.targets import Asked, Parameters

NODES = 8
"""How many points are looked at in each panel of the line."""
PANELS = tuple(2**k for k in range(10))
"""Into how many panels it is cut, until the change of the output is accounted for."""


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
    """Integrates by Gauss and Legendre, in more and more panels where a query still needs them.

    Networks with kinks are smooth only in pieces, and panels serve them better than more nodes.
    """
    gradients = Gradients(asked, list(first))
    change = {name: last[name] - first[name] for name in first}
    initial, final = (asked.values(p, queries) for p in (first, last))
    found = LineGradients(
        {name: p.new_zeros(len(queries), *p.shape) for name, p in first.items()},
        initial,
        final,
        torch.full((len(queries),), torch.nan, dtype=torch.float64),
    )
    for panels in PANELS:
        left = torch.nonzero(~(found.completeness <= tolerance)).flatten().tolist()
        for some in asked.batches(left):
            points = _points(first, change, panels)
            better = gradients.integral(points, [queries[at] for at in some])
            for name, direction in better.items():
                found.directions[name][some] = direction
            found.explained[some] = _along(better, change)
    return found


def _points(
    first: Parameters, change: Parameters, panels: int
) -> Iterator[tuple[float, dict[str, Tensor]]]:
    """The weights of the nodes, and the parameters there."""
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    for panel, (node, weight) in product(range(panels), zip(nodes, weights, strict=True)):
        alpha = (panel + float(node + 1) / 2) / panels
        point = {name: torch.add(w, change[name], alpha=alpha) for name, w in first.items()}
        yield float(weight) / (2 * panels), point


def _along(directions: Parameters, change: Parameters) -> Tensor:
    """(queries,): `⟨Ḡ, W_T − W_0⟩`, in float64."""
    parts = [
        (directions[name].flatten(1).double() @ step.flatten().double()).cpu()
        for name, step in change.items()
    ]
    return torch.stack(parts).sum(0)
