"""Modern Hopfield networks: a stored pattern is a minimum of E = ½‖ξ‖² − G(ξ)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualform.families.checks import require_width
from dualform.families.measures import Empirical
from dualform.families.normalizer import LogNormalizer


@dataclass(frozen=True, eq=False)
class Retrieval:
    """What came back for each query: the state, the steps taken, and the energy on the way.

    >>> found = Hopfield(torch.eye(3), temperature=0.1).retrieve(torch.tensor([[0.9, 0.2, 0.0]]))
    >>> found.states.round(decimals=3), found.steps
    (tensor([[1., 0., 0.]]), 4)
    """

    states: Tensor
    steps: int
    energies: Tensor
    """(steps + 1, queries)."""


class Hopfield(nn.Module):
    """ξ ← ∇G(ξ): softmax retrieval of stored patterns; E = ½‖ξ‖² − G(ξ) never rises.

    G is convex, so each step minimizes an upper bound of E that touches it at ξ. (Ramsauer et al.,
    *Hopfield Networks is All You Need*, ICLR 2021.)

    >>> network = Hopfield(torch.eye(4), temperature=0.1)
    >>> network.retrieve(torch.tensor([[0.0, 0.8, 0.3, 0.0]])).states.round(decimals=2)
    tensor([[0., 1., 0., 0.]])
    """

    def __init__(
        self, patterns: Float[Tensor, "n d"], *, temperature: float | Tensor = 1.0
    ) -> None:
        super().__init__()
        self.G = LogNormalizer(Empirical(patterns), temperature)

    def __repr__(self) -> str:
        return f"Hopfield({len(self)} patterns)"

    def __len__(self) -> int:
        """The number of stored patterns."""
        return self.patterns.shape[0]

    @property
    def temperature(self) -> float | Tensor:
        """T: a small one retrieves single patterns, a large one their average."""
        return self.G.temperature

    @property
    def patterns(self) -> Float[Tensor, "n d"]:
        """What is stored, one a row."""
        return self.memory.keys

    @property
    def memory(self) -> Empirical:
        """The patterns as a memory, read at temperature 1."""
        assert isinstance(self.G.measure, Empirical)
        return self.G.measure

    def store(self, patterns: Float[Tensor, "n d"]) -> "Hopfield":
        """The network with these patterns as well.

        >>> Hopfield(torch.eye(3)).store(torch.ones(2, 3))
        Hopfield(5 patterns)
        """
        require_width("patterns", patterns, self.patterns.shape[-1])
        both = torch.cat([self.patterns, patterns])
        return Hopfield(both, temperature=self.temperature)

    def energy(self, states: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """½‖ξ‖² − G(ξ).

        >>> network = Hopfield(torch.eye(2), temperature=0.01)
        >>> network.energy(torch.tensor([[1.0, 0.0], [0.5, 0.5]])).round(decimals=2)
        tensor([-0.5000, -0.2600])
        """
        return states.square().sum(-1) / 2 - self.G.value(states)

    def retrieve(
        self, queries: Float[Tensor, "q d"], *, steps: int = 100, tolerance: float = 1e-6
    ) -> Retrieval:
        """Steps until no state moves by more than the tolerance, `steps` at most."""
        states, energies = queries, [self.energy(queries)]
        for _ in range(steps):
            before, states = states, self.G.mean(states)
            energies.append(self.energy(states))
            if float((states - before).detach().abs().max()) <= tolerance:
                break
        return Retrieval(states, len(energies) - 1, torch.stack(energies).detach())

    def separation(self) -> Float[Tensor, " n"]:
        """Δ_i = x_i·x_i − max_{j≠i} x_i·x_j: how far each pattern stands out; many T is well kept.

        >>> Hopfield(torch.eye(3)).separation()
        tensor([1., 1., 1.])
        """
        products = self.patterns @ self.patterns.mT
        others = products - torch.diag_embed(torch.full_like(products[0], torch.inf))
        return products.diagonal() - others.amax(-1)


@dataclass(frozen=True)
class Capacity:
    """How many of the patterns came back, by how many were stored, with ± two standard errors.

    >>> torch.manual_seed(0)
    <torch._C.Generator object at ...>
    >>> capacity(d=8, counts=[2, 512], temperature=0.2, noise=0.3)
    Capacity(d=8, counts=(2, 512), rates=(1.0, 0.0), errors=(0.0, 0.0))
    """

    d: int
    counts: tuple[int, ...]
    rates: tuple[float, ...]
    errors: tuple[float, ...]


def capacity(
    d: int,
    counts: Sequence[int],
    *,
    temperature: float,
    noise: float,
    queries: int = 256,
    generator: torch.Generator | None = None,
) -> Capacity:
    """Stores random patterns of the unit sphere and retrieves noisy ones, measured count by count.

    A pattern has come back when the state lies nearer to it than half its distance to the nearest
    other one.

    >>> capacity(4, [1], temperature=0.1, noise=0.1).rates
    (1.0,)
    """
    rates = [_rate(d, n, temperature, noise, queries, generator) for n in counts]
    errors = [2 * (p * (1 - p) / queries) ** 0.5 for p in rates]
    return Capacity(d, tuple(counts), tuple(rates), tuple(errors))


def _rate(
    d: int,
    n: int,
    temperature: float,
    noise: float,
    queries: int,
    generator: torch.Generator | None,
) -> float:
    x = torch.nn.functional.normalize(torch.randn(n, d, generator=generator), dim=-1)
    asked = torch.randint(n, (queries,), generator=generator)
    start = x[asked] + noise * torch.randn(queries, d, generator=generator) / d**0.5
    found = Hopfield(x, temperature=temperature).retrieve(start).states
    gaps = torch.cdist(x, x).fill_diagonal_(2.0).amin(-1)
    near = (found - x[asked]).norm(dim=-1) < gaps[asked] / 2
    return float(near.float().mean())
