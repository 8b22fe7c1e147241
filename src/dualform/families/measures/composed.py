"""Measures made of measures: mixtures, products, and images under affine maps."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualform.errors import FamilyError
from dualform.families.checks import holds, require_finite
from dualform.families.measures.empirical import Empirical
from dualform.families.measures.measure import Measure


class Mixture(Measure):
    """h = Σ_i w_i h_i, of a batch of k measures: G(η) = log Σ_i w_i exp G_i(η).

    Empirical measures are not mixed but added: their sum is one of all points.

    Attention chooses among the components, π_i ∝ w_i exp G_i(η), and then reads each.

    >>> from dualform.families import Gaussian
    >>> mixture = Mixture(Gaussian(torch.tensor([[-5.0], [5.0]])))  # two Gaussians, alike in weight
    >>> mixture.mean(torch.tensor([[0.0], [1.0]]))
    tensor([[0.0000],
            [5.9995]])
    """

    def __init__(self, components: Measure, weights: Float[Tensor, " k"] | None = None) -> None:
        super().__init__()
        if isinstance(components, Empirical):
            raise FamilyError(
                f"{components} is not a component; a mixture of points is one Empirical(points, "
                "weights), and two of them are added by +."
            )
        if weights is not None:
            _require_weights(weights)
        self.components = components
        self.hold("weights", weights)

    weights: Tensor | None

    def __repr__(self) -> str:
        return f"Mixture({self.components})"

    @property
    def continuous(self) -> bool:
        """That of the components."""
        return self.components.continuous

    @property
    def exact(self) -> bool:
        """That of the components."""
        return self.components.exact

    @property
    def width(self) -> int:
        """d, that of every component."""
        return self.components.width

    def shares(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch k"]:
        """π_i(η): how probable each component has become."""
        return self._levels(eta).softmax(-1)

    def log_normalizer(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """log Σ_i w_i exp G_i(η)."""
        return self._levels(eta).logsumexp(-1)

    def mean(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Σ_i π_i ∇G_i(η)."""
        means = self.components.mean(eta.unsqueeze(-2))
        return (self.shares(eta).unsqueeze(-1) * means).sum(-2)

    def covariance(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d d"]:
        """The covariances within components, and that of their means."""
        pi, rows = self.shares(eta).unsqueeze(-1), eta.unsqueeze(-2)
        means = self.components.mean(rows)
        apart = means - (pi * means).sum(-2, keepdim=True)
        within = (pi.unsqueeze(-1) * self.components.covariance(rows)).sum(-3)
        return within + apart.mT @ (pi * apart)

    def hvp(
        self, eta: Float[Tensor, "*#batch d"], t: Float[Tensor, "*#batch d"]
    ) -> Float[Tensor, "*batch d"]:
        """∇²G(η) t."""
        return (self.covariance(eta) @ t.unsqueeze(-1)).squeeze(-1)

    def log_base(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """log Σ_i w_i h_i(x)."""
        return self._weighed(self.components.log_base(x.unsqueeze(-2))).logsumexp(-1)

    def sample(
        self,
        eta: Float[Tensor, "*batch d"],
        count: int = 1,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "count *batch d"]:
        """A component by its share, then a draw from it."""
        pi = self.shares(eta)
        chosen = torch.multinomial(pi.reshape(-1, pi.shape[-1]), count, True, generator=generator)
        chosen = chosen.T.reshape(count, *pi.shape[:-1], 1, 1)
        drawn = self.components.sample(eta.unsqueeze(-2), count, generator)
        return torch.take_along_dim(drawn, chosen, dim=-2).squeeze(-2)

    def _levels(self, eta: Tensor) -> Tensor:
        return self._weighed(self.components.log_normalizer(eta.unsqueeze(-2)))

    def _weighed(self, levels: Tensor) -> Tensor:
        """Levels plus log w_i; weights are equal and sum to 1 unless given."""
        if self.weights is None:
            return levels - math.log(levels.shape[-1])
        if levels.shape[-1] != len(self.weights):
            raise FamilyError(
                f"{len(self.weights)} weights do not weigh {levels.shape[-1]} components; give one "
                "for each."
            )
        return levels + self.weights.log()


class Product(Measure):
    """h = h_1 × h_2 × …: independent parts, side by side in η; G is the sum of theirs.

    >>> from dualform.families import Hypercube, Poisson
    >>> Product(Hypercube(1), Poisson(1)).mean(torch.zeros(2))
    tensor([0.5000, 1.0000])
    """

    def __init__(self, *parts: Measure) -> None:
        super().__init__()
        self._parts = nn.ModuleList(parts)

    def __repr__(self) -> str:
        return f"Product({', '.join(map(repr, self.parts))})"

    @property
    def parts(self) -> tuple[Measure, ...]:
        """The measures, side by side."""
        return tuple(part for part in self._parts if isinstance(part, Measure))

    @property
    def excludes(self) -> bool:
        """Whether every part does."""
        return all(part.excludes for part in self.parts)

    @property
    def width(self) -> int:
        """The sum of the parts' widths."""
        return sum(part.width for part in self.parts)

    @property
    def continuous(self) -> bool:
        """Whether every part is."""
        return all(part.continuous for part in self.parts)

    def log_normalizer(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """Σ_i G_i(η_i)."""
        values = [part.log_normalizer(x) for part, x in self._split(eta)]
        return torch.stack(values).sum(0)

    def mean(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Every part's mean."""
        return torch.cat([part.mean(x) for part, x in self._split(eta)], dim=-1)

    def hvp(
        self, eta: Float[Tensor, "*#batch d"], t: Float[Tensor, "*#batch d"]
    ) -> Float[Tensor, "*batch d"]:
        """Every part's product."""
        pairs = zip(self._split(eta), self._split(t), strict=True)
        return torch.cat([part.hvp(x, y) for (part, x), (_, y) in pairs], dim=-1)

    def natural(self, mu: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Every part's natural parameters."""
        return torch.cat([part.natural(x) for part, x in self._split(mu)], dim=-1)

    def conjugate(self, mu: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """Σ_i G_i*(μ_i)."""
        return torch.stack([part.conjugate(x) for part, x in self._split(mu)]).sum(0)

    def entropy(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """The sum of the parts'."""
        return torch.stack([part.entropy(x) for part, x in self._split(eta)]).sum(0)

    def divergence(
        self, eta: Float[Tensor, "*#batch d"], other: Float[Tensor, "*#batch d"]
    ) -> Float[Tensor, "*batch"]:
        """The sum of the parts'."""
        pairs = zip(self._split(eta), self._split(other), strict=True)
        return torch.stack([part.divergence(x, y) for (part, x), (_, y) in pairs]).sum(0)

    def log_base(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """Σ_i log h_i(x_i)."""
        return torch.stack([part.log_base(y) for part, y in self._split(x)]).sum(0)

    def sample(
        self,
        eta: Float[Tensor, "*batch d"],
        count: int = 1,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "count *batch d"]:
        """Every part's draws, side by side."""
        draws = [part.sample(x, count, generator) for part, x in self._split(eta)]
        return torch.cat(draws, dim=-1)

    def _split(self, x: Tensor) -> list[tuple[Measure, Tensor]]:
        pieces = torch.split(x, [part.width for part in self.parts], dim=-1)
        return list(zip(self.parts, pieces, strict=True))


class Pushforward(Measure):
    """The image of h under x ↦ A x + b: G(η) = G_h(Aᵀη) + b·η.

    >>> from dualform.families import Hypercube
    >>> spins = Pushforward(Hypercube(1), 2 * torch.eye(1), -torch.ones(1))  # {−1, 1}
    >>> spins.mean(torch.tensor([0.5])), torch.tensor([0.5]).tanh()
    (tensor([0.4621]), tensor([0.4621]))
    """

    def __init__(
        self,
        measure: Measure,
        A: Float[Tensor, "d e"],
        b: Float[Tensor, " d"] | None = None,
    ) -> None:
        super().__init__()
        if A.ndim != 2 or A.shape[1] != measure.width:
            raise FamilyError(
                f"A of shape {tuple(A.shape)} does not map {measure}, whose points have "
                f"{measure.width} coordinates; give a matrix of shape (d, {measure.width})."
            )
        b = A.new_zeros(A.shape[0]) if b is None else b
        if b.shape != A.shape[:1]:
            raise FamilyError(
                f"b of shape {tuple(b.shape)} cannot be added to A x; give {A.shape[0]} numbers, "
                "as many as A has rows."
            )
        require_finite("A", A)
        self.measure = measure
        self.hold("A", A)
        self.hold("b", b)

    A: Tensor
    b: Tensor

    def __repr__(self) -> str:
        return f"Pushforward({self.measure}, A={tuple(self.A.shape)})"

    @property
    def width(self) -> int:
        """d, the number of rows of A."""
        return self.A.shape[0]

    @property
    def continuous(self) -> bool:
        """That of what was mapped."""
        return self.measure.continuous

    def log_normalizer(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """G_h(Aᵀη) + b·η."""
        return self.measure.log_normalizer(eta @ self.A) + (eta * self.b).sum(-1)

    def mean(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """A ∇G_h(Aᵀη) + b."""
        return self.measure.mean(eta @ self.A) @ self.A.mT + self.b

    def hvp(
        self, eta: Float[Tensor, "*#batch d"], t: Float[Tensor, "*#batch d"]
    ) -> Float[Tensor, "*batch d"]:
        """A ∇²G_h(Aᵀη) Aᵀ t."""
        return self.measure.hvp(eta @ self.A, t @ self.A) @ self.A.mT

    def covariance(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d d"]:
        """A ∇²G_h(Aᵀη) Aᵀ."""
        return self.A @ self.measure.covariance(eta @ self.A) @ self.A.mT

    def entropy(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """That of h at Aᵀη."""
        return self.measure.entropy(eta @ self.A)

    def divergence(
        self, eta: Float[Tensor, "*#batch d"], other: Float[Tensor, "*#batch d"]
    ) -> Float[Tensor, "*batch"]:
        """That of h, from Aᵀη to Aᵀother."""
        return self.measure.divergence(eta @ self.A, other @ self.A)

    def log_base(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """log h(A⁻¹(x − b)), less log |det A| where h has a density; only where A⁻¹ exists."""
        square = self.A.shape[0] == self.A.shape[1]
        volume = torch.linalg.slogdet(self.A).logabsdet if square else self.A.new_tensor(-torch.inf)
        if not holds(volume > -torch.inf):
            raise FamilyError(
                f"A of shape {tuple(self.A.shape)} cannot be undone, so the image has no density; "
                "use a square A of full rank."
            )
        inner = torch.linalg.solve(self.A, (x - self.b).unsqueeze(-1)).squeeze(-1)
        log_h = self.measure.log_base(inner)
        return log_h - volume if self.continuous else log_h

    def sample(
        self,
        eta: Float[Tensor, "*batch d"],
        count: int = 1,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "count *batch d"]:
        """A x + b of draws x."""
        return self.measure.sample(eta @ self.A, count, generator) @ self.A.mT + self.b


def _require_weights(weights: Tensor) -> None:
    if weights.ndim != 1 or not holds((weights >= 0) & weights.isfinite()):
        raise FamilyError(
            f"weights={weights.tolist()} do not weigh components; give a vector of numbers that "
            "are finite and not negative, one for each."
        )
