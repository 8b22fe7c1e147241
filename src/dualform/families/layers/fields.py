"""Two families that are each other's parameters: restricted Boltzmann machines and their kin."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import FamilyError
from dualform.families.checks import holds
from dualform.families.measures import Measure


@dataclass(frozen=True, eq=False)
class Field:
    """p(v, h) ∝ h_v(dv) h_h(dh) exp(b·v + c·h + vᵀWh): v given h and h given v are families.

    Given v the natural parameters of h are c + Wᵀv, and the other way round; over bits the means
    are sigmoids, over the corners of a simplex softmax. b and c may be batched.

    >>> from dualform.families import Hypercube
    >>> field = Field(Hypercube(2), Hypercube(1), torch.ones(2, 1), torch.zeros(2), torch.zeros(1))
    >>> field.hidden.mean(field.given_visible(torch.ones(2)))  # σ(2)
    tensor([0.8808])
    """

    visible: Measure
    hidden: Measure
    W: Float[Tensor, "m n"]
    b: Float[Tensor, "*batch m"]
    c: Float[Tensor, "*batch n"]

    def __post_init__(self) -> None:
        m, n = self.visible.width, self.hidden.width
        if self.W.shape != (m, n) or self.b.shape[-1] != m or self.c.shape[-1] != n:
            shapes = (tuple(x.shape) for x in (self.W, self.b, self.c))
            raise FamilyError(
                "W of shape {}, b of {} and c of {} do not join".format(*shapes)
                + f" {self.visible} and {self.hidden}; give W ({m}, {n}), b (…, {m}), c (…, {n})."
            )

    def given_visible(self, v: Float[Tensor, "*batch m"]) -> Float[Tensor, "*shape n"]:
        """c + Wᵀv: the natural parameters of h."""
        return self.c + v @ self.W

    def given_hidden(self, h: Float[Tensor, "*batch n"]) -> Float[Tensor, "*shape m"]:
        """b + Wh: the natural parameters of v."""
        return self.b + h @ self.W.mT

    def free_energy(self, v: Float[Tensor, "*batch m"]) -> Float[Tensor, "*shape"]:
        """F(v) = −b·v − G_h(c + Wᵀv) − log h_v(v), so that p(v) = exp(−F(v)) / Z.

        >>> from dualform.families import Hypercube
        >>> free = Field(Hypercube(1), Hypercube(1), *(torch.zeros(n) for n in ((1, 1), 1, 1)))
        >>> free.free_energy(torch.ones(1))  # −log 2
        tensor(-0.6931)
        """
        tilt = (self.b * v).sum(-1) + self.visible.log_base(v)
        return -tilt - self.hidden.log_normalizer(self.given_visible(v))

    @torch.no_grad()
    def gibbs(
        self,
        v: Float[Tensor, "*batch m"],
        steps: int = 1,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "*shape m"]:
        """v after drawing h given v and v given h, `steps` times."""
        for _ in range(steps):
            h = self.hidden.sample(self.given_visible(v), 1, generator)[0]
            v = self.visible.sample(self.given_hidden(h), 1, generator)[0]
        return v

    def tempered(self, beta: float) -> "Field":
        """The field with W scaled by β: independent units at 0, itself at 1."""
        return Field(self.visible, self.hidden, beta * self.W, self.b, self.c)


def contrastive_divergence(
    field: Field,
    data: Float[Tensor, "*batch m"],
    start: Float[Tensor, "*chains m"],
    steps: int = 1,
    generator: torch.Generator | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, "*chains m"]]:
    """F(data) − F(chains), whose gradient is that of CD-k; and the chains, k steps from `start`.

    Start at the data for CD-k, where the chains last were for PCD. (Hinton 2002; Tieleman 2008.)
    Data must be points of the visible measure: gray pixels are none of `Hypercube`, but of
    `Interval`, and `torch.bernoulli(pixels)` are bits.

    >>> from dualform.families import Hypercube
    >>> from dualform.families.layers import Boltzmann
    >>> machine = Boltzmann(Hypercube(4), Hypercube(2))
    >>> data = torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    >>> loss, chains = contrastive_divergence(machine.field(), data, start=data, steps=3)
    >>> loss.backward()
    """
    for name, x in (("data", data), ("start", start)):
        _require_points(name, x, field.visible)
    chains = field.gibbs(start, steps, generator)
    return field.free_energy(data).mean() - field.free_energy(chains).mean(), chains


def _require_points(name: str, x: Tensor, measure: Measure) -> None:
    off = measure.log_base(x.detach()) == -torch.inf
    if not holds(~off):
        raise FamilyError(
            f"{name} has {int(off.sum())} of {off.numel()} rows that are no points of {measure}, "
            "so their probability is 0 whatever is learned. Gray pixels are not bits: draw bits "
            "from them, torch.bernoulli(pixels), or take Interval(low, high) as visible measure."
        )
