"""G as an object: its value, its gradient (attention), its Hessian, its conjugate."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualform.families.checks import holds, require_finite, require_temperature, require_width
from dualform.families.measures.empirical import Empirical
from dualform.families.measures.measure import Measure, inner, scaled


class LogNormalizer(nn.Module):
    """G(η) = T log ∫ exp(η·x / T) h(dx), of a base measure h at temperature T.

    Its family is p(x|η) ∝ h(x) exp(η·x / T). Over points, `mean` is softmax attention with keys and
    values x, queries η and scale 1/T.

    >>> from dualform.families import Empirical, LogNormalizer
    >>> k, v, q = torch.randn(7, 16), torch.randn(7, 3), torch.randn(5, 16)
    >>> G = LogNormalizer(Empirical(k), temperature=4.0)
    >>> attention = torch.nn.functional.scaled_dot_product_attention(q, k, v)  # scale 1/√16
    >>> torch.allclose(G.mean(q, v), attention, atol=1e-6)
    True
    >>> torch.allclose(G.mean(q), torch.func.vmap(torch.func.grad(G.value))(q), atol=1e-5)
    True

    η has shape (…, d). `temperature` is a number, or a tensor that broadcasts with (…, 1). Where
    η / T would leave the range of its type, the family has long since concentrated, and T is read
    as the smallest temperature at which it does not.
    """

    def __init__(self, measure: Measure, temperature: float | Tensor = 1.0) -> None:
        super().__init__()
        require_temperature(temperature)
        self.measure = measure
        if isinstance(temperature, Tensor) and not isinstance(temperature, nn.Parameter):
            self.register_buffer("temperature", temperature)
        else:
            self.temperature = temperature

    measure: Measure
    temperature: float | Tensor

    def __repr__(self) -> str:
        return f"LogNormalizer(measure={self.measure}, temperature={self.temperature})"

    def forward(
        self, eta: Float[Tensor, "*batch d"], values: Float[Tensor, "*n m"] | None = None
    ) -> Float[Tensor, "*shape m"]:
        """The mean: as a module, it is attention."""
        return self.mean(eta, values)

    def value(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*shape"]:
        """G(η): the soft maximum of η·x, and the free energy's negative.

        >>> from dualform.families import Empirical
        >>> points = torch.tensor([[1.0], [3.0]])
        >>> LogNormalizer(Empirical(points), temperature=1e-6).value(torch.tensor([2.0]))
        tensor(6.)
        """
        return self.measure.soft_maximum(eta, self._beta(eta))

    def mean(
        self, eta: Float[Tensor, "*batch d"], values: Float[Tensor, "*n m"] | None = None
    ) -> Float[Tensor, "*shape m"]:
        """∇G(η) = E[x]; with values, one row for each point, E[v]: attention.

        >>> from dualform.families import Hypercube
        >>> LogNormalizer(Hypercube(2)).mean(torch.tensor([0.0, 2.0]))  # a sigmoid layer
        tensor([0.5000, 0.8808])
        """
        read = self._fused(eta, values)
        if read is not None:
            return read
        natural = self._natural(eta)
        return (
            self.measure.mean(natural)
            if values is None
            else self.measure.expectation(natural, values)
        )

    def covariance(
        self, eta: Float[Tensor, "*batch d"], values: Float[Tensor, "*n m"] | None = None
    ) -> Float[Tensor, "*shape m d"]:
        """Cov[x], or with values Cov[v, x].

        >>> from dualform.families import Poisson
        >>> LogNormalizer(Poisson(1)).covariance(torch.tensor([0.0]))
        tensor([[1.]])
        """
        natural = self._natural(eta)
        return (
            self.measure.covariance(natural)
            if values is None
            else self.measure.cross_covariance(natural, values)
        )

    def jacobian(
        self, eta: Float[Tensor, "*batch d"], values: Float[Tensor, "*n m"] | None = None
    ) -> Float[Tensor, "*shape m d"]:
        """∂ mean / ∂η = Cov[v, x] / T; without values it is ∇²G(η) = Cov[x] / T, symmetric.

        >>> from dualform.families import Hypercube
        >>> LogNormalizer(Hypercube(1), temperature=0.5).jacobian(torch.tensor([0.0]))
        tensor([[0.5000]])
        """
        return self._beta(eta).unsqueeze(-1) * self.covariance(eta, values)

    def hvp(
        self, eta: Float[Tensor, "*#batch d"], t: Float[Tensor, "*#batch d"]
    ) -> Float[Tensor, "*shape d"]:
        """∇²G(η) t, without the matrix.

        >>> from dualform.families import Hypercube
        >>> LogNormalizer(Hypercube(1)).hvp(torch.tensor([0.0]), torch.tensor([8.0]))
        tensor([2.])
        """
        beta = self._beta(eta)
        return beta * self.measure.hvp(scaled(beta, eta), t)

    def conjugate(self, mu: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """G*(μ) = max_η η·μ − G(η) = −T entropy; G(η) + G*(μ) = η·μ where μ is the mean of η.

        >>> from dualform.families import Gaussian
        >>> LogNormalizer(Gaussian(torch.zeros(1))).conjugate(torch.tensor([3.0]))
        tensor(4.5000)
        """
        require_width("mu", mu, self.measure.width)
        require_finite("mu", mu)
        return self._T(mu).squeeze(-1) * self.measure.conjugate(mu)

    def natural(self, mu: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """∇G*(μ): the η whose mean is μ.

        >>> from dualform.families import Poisson
        >>> LogNormalizer(Poisson(1)).natural(torch.tensor([1.0]))
        tensor([0.])
        """
        require_width("mu", mu, self.measure.width)
        require_finite("mu", mu)
        return self._T(mu) * self.measure.natural(mu)

    def entropy(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*shape"]:
        """−∫ log(dp/dh) dp = (G(η) − η·μ) / T: Shannon's where h counts, else relative to h.

        >>> from dualform.families import Empirical
        >>> LogNormalizer(Empirical(torch.randn(8, 3))).entropy(torch.zeros(3)).exp()
        tensor(8.0000)
        """
        return self.measure.entropy(self._natural(eta))

    def kl(
        self, eta: Float[Tensor, "*#batch d"], other: Float[Tensor, "*#batch d"]
    ) -> Float[Tensor, "*shape"]:
        """KL(p_η ‖ p_other): the Bregman divergence of G, over T.

        >>> from dualform.families import Gaussian
        >>> LogNormalizer(Gaussian(torch.zeros(1))).kl(torch.tensor([0.0]), torch.tensor([2.0]))
        tensor(2.)
        """
        return self.measure.divergence(self._natural(eta), self._natural(other))

    def log_prob(
        self, x: Float[Tensor, "*#batch d"], eta: Float[Tensor, "*#batch d"]
    ) -> Float[Tensor, "*shape"]:
        """log p(x|η) = log h(x) + (η·x − G(η)) / T.

        >>> from dualform.families import Hypercube
        >>> LogNormalizer(Hypercube(1)).log_prob(torch.tensor([1.0]), torch.tensor([0.0])).exp()
        tensor(0.5000)
        """
        require_width("x", x, self.measure.width)
        natural = self._natural(eta)
        tilt = inner(natural, x) - self.measure.log_normalizer(natural)
        return self.measure.log_base(x) + tilt

    def sample(
        self,
        eta: Float[Tensor, "*batch d"],
        count: int = 1,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "count *shape d"]:
        """`count` draws from p(x|η).

        >>> from dualform.families import Hypercube
        >>> LogNormalizer(Hypercube(2)).sample(torch.tensor([-99.0, 99.0]), count=2)
        tensor([[0., 1.],
                [0., 1.]])
        """
        with torch.no_grad():
            return self.measure.sample(self._natural(eta), count, generator)

    def _fused(self, eta: Tensor, values: Tensor | None) -> Tensor | None:
        """The mean in one pass, where there is one; what it cannot read, the others explain."""
        require_width("eta", eta, self.measure.width)
        if not isinstance(self.measure, Empirical) or isinstance(self.temperature, Tensor):
            return None
        values = self.measure.values if values is None else values
        return self.measure.fused(eta, values, 1 / self.temperature)

    def _natural(self, eta: Tensor) -> Tensor:
        """η / T."""
        return scaled(self._beta(eta), eta)

    def _beta(self, eta: Tensor) -> Tensor:
        """1/T, row by row (…, 1), so that η/T can be squared in its type."""
        require_width("eta", eta, self.measure.width)
        seen = eta.detach()
        if self.measure.excludes:
            seen = seen.masked_fill(seen == -torch.inf, 0)
        size = seen.abs().amax(-1, keepdim=True).double()
        if not holds(size.isfinite()):
            require_finite("eta", seen)
        most = torch.finfo(eta.dtype).max ** 0.5
        return torch.minimum(1 / self._T(size), most / size.clamp(min=1e-18)).to(eta.dtype)

    def _T(self, like: Tensor) -> Tensor:
        """The temperature, to stand beside (…, d)."""
        T = torch.as_tensor(self.temperature, dtype=like.dtype, device=like.device)
        return T if T.ndim else T.unsqueeze(-1)
