"""Support vector regression on a given Gram matrix, solved to optimality by Clarabel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualform.errors import AttentionError

Array = NDArray[np.float64]
GAP = 1e-6
"""The relative duality gap above which a solution is refused."""


@dataclass(frozen=True)
class Regression:
    """max y·β − ε Σ|β| − ½ βᵀGβ over |β| ≤ C, Σβ = 0, the dual of a support vector regression."""

    G: Array
    y: Array
    epsilon: float
    C: float

    @property
    def unit(self) -> float:
        """The size of duals that would fit the largest target by its own feature alone."""
        size = max(float(np.abs(self.y).max()), 1e-300)
        return size / max(float(np.diag(self.G).mean()), 1e-300)

    def at(self, beta: Array, b: float) -> Duals:
        """The objectives there."""
        quadratic = float(beta @ self.G @ beta) / 2
        slack = np.maximum(np.abs(self.y - self.G @ beta - b) - self.epsilon, 0)
        dual = float(self.y @ beta - self.epsilon * np.abs(beta).sum() - quadratic)
        primal = quadratic + self.C * float(slack.sum())
        return Duals(beta, b, primal, dual, self.unit * float(np.abs(self.y).max()))


@dataclass(frozen=True)
class Duals:
    """α − α̃ and b of a regression, and how near they are to the optimum."""

    beta: Array
    """(n,) α − α̃."""
    b: float
    primal: float
    """½ βᵀGβ + C Σ max(|y − Gβ − b| − ε, 0)."""
    dual: float
    size: float
    """What an objective of this problem is measured in."""

    @property
    def gap(self) -> float:
        """primal − dual, relative to the larger of them and the size of the problem."""
        return (self.primal - self.dual) / max(self.primal, abs(self.dual), self.size, 1e-300)


def solve(G: Array, y: Array, epsilon: float, C: float) -> Duals:
    """The regression of y on the features whose Gram matrix is G.

    >>> duals = solve(np.eye(2), np.array([1.0, -1.0]), epsilon=0.1, C=10.0)
    >>> bool(np.allclose(duals.beta, [0.9, -0.9])), duals.gap < 1e-9
    (True, True)
    """
    found = _interior(Regression(G, y, epsilon, C))
    if not abs(found.gap) <= GAP:
        raise AttentionError(
            f"the regression of {len(y)} targets was solved to a duality gap of {found.gap:.1e} "
            f"only, and {GAP:.0e} is asked for; choose a smaller C or a larger epsilon, or bring "
            "the keys nearer to one length."
        )
    return found


def _interior(problem: Regression) -> Duals:
    """The solver's optimum, in units that let it see numbers near 1."""
    unit, size = problem.unit, max(float(np.abs(problem.y).max()), 1e-300)
    G, y = problem.G * unit / size, problem.y / size
    u, b = _minimum(G, y, problem.epsilon / size, problem.C / unit)
    return problem.at((unit * (u - u.mean())).clip(-problem.C, problem.C), b * size)


def _minimum(G: Array, y: Array, epsilon: float, C: float) -> tuple[Array, float]:
    """min ½ uᵀGu − y·u + ε Σt over |u| ≤ t ≤ C, Σu = 0, and the multiplier of the last."""
    clarabel, sparse = _solver()
    n = len(y)
    eye, zero = sparse.identity(n), sparse.csc_matrix((n, n))
    P = sparse.block_diag([sparse.csc_matrix(np.triu(G)), zero], format="csc")
    rows = [
        sparse.hstack([sparse.csc_matrix(np.ones((1, n))), sparse.csc_matrix((1, n))]),
        sparse.hstack([eye, -eye]),
        sparse.hstack([-eye, -eye]),
        sparse.hstack([zero, eye]),
    ]
    A = sparse.vstack(rows, format="csc")
    right = np.concatenate([np.zeros(1 + 2 * n), np.full(n, C)])
    cones = [clarabel.ZeroConeT(1), clarabel.NonnegativeConeT(3 * n)]
    costs = np.concatenate([-y, np.full(n, epsilon)])
    result = clarabel.DefaultSolver(P, costs, A, right, cones, _settings(clarabel)).solve()
    return np.array(result.x[:n]), float(result.z[0])


def _settings(clarabel: Any) -> Any:
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-12
    return settings


def _solver() -> tuple[Any, Any]:
    try:
        import clarabel
        from scipy import sparse
    except ImportError as error:
        raise ImportError(
            "Primal.solve needs the solver Clarabel; install it with: "
            "pip install 'dualform[attention]'"
        ) from error
    return clarabel, sparse
