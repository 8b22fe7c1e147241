"""Every corner of {0, 1}^d once: the family is independent bits, and its mean a sigmoid layer."""

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import FamilyError
from dualform.families.checks import holds
from dualform.families.measures.measure import OfWidth
from dualform.families.tilting import log_average

ROUNDING = 1e-5
"""How far from 0 or 1 a coordinate may be and still be a bit."""


class Hypercube(OfWidth):
    """h counts the corners of {0, 1}^d: G(η) = Σ softplus(η_i), ∇G = sigmoid.

    >>> Hypercube(2).mean(torch.tensor([0.0, -1.0]))
    tensor([0.5000, 0.2689])
    """

    @property
    def exact(self) -> bool:
        """Yes."""
        return True

    def log_normalizer(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """Σ log(1 + exp η_i)."""
        return torch.logaddexp(eta, torch.zeros_like(eta)).sum(-1)

    def mean(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """σ(η)."""
        return eta.sigmoid()

    def hvp(
        self, eta: Float[Tensor, "*#batch d"], t: Float[Tensor, "*#batch d"]
    ) -> Float[Tensor, "*batch d"]:
        """σ(η) σ(−η) t; the product with 1 − σ would lose what is left of it at large η."""
        return eta.sigmoid() * (-eta).sigmoid() * t

    def covariance(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d d"]:
        """diag(σ(η) σ(−η))."""
        return self.hvp(eta, torch.ones_like(eta)).diag_embed()

    def natural(self, mu: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """log μ/(1 − μ); at a corner, an η whose mean is rounded to it."""
        _require_inside(mu)
        kind = torch.finfo(mu.dtype)
        return mu.clamp(min=kind.tiny).log() - (1 - mu).clamp(min=kind.eps / 8).log()

    def conjugate(self, mu: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """Σ μ log μ + (1 − μ) log(1 − μ), 0 at the corners."""
        _require_inside(mu)
        return (torch.xlogy(mu, mu) + torch.xlogy(1 - mu, 1 - mu)).sum(-1)

    def entropy(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """Σ log(1 + exp −|η|) + |η| σ(−|η|): no term is negative."""
        size = eta.abs()
        return (torch.nn.functional.softplus(-size) + size * (-size).sigmoid()).sum(-1)

    def divergence(
        self, eta: Float[Tensor, "*#batch d"], other: Float[Tensor, "*#batch d"]
    ) -> Float[Tensor, "*batch"]:
        """Σ log of the average of exp((other − η)(x − μ)) over a bit."""
        p, delta = torch.stack([eta.sigmoid(), (-eta).sigmoid()], -1), other - eta
        log_p = torch.stack([eta, -eta], -1)
        t = torch.stack([delta * p[..., 1], -delta * p[..., 0]], -1)
        return log_average(p, torch.nn.functional.logsigmoid(log_p), t).sum(-1)

    def log_base(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """0 at the corners, up to rounding; −∞ elsewhere."""
        bit = x.round().clamp(0, 1)
        corner = ((x - bit).abs() <= ROUNDING).all(-1)
        return x.new_zeros(corner.shape).masked_fill(~corner, -torch.inf)

    def sample(
        self,
        eta: Float[Tensor, "*batch d"],
        count: int = 1,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "count *batch d"]:
        """Independent bits, 1 with probability σ(η)."""
        return torch.bernoulli(eta.sigmoid().expand(count, *eta.shape), generator=generator)


def _require_inside(mu: Tensor) -> None:
    if not holds((mu >= 0) & (mu <= 1)):
        raise FamilyError(
            f"mu has numbers from {float(mu.min()):.4g} to {float(mu.max()):.4g}, but means of "
            "bits lie between 0 and 1."
        )
