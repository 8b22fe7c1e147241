"""What a base measure must say of itself, and what follows from that alone."""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualform.errors import FamilyError
from dualform.families.tilting import at_least_zero

STEPS = 100
HALVINGS = 30


class Measure(nn.Module, ABC):
    """h(dx) with G(η) = log ∫ exp(η·x) h(dx): where an exponential family begins.

    One of your own says its width and G; everything else follows by differentiation, and may be
    given in closed form where there is one. A measure is a module: what it is made of moves with
    `.to()`, stands in `state_dict()`, and is learned where it was given as an `nn.Parameter`.

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

    @property
    def exact(self) -> bool:
        """Whether G may be asked in float64, whatever type the measure is made in."""
        return False

    @property
    def excludes(self) -> bool:
        """Whether −∞ in η means something: what it belongs to does not happen."""
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
        """(∇G)⁻¹(μ): an η whose mean is μ, by Newton's method; differentiable three times."""
        with torch.no_grad():
            eta = self._newton(mu)
        if not torch.is_grad_enabled():
            return eta
        for _ in range(2):  # one step of Newton's has the first derivative, two have three
            step = self._step(eta, mu)
            eta = eta + step - step.detach()
        return eta

    def conjugate(self, mu: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """G*(μ) = max_η η·μ − G(η)."""
        eta = self.natural(mu)
        return (eta * mu).sum(-1) - self.log_normalizer(eta)

    def soft_maximum(
        self, eta: Float[Tensor, "*batch d"], beta: Float[Tensor, "*batch 1"]
    ) -> Float[Tensor, "*shape"]:
        """log ∫ exp(β η·x) h(dx) / β: G at temperature 1/β."""
        dtype = eta.dtype
        if self.exact and beta.requires_grad:  # in its slope two large numbers cancel
            eta, beta = eta.double(), beta.double()
        return (self.log_normalizer(scaled(beta, eta)) / beta.squeeze(-1)).to(dtype)

    def entropy(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """G(η) − η·∇G(η): −∫ log(dp/dh) dp."""
        wide = eta.double() if self.exact else eta
        return (self.log_normalizer(wide) - inner(wide, self.mean(wide))).to(eta.dtype)

    def divergence(
        self, eta: Float[Tensor, "*#batch d"], other: Float[Tensor, "*#batch d"]
    ) -> Float[Tensor, "*batch"]:
        """KL(p_η ‖ p_other) = G(other) − G(η) − (other − η)·∇G(η)."""
        mine, theirs = (x.double() if self.exact else x for x in (eta, other))
        mu = self.mean(mine)
        both = self.excludes  # −∞ less −∞ is no number
        tilt = inner(theirs, mu) - inner(mine, mu) if both else inner(theirs - mine, mu)
        gap = self.log_normalizer(theirs) - self.log_normalizer(mine) - tilt
        return at_least_zero(gap).to(eta.dtype)

    def hold(self, name: str, value: Tensor | None) -> None:
        """Keep a tensor as part of the module: a parameter stays one, all else is a buffer."""
        if isinstance(value, nn.Parameter):
            self.register_parameter(name, value)
        else:
            self.register_buffer(name, value)

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
            reached = self._reached(eta, mu)
            if bool(reached.all()):
                return eta
            # a row that has arrived stays: at the edge of the support further steps are rounding
            eta = torch.where(reached, eta, self._ascend(eta, mu, self._step(eta, mu)))
        raise FamilyError(
            f"no natural parameter was found whose mean is mu, after {STEPS} Newton steps; mu must "
            "lie inside the convex hull of the support, not on its edge or beyond."
        )

    def _start(self, mu: Tensor) -> Tensor:
        """Where Newton's method begins: any η of the family."""
        return torch.zeros_like(mu)

    def _reached(self, eta: Tensor, mu: Tensor) -> Tensor:
        """(…, 1): which rows have the mean that was asked for, but for rounding."""
        close = 64 * torch.finfo(mu.dtype).eps * (1 + mu.abs().amax(-1, keepdim=True))
        return (self.mean(eta) - mu).abs().amax(-1, keepdim=True) <= close

    def _ascend(self, eta: Tensor, mu: Tensor, step: Tensor) -> Tensor:
        """The longest of η + step, η + step/2, … that does not lower η·μ − G(η), row by row."""

        def height(x: Tensor) -> tuple[Tensor, Tensor]:
            tilt, G = (x * mu).sum(-1, keepdim=True), self.log_normalizer(x).unsqueeze(-1)
            return tilt - G, 1 + tilt.abs() + G.abs()

        rate = torch.ones_like(eta[..., :1])
        (start, size), eps = height(eta), torch.finfo(mu.dtype).eps
        for _ in range(HALVINGS):
            end, grown = height(eta + rate * step)
            low = ~(end >= start - 8 * eps * torch.maximum(size, grown))  # a difference, rounded
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
        super().__init__()
        if width < 1:
            raise FamilyError(f"{type(self).__name__}({width}) has no width; it must be 1 or more.")
        self._width = width

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.width})"

    @property
    def width(self) -> int:
        """d: points have d coordinates."""
        return self._width


def inner(eta: Float[Tensor, "*#batch d"], x: Float[Tensor, "*#batch d"]) -> Tensor:
    """η·x, where −∞ · 0 is 0: what is excluded and does not happen costs nothing.

    >>> inner(torch.tensor([-torch.inf, 2.0]), torch.tensor([0.0, 3.0]))
    tensor(6.)
    """
    return (torch.where((eta == -torch.inf) & (x == 0), 0, eta) * x).sum(-1)


def scaled(beta: Tensor, eta: Tensor) -> Tensor:
    """β η, where −∞ stays what it is, and has no slope in β.

    >>> scaled(torch.tensor([2.0]), torch.tensor([-torch.inf, 3.0]))
    tensor([-inf, 6.])
    """
    never = eta == -torch.inf
    return (beta * eta.masked_fill(never, 0)).masked_fill(never, -torch.inf)


def _without_points(measure: Measure) -> str:
    return (
        f"values={{one row for each point}} need a measure of points, and {measure} has none; "
        "leave values out, or use Empirical(points)."
    )
