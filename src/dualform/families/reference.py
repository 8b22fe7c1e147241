"""The family of points, and entmax, one number at a time, in float64.

Slow and plain on purpose: the text against which the rest is tested. A measure that is not made of
points is compared with a fine enough grid of them.

>>> import torch
>>> from dualform.families import reference
>>> G, mean, covariance = reference.moments([[0.0], [1.0]], [1.0, 1.0], [0.0])
>>> round(G, 4), mean, covariance
(0.6931, [0.5], [[0.25]])
"""

import math
from collections.abc import Sequence

Vector = Sequence[float]


def moments(
    points: Sequence[Vector], weights: Vector, eta: Vector
) -> tuple[float, list[float], list[list[float]]]:
    """G(η) = log Σ h_j exp(η·x_j), E[x] and Cov[x].

    >>> moments([[1.0], [3.0]], [1.0, 0.0], [5.0])
    (5.0, [1.0], [[0.0]])
    """
    p, G = _probabilities(points, weights, eta)
    d = range(len(eta))
    mean = [math.fsum(q * x[i] for q, x in zip(p, points, strict=True)) for i in d]
    covariance = [
        [
            math.fsum(
                q * (x[i] - mean[i]) * (x[j] - mean[j]) for q, x in zip(p, points, strict=True)
            )
            for j in d
        ]
        for i in d
    ]
    return G, mean, covariance


def _probabilities(
    points: Sequence[Vector], weights: Vector, eta: Vector
) -> tuple[list[float], float]:
    scores = [math.fsum(a * b for a, b in zip(eta, x, strict=True)) for x in points]
    most = max(s for s, h in zip(scores, weights, strict=True) if h > 0)
    terms = [h * math.exp(s - most) if h > 0 else 0.0 for s, h in zip(scores, weights, strict=True)]
    total = math.fsum(terms)
    return [term / total for term in terms], most + math.log(total)


def entmax(theta: Vector, alpha: float) -> list[float]:
    """p_i = [(α − 1) θ_i − τ]₊^{1/(α−1)}, with τ found by halving; for α > 1.

    >>> [round(p, 4) for p in entmax([2.0, 1.5, -1.0], alpha=2.0)]
    [0.75, 0.25, 0.0]
    """
    low = (alpha - 1) * max(theta) - 1
    high = low + 1
    for _ in range(200):
        tau = (low + high) / 2
        if math.fsum(_powers(theta, alpha, tau)) >= 1:
            low = tau
        else:
            high = tau
    p = _powers(theta, alpha, low)
    return [x / math.fsum(p) for x in p]


def _powers(theta: Vector, alpha: float, tau: float) -> list[float]:
    return [max((alpha - 1) * t - tau, 0.0) ** (1 / (alpha - 1)) for t in theta]
