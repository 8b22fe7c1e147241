"""Counts: h(x) = 1/x! on 0, 1, 2, …; the family is Poisson with rate exp(η)."""

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import FamilyError
from dualform.families.checks import holds
from dualform.families.measures.measure import OfWidth
from dualform.families.tilting import excess


class Poisson(OfWidth):
    """h(x) = Π 1/x_i!: G(η) = Σ exp(η_i), ∇G = exp.

    >>> Poisson(1).log_normalizer(torch.tensor([0.0]))
    tensor(1.)
    """

    @property
    def exact(self) -> bool:
        """Yes."""
        return True

    def log_normalizer(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """Σ exp(η_i)."""
        return eta.exp().sum(-1)

    def mean(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """exp(η)."""
        return eta.exp()

    def hvp(
        self, eta: Float[Tensor, "*#batch d"], t: Float[Tensor, "*#batch d"]
    ) -> Float[Tensor, "*batch d"]:
        """exp(η) t."""
        return eta.exp() * t

    def covariance(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d d"]:
        """diag(exp η)."""
        return eta.exp().diag_embed()

    def natural(self, mu: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """log μ; at 0, of the smallest number."""
        _require_counts(mu)
        return mu.clamp(min=torch.finfo(mu.dtype).tiny).log()

    def conjugate(self, mu: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """Σ μ log μ − μ."""
        _require_counts(mu)
        return (torch.xlogy(mu, mu) - mu).sum(-1)

    def divergence(
        self, eta: Float[Tensor, "*#batch d"], other: Float[Tensor, "*#batch d"]
    ) -> Float[Tensor, "*batch"]:
        """Σ exp(η) (exp(δ) − 1 − δ), δ = other − η."""
        return (eta.exp() * excess(other - eta)).sum(-1)

    def log_base(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """−Σ log x_i!, −∞ where x is no count."""
        count = (x >= 0) & (x == x.floor())
        factorials = torch.lgamma(x.clamp(min=0) + 1)
        return -factorials.masked_fill(~count, torch.inf).sum(-1)

    def sample(
        self,
        eta: Float[Tensor, "*batch d"],
        count: int = 1,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "count *batch d"]:
        """Independent counts of rate exp(η)."""
        return torch.poisson(eta.exp().expand(count, *eta.shape).contiguous(), generator=generator)


def _require_counts(mu: Tensor) -> None:
    if not holds(mu >= 0):
        raise FamilyError(f"mu is {float(mu.min()):.4g} somewhere, but means of counts are ≥ 0.")
