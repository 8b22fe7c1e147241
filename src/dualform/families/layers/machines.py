"""Fields with parameters: restricted Boltzmann machines, and the same given an input."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualform.errors import FamilyError
from dualform.families.layers.fields import Field
from dualform.families.measures import Empirical, Measure


class Boltzmann(nn.Module):
    """A restricted Boltzmann machine over any two measures: a `Field` whose W, b, c are learned.

    >>> from dualform.families import Hypercube
    >>> machine = Boltzmann(Hypercube(6), Hypercube(3))
    >>> machine.sample(5, steps=10).shape
    torch.Size([5, 6])
    """

    def __init__(self, visible: Measure, hidden: Measure, scale: float = 0.01) -> None:
        super().__init__()
        self.visible, self.hidden = visible, hidden
        self.W = nn.Parameter(scale * torch.randn(visible.width, hidden.width))
        self.b, self.c = (nn.Parameter(torch.zeros(part.width)) for part in (visible, hidden))

    def field(self) -> Field:
        """The joint distribution at the present parameters."""
        return Field(self.visible, self.hidden, self.W, self.b, self.c)

    def forward(self, v: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch n"]:
        """E[h | v]: over bits, a sigmoid layer."""
        return self.hidden.mean(self.field().given_visible(v))

    @torch.no_grad()
    def sample(
        self, count: int, *, steps: int = 1000, generator: torch.Generator | None = None
    ) -> Float[Tensor, "count m"]:
        """v after `steps` Gibbs steps from independent units."""
        start = self.visible.sample(self.b, count, generator)
        return self.field().gibbs(start, steps, generator)


class ConditionalRandomField(nn.Module):
    """p(y, h | x) ∝ exp(b(x)·y + c(x)·h + yᵀWh): a field whose biases are linear in the input x.

    Over y of finitely many points (a simplex: classes), p(y | x) is computed exactly.

    >>> from dualform.families import Hypercube
    >>> field = ConditionalRandomField(5, Empirical(torch.eye(3)), Hypercube(4))
    >>> field(torch.randn(2, 5)).shape
    torch.Size([2, 3])
    """

    def __init__(self, inputs: int, visible: Measure, hidden: Measure, scale: float = 0.1) -> None:
        super().__init__()
        self.visible, self.hidden = visible, hidden
        self.W = nn.Parameter(scale * torch.randn(visible.width, hidden.width))
        self.b, self.c = (nn.Linear(inputs, part.width) for part in (visible, hidden))

    def field(self, x: Float[Tensor, "*batch i"]) -> Field:
        """The joint distribution of y and h, given x."""
        return Field(self.visible, self.hidden, self.W, self.b(x), self.c(x))

    def forward(self, x: Float[Tensor, "batch i"]) -> Float[Tensor, "batch points"]:
        """p(y | x) for each point y of the support."""
        if not isinstance(self.visible, Empirical):
            raise FamilyError(
                f"p(y | x) can be listed over points only, and {self.visible} has none; use "
                "field(x).gibbs to draw from it, or Empirical(points)."
            )
        y = self.visible.keys
        field = self.field(x.unsqueeze(-2))
        return (-field.free_energy(y.expand(len(x), *y.shape))).softmax(-1)


class Conditional(nn.Module):
    """p(y | x) ∝ h(y) exp(y·(Wx + b)): a linear layer whose output is a distribution.

    Over bits its mean is a sigmoid layer, over the corners of a simplex softmax, over counts exp.

    >>> from dualform.families import Hypercube
    >>> Conditional(3, Hypercube(2))(torch.zeros(1, 3)).shape
    torch.Size([1, 2])
    """

    def __init__(self, inputs: int, measure: Measure) -> None:
        super().__init__()
        self.measure, self.natural = measure, nn.Linear(inputs, measure.width)

    def forward(self, x: Float[Tensor, "*batch i"]) -> Float[Tensor, "*batch d"]:
        """E[y | x]."""
        return self.measure.mean(self.natural(x))

    def loss(
        self, x: Float[Tensor, "*batch i"], y: Float[Tensor, "*batch d"]
    ) -> Float[Tensor, "*batch"]:
        """G(η) − η·y: the negative log-likelihood but for log h(y), with gradient E[y|x] − y."""
        eta: Tensor = self.natural(x)
        return self.measure.log_normalizer(eta) - (eta * y).sum(-1)
