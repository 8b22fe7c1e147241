"""The uniform distribution on the unit sphere: the family is von Mises–Fisher."""

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import FamilyError
from dualform.families.bessel import BELOW_ONE, concentration, log_hypergeometric, ratio
from dualform.families.checks import holds
from dualform.families.measures.measure import OfWidth
from dualform.private import standard_gamma

SPHERE = 1e-4
"""How far from length 1 a point may be and still count as one of the sphere (float32, squared)."""


class Sphere(OfWidth):
    """h uniform on ‖x‖ = 1 in R^d: the von Mises–Fisher family, with concentration κ = ‖η‖.

    G(η) = log Γ(d/2) (2/κ)^ν I_ν(κ) with ν = d/2 − 1; its mean points along η. Densities are
    relative to the uniform distribution. In float64 the value is right to 13 digits and the mean
    to 14, in every dimension and from κ = 1e-8 to 1e5; in float32 both are, to its 7. The variance
    along η, about (d − 1)/2κ², is right to 14 decimals: it loses as many digits as κ² has.

    >>> sphere = Sphere(3)
    >>> sphere.mean(torch.tensor([0.0, 0.0, 2.0]))  # coth κ − 1/κ
    tensor([0.0000, 0.0000, 0.5373])
    >>> sphere.mean(torch.tensor([0.0, 0.0, 1e9]))
    tensor([0., 0., 1.])
    """

    @property
    def exact(self) -> bool:
        """Yes."""
        return True

    def log_normalizer(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """log of the average of exp(η·x) over the sphere; 0 at η = 0."""
        return log_hypergeometric(_square(eta), self.width).to(eta.dtype)

    def mean(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """I_{ν+1}(κ)/I_ν(κ) · η/κ."""
        return self._ratio(eta).to(eta.dtype) * eta

    def hvp(
        self, eta: Float[Tensor, "*#batch d"], t: Float[Tensor, "*#batch d"]
    ) -> Float[Tensor, "*batch d"]:
        """R t + R' · 2 (η·t) η, where R η is the mean."""
        R, above = self._ratio(eta), self._ratio(eta, 2)
        exact = eta.double()
        along = (exact * t.double()).sum(-1, keepdim=True) * exact
        return (R * t.double() + R * (above - R) * along).to(eta.dtype)

    def covariance(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d d"]:
        """R I + 2 R' η ηᵀ."""
        R, above = (self._ratio(eta, up).unsqueeze(-1) for up in (0, 2))
        exact = eta.double()
        units = torch.eye(self.width, dtype=torch.float64, device=eta.device)
        outer = exact.unsqueeze(-1) * exact.unsqueeze(-2)
        return (R * units + R * (above - R) * outer).to(eta.dtype)

    def natural(self, mu: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """η along μ, with the κ whose mean is ‖μ‖ long; where that is 1, one that rounds to it."""
        if not holds(mu.double().norm(dim=-1) <= 1 + 4 * torch.finfo(mu.dtype).eps):
            raise FamilyError(
                f"mu has length {float(mu.norm(dim=-1).max()):.4g} somewhere, but means of points "
                "of the sphere lie inside it: ‖mu‖ < 1."
            )
        return super().natural(mu.double()).to(mu.dtype)

    def log_base(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """0 on the sphere, −∞ off it."""
        off = (x.square().sum(-1) - 1).abs() > SPHERE
        return x.new_zeros(off.shape).masked_fill(off, -torch.inf)

    def sample(
        self,
        eta: Float[Tensor, "*batch d"],
        count: int = 1,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "count *batch d"]:
        """Wood's rejection sampler: a cosine along η, and a uniform direction across it."""
        exact = eta.double().expand(count, *eta.shape)
        kappa = exact.norm(dim=-1)
        first = torch.zeros_like(exact)
        first[..., 0] = 1
        axis = torch.where(kappa.unsqueeze(-1) > 0, exact / kappa.unsqueeze(-1), first)
        if self.width == 1:
            return _signs(exact, generator).to(eta.dtype)
        w = _cosines(kappa, self.width, generator).unsqueeze(-1)
        across = _normal(exact, generator)
        across = across - (across * axis).sum(-1, keepdim=True) * axis
        across = across / across.norm(dim=-1, keepdim=True)
        points: Tensor = w * axis + (1 - w**2).clamp(min=0).sqrt() * across
        return points.to(eta.dtype)

    def _ratio(self, eta: Tensor, up: int = 0) -> Tensor:
        return ratio(_square(eta), self.width + up).unsqueeze(-1)

    def _newton(self, mu: Tensor) -> Tensor:
        """κ is one number, whatever the dimension."""
        r = mu.norm(dim=-1, keepdim=True)
        kappa = concentration(r.clamp(max=BELOW_ONE), self.width)
        return torch.where(r > 0, mu / torch.where(r > 0, r, 1), 0) * kappa

    def _step(self, eta: Tensor, mu: Tensor) -> Tensor:
        """Across η the variance is R, along it R + 2 R' κ²: no matrix is inverted."""
        R, above = self._ratio(eta), self._ratio(eta, 2)
        s, missing = _square(eta).unsqueeze(-1), mu - self.mean(eta)
        along = (missing * eta).sum(-1, keepdim=True) * eta / torch.where(s > 0, s, 1)
        return (missing - along) / R + along / (R + R * (above - R) * s)


def _square(eta: Tensor) -> Tensor:
    """κ², in float64: it overflows float32 long before κ does."""
    return eta.double().square().sum(-1)


def _normal(like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)


def _signs(eta: Tensor, generator: torch.Generator | None) -> Tensor:
    """The sphere of one dimension is {−1, 1}."""
    return 2 * torch.bernoulli((2 * eta).sigmoid(), generator=generator) - 1


def _cosines(kappa: Tensor, d: int, generator: torch.Generator | None) -> Tensor:
    """w = x·η/κ, of density ∝ exp(κw) (1 − w²)^{(d−3)/2}, by rejection from Wood's envelope."""
    b = (d - 1) / (2 * kappa + (4 * kappa**2 + (d - 1) ** 2).sqrt())
    x0 = (1 - b) / (1 + b)
    c = kappa * x0 + (d - 1) * torch.log1p(-(x0**2))
    w, waiting = torch.zeros_like(kappa), torch.ones_like(kappa, dtype=torch.bool)
    while waiting.any():
        z = _beta((d - 1) / 2, kappa, generator)
        proposal = (1 - (1 + b) * z) / (1 - (1 - b) * z)
        level = kappa * proposal + (d - 1) * torch.log1p(-x0 * proposal) - c
        taken = (
            level
            >= torch.rand(
                kappa.shape, dtype=kappa.dtype, device=kappa.device, generator=generator
            ).log()
        )
        w = torch.where(waiting & taken, proposal, w)
        waiting = waiting & ~taken
    return w


def _beta(half: float, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Beta(half, half), from two gammas."""
    shape = torch.full_like(like, half)
    x, y = (standard_gamma(shape, generator=generator) for _ in range(2))
    return x / (x + y)
