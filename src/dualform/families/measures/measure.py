"""What a base measure must say of itself, and what follows from that alone."""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import FamilyError

STEPS = 100
HALVINGS = 30


class Measure(ABC):
    """h(dx) with G(η) = log ∫ exp(η·x) h(dx): where an exponential family begins.

    One of your own says its width and G; everything else follows by differentiation, and may be
    given in closed form where there is one.

    >>> class Exponential(Measure):  # Lebesgue's measure on x > 0, for η < 0
    ...     width = 1
    ...     def log_normalizer(self, eta):
    ...         return -(-eta).log().sum(-1)
    >>> Exponential().mean(torch.tensor([-0.5])), Exponential().covariance(torch.tensor([-0.5]))
    (tensor([2.]), tensor([[4.]]))
    """

    @property
    @abstractmethod
    def width(self) -> int:
        """d, the number of natural parameters."""

    @property
    def continuous(self) -> bool:
        """Whether h is a density over space, and not one over points or a surface."""
        return False

    @abstractmethod
    def log_normalizer(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """G(η) = log ∫ exp(η·x) h(dx)."""

    def mean(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """∇G(η) = E[x]."""
        gradient: Tensor = torch.func.grad(lambda x: self.log_normalizer(x).sum())(eta)
        return gradient

    def hvp(
        self, eta: Float[Tensor, "*#batch d"], t: Float[Tensor, "*#batch d"]
    ) -> Float[Tensor, "*batch d"]:
        """∇²G(η) t = Cov[x] t, without the matrix."""
        product: Tensor = torch.func.vjp(self.mean, eta)[1](t)[0]
        return product

    def covariance(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d d"]:
        """∇²G(η) = Cov[x]."""
        units = torch.eye(self.width, dtype=eta.dtype, device=eta.device)
        column = torch.func.vmap(lambda e: self.hvp(eta, e.expand_as(eta)), out_dims=-1)
        matrix: Tensor = column(units)
        return matrix

    def natural(self, mu: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """(∇G)⁻¹(μ): the η whose mean is μ, by Newton's method; differentiable once."""
        with torch.no_grad():
            eta = self._newton(mu)
        return eta + self._step(eta, mu)

    def conjugate(self, mu: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """G*(μ) = max_η η·μ − G(η)."""
        eta = self.natural(mu)
        return (eta * mu).sum(-1) - self.log_normalizer(eta)

    def log_base(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """log h(x), as a density or a probability."""
        raise FamilyError(f"{self} does not say its density log h(x); define `log_base`.")

    def sample(
        self,
        eta: Float[Tensor, "*batch d"],
        count: int = 1,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "count *batch d"]:
        """`count` draws from p(x|η) = h(x) exp(η·x − G(η))."""
        raise FamilyError(f"{self} does not say how to draw from it; define `sample`.")

    def expectation(
        self, eta: Float[Tensor, "*batch d"], values: Float[Tensor, "*n m"]
    ) -> Float[Tensor, "*batch m"]:
        """E[v], for values that belong to the points of a finite support."""
        raise FamilyError(_without_points(self))

    def cross_covariance(
        self, eta: Float[Tensor, "*batch d"], values: Float[Tensor, "*n m"]
    ) -> Float[Tensor, "*batch m d"]:
        """Cov[v, x], for values that belong to the points of a finite support."""
        raise FamilyError(_without_points(self))

    def _step(self, eta: Tensor, mu: Tensor) -> Tensor:
        """Newton's step; along directions in which x does not vary it stays where it is."""
        inverse = torch.linalg.pinv(self.covariance(eta), hermitian=True)
        step: Tensor = inverse @ (mu - self.mean(eta)).unsqueeze(-1)
        return step.squeeze(-1)

    def _newton(self, mu: Tensor) -> Tensor:
        eta = self._start(mu)
        for _ in range(STEPS):
            if self._reached(eta, mu):
                return eta
            eta = self._ascend(eta, mu, self._step(eta, mu))
        raise FamilyError(
            f"no natural parameter was found whose mean is mu, after {STEPS} Newton steps; mu must "
            "lie inside the convex hull of the support, not on its edge or beyond."
        )

    def _start(self, mu: Tensor) -> Tensor:
        """Where Newton's method begins: any η of the family."""
        return torch.zeros_like(mu)

    def _reached(self, eta: Tensor, mu: Tensor) -> bool:
        close = 64 * torch.finfo(mu.dtype).eps
        return bool((self.mean(eta) - mu).abs().max() <= close * (1 + mu.abs().max()))

    def _ascend(self, eta: Tensor, mu: Tensor, step: Tensor) -> Tensor:
        """The longest of η + step, η + step/2, … that does not lower η·μ − G(η), row by row."""

        def height(x: Tensor) -> Tensor:
            return (x * mu).sum(-1, keepdim=True) - self.log_normalizer(x).unsqueeze(-1)

        start, rate = height(eta), torch.ones_like(eta[..., :1])
        slack = 8 * torch.finfo(mu.dtype).eps * (1 + start.abs())
        for _ in range(HALVINGS):
            low = ~(height(eta + rate * step) >= start - slack)
            if not low.any():
                break
            rate = torch.where(low, rate / 2, rate)
        return eta + rate * step


class OfWidth(Measure):
    """A measure that there is one of in each dimension.

    >>> class Counting(OfWidth):
    ...     def log_normalizer(self, eta):
    ...         return eta.exp().sum(-1)
    >>> Counting(3), Counting(3).width
    (Counting(3), 3)
    """

    def __init__(self, width: int) -> None:
        if width < 1:
            raise FamilyError(f"{type(self).__name__}({width}) has no width; it must be 1 or more.")
        self._width = width

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.width})"

    @property
    def width(self) -> int:
        """d: points have d coordinates."""
        return self._width


def _without_points(measure: Measure) -> str:
    return (
        f"values={{one row for each point}} need a measure of points, and {measure} has none; "
        "leave values out, or use Empirical(points)."
    )
