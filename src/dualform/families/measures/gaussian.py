"""N(m, Σ): the family is N(m + Ση, Σ), and attention over it is linear."""

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import FamilyError
from dualform.families.checks import holds, require_finite
from dualform.families.measures.measure import Measure


class Gaussian(Measure):
    """h = N(m, Σ): G(η) = m·η + ½ ηᵀΣη, and ∇G(η) = m + Ση is a linear layer.

    Σ is the identity unless given. Leading dimensions of m are a batch of Gaussians.

    >>> gaussian = Gaussian(torch.tensor([1.0, 0.0]), torch.tensor([[2.0, 0.0], [0.0, 3.0]]))
    >>> gaussian.mean(torch.tensor([1.0, 1.0]))
    tensor([3., 3.])
    """

    def __init__(
        self,
        mean: Float[Tensor, "*batch d"],
        covariance: Float[Tensor, "*batch d d"] | None = None,
    ) -> None:
        super().__init__()
        if covariance is None:
            covariance = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
        _require_square(mean, covariance)
        require_finite("mean", mean)
        require_finite("covariance", covariance)
        _cholesky(covariance)
        self.hold("m", mean)
        self.hold("Sigma", covariance)

    m: Tensor
    Sigma: Tensor

    def __repr__(self) -> str:
        return f"Gaussian(mean={tuple(self.m.shape)})"

    @property
    def width(self) -> int:
        """d."""
        return self.m.shape[-1]

    @property
    def continuous(self) -> bool:
        """Yes."""
        return True

    @property
    def exact(self) -> bool:
        """Yes."""
        return True

    @property
    def root(self) -> Float[Tensor, "*batch d d"]:
        """The lower triangle L with L Lᵀ = Σ."""
        return _cholesky(self.Sigma)

    def log_normalizer(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*shape"]:
        """m·η + ½ ηᵀΣη."""
        return ((self.m + self._spread(eta) / 2) * eta).sum(-1)

    def mean(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*shape d"]:
        """m + Ση."""
        return self.m + self._spread(eta)

    def hvp(
        self, eta: Float[Tensor, "*#batch d"], t: Float[Tensor, "*#batch d"]
    ) -> Float[Tensor, "*shape d"]:
        """Σt."""
        return self._spread(t)

    def covariance(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*shape d d"]:
        """Σ, whatever η."""
        shape = np.broadcast_shapes(eta.shape, self.m.shape)
        return self.Sigma.expand(*shape, shape[-1])

    def natural(self, mu: Float[Tensor, "*batch d"]) -> Float[Tensor, "*shape d"]:
        """Σ⁻¹(μ − m)."""
        eta: Tensor = torch.cholesky_solve((mu - self.m).unsqueeze(-1), self.root)
        return eta.squeeze(-1)

    def entropy(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*shape"]:
        """−½ ηᵀΣη."""
        return -self.divergence(eta, torch.zeros_like(eta))

    def divergence(
        self, eta: Float[Tensor, "*#batch d"], other: Float[Tensor, "*#batch d"]
    ) -> Float[Tensor, "*shape"]:
        """½ ‖Lᵀ(other − η)‖²."""
        white = (self.root.mT @ (other - eta).unsqueeze(-1)).squeeze(-1)
        batch = np.broadcast_shapes(white.shape[:-1], self.m.shape[:-1])
        return (white.square().sum(-1) / 2).expand(batch)

    def log_base(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*shape"]:
        """The logarithm of the Gaussian density."""
        shift = (x - self.m).unsqueeze(-1)
        white: Tensor = torch.linalg.solve_triangular(self.root, shift, upper=False)
        volume = self.root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return -white.square().sum((-2, -1)) / 2 - volume - self.width / 2 * math.log(2 * math.pi)

    def sample(
        self,
        eta: Float[Tensor, "*batch d"],
        count: int = 1,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "count *shape d"]:
        """m + Ση + Σ^½ ε."""
        center = self.mean(eta)
        noise = torch.randn(
            (count, *center.shape), dtype=center.dtype, device=center.device, generator=generator
        )
        return center + (self.root @ noise.unsqueeze(-1)).squeeze(-1)

    def _spread(self, eta: Tensor) -> Tensor:
        Sigma = self.Sigma if self.Sigma.dtype == eta.dtype else self.Sigma.double()
        return (Sigma @ eta.to(Sigma.dtype).unsqueeze(-1)).squeeze(-1)


def _require_square(mean: Tensor, covariance: Tensor) -> None:
    d = mean.shape[-1]
    if covariance.shape[-2:] != (d, d):
        raise FamilyError(
            f"a covariance of shape {tuple(covariance.shape)} does not belong to a mean of shape "
            f"{tuple(mean.shape)}; give one of shape (…, {d}, {d})."
        )


def _cholesky(covariance: Tensor) -> Tensor:
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(covariance)
    if not holds(failed == 0):
        raise FamilyError(
            "the covariance is not positive definite; a flat Gaussian is "
            "Pushforward(Gaussian(mean), matrix)."
        )
    return root
