"""Lebesgue's measure on a box: the family is independent truncated exponentials."""

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import FamilyError
from dualform.families.bessel import BELOW_ONE, concentration, log_hypergeometric, ratio
from dualform.families.checks import holds, require_finite
from dualform.families.measures.measure import Measure


class Interval(Measure):
    """h = dx on low < x < high: G(η) = Σ log (exp(high η) − exp(low η)) / η.

    With center c, half width a and z = aη it is c η + log 2a + log sinh(z)/z, smooth at 0.

    >>> Interval(torch.tensor([0.0]), torch.tensor([1.0])).mean(torch.tensor([[0.0], [1e4]]))
    tensor([[0.5000],
            [0.9999]])
    """

    def __init__(self, low: Float[Tensor, " d"], high: Float[Tensor, " d"]) -> None:
        super().__init__()
        require_finite("low", low)
        require_finite("high", high)
        if not holds(low < high):
            raise FamilyError(f"low={low.tolist()} must lie below high={high.tolist()} throughout.")
        self.hold("low", low)
        self.hold("high", high)

    low: Tensor
    high: Tensor

    def __repr__(self) -> str:
        return f"Interval(low={self.low.tolist()}, high={self.high.tolist()})"

    @property
    def width(self) -> int:
        """d, the number of intervals."""
        return self.low.shape[-1]

    @property
    def continuous(self) -> bool:
        """Yes."""
        return True

    @property
    def exact(self) -> bool:
        """Yes."""
        return True

    def log_normalizer(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """Σ c η + log 2a + log sinh(aη)/aη."""
        s = (self.radius * eta).double().square()
        shape = log_hypergeometric(s, 3).to(eta.dtype)  # the sphere's, in three dimensions
        return (self.center * eta + (2 * self.radius).log() + shape).sum(-1)

    def mean(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """c + a (coth z − 1/z)."""
        s = (self.radius * eta).double().square()
        return self.center + self.radius**2 * eta * ratio(s, 3).to(eta.dtype)

    def hvp(
        self, eta: Float[Tensor, "*#batch d"], t: Float[Tensor, "*#batch d"]
    ) -> Float[Tensor, "*batch d"]:
        """a² (1/z² − 1/sinh² z) t."""
        s = (self.radius * eta).double().square()
        R, above = ratio(s, 3), ratio(s, 5)
        return self.radius**2 * (R + s * R * (above - R)).to(eta.dtype) * t

    def covariance(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d d"]:
        """diag of the variances."""
        return self.hvp(eta, torch.ones_like(eta)).diag_embed()

    def natural(self, mu: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """The η whose mean is μ, number by number; at an end, an η whose mean is rounded to it."""
        slack = 4 * torch.finfo(mu.dtype).eps * (self.low.abs() + self.high.abs())
        if not holds((mu >= self.low - slack) & (mu <= self.high + slack)):
            raise FamilyError(
                f"mu must lie inside the box from {self.low.tolist()} to {self.high.tolist()}."
            )
        return super().natural(mu.double()).to(mu.dtype)

    def _newton(self, mu: Tensor) -> Tensor:
        """The mean is that of the sphere of three dimensions, at half the width."""
        shift = (mu - self.center) / self.radius
        return shift.sign() * concentration(shift.abs().clamp(max=BELOW_ONE), 3) / self.radius

    def _step(self, eta: Tensor, mu: Tensor) -> Tensor:
        return (mu - self.mean(eta)) / self.hvp(eta, torch.ones_like(eta))

    def log_base(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """0 in the box, −∞ outside."""
        inside = ((x >= self.low) & (x <= self.high)).all(-1)
        return x.new_zeros(inside.shape).masked_fill(~inside, -torch.inf)

    def sample(
        self,
        eta: Float[Tensor, "*batch d"],
        count: int = 1,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "count *batch d"]:
        """By the inverse of the distribution function, from whichever end is likelier."""
        u = torch.rand((count, *eta.shape), dtype=eta.dtype, device=eta.device, generator=generator)
        rate = 2 * self.radius * eta.abs()
        # the distance from the likelier end, −log(1 − u (1 − e^{−rate})) / rate, is u at rate 0
        far = -torch.log1p(u * torch.expm1(-rate)) / rate.clamp(min=1e-30)
        far = torch.where(rate > 1e-6, far, u)
        from_low = torch.where(eta > 0, 1 - far, far)
        return self.low + 2 * self.radius * from_low

    @property
    def center(self) -> Float[Tensor, " d"]:
        """(low + high) / 2."""
        return (self.low + self.high) / 2

    @property
    def radius(self) -> Float[Tensor, " d"]:
        """(high − low) / 2."""
        return (self.high - self.low) / 2
