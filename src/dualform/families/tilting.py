"""log Σ p e^t for Σ p t = 0: what a divergence is, without the difference that would cancel."""

import torch
from torch import Tensor

TERMS = 18
"""Of the series of e^t − 1 − t, for |t| ≤ 1: as many as float64 can tell."""
FAR = 20.0
"""Beyond this e^t is no longer added up as it is."""


def log_average(p: Tensor, log_p: Tensor, t: Tensor) -> Tensor:
    """log Σ_j p_j exp(t_j) over the last dimension, where Σ p_j t_j = 0: never below 0.

    It is log(1 + Σ p (e^t − 1 − t)), a sum of what is not negative.

    >>> p, t = torch.tensor([0.5, 0.5]), torch.tensor([1e-6, -1e-6])
    >>> log_average(p, p.log(), t)  # ½ Var t
    tensor(5.0000e-13)
    """
    near = t.amax(-1, keepdim=True) <= FAR
    close = torch.log1p((p * excess(torch.where(near, t, 0))).sum(-1))
    far = (log_p + torch.where(near, 0, t)).logsumexp(-1)
    return torch.where(near.squeeze(-1), close, at_least_zero(far))


def excess(t: Tensor) -> Tensor:
    """e^t − 1 − t ≥ 0, to all digits.

    >>> excess(torch.tensor([1e-5, 1.0]))
    tensor([5.0000e-11, 7.1828e-01])
    """
    small = t.abs() <= 1
    inner = torch.where(small, t, 0)
    series = torch.ones_like(t)
    for n in range(TERMS, 2, -1):
        series = 1 + inner / n * series
    return torch.where(small, inner.square() / 2 * series, torch.expm1(t) - t)


def at_least_zero(x: Tensor) -> Tensor:
    """x, without what rounding took it below 0; its derivatives stay those of x.

    >>> at_least_zero(torch.tensor([-1e-9, 2.0]))
    tensor([0., 2.])
    """
    return x - x.detach().clamp(max=0)
