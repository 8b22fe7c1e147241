"""Attention that descends an energy, and cannot do otherwise."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualform.families.checks import require_temperature
from dualform.families.layers.attention import by_head, require_heads
from dualform.families.measures import Empirical
from dualform.families.normalizer import LogNormalizer

ARMIJO = 1e-4
HALVINGS = 20


@dataclass(frozen=True, eq=False)
class Descent:
    """Where the tokens came to rest, and the energy on the way: (steps + 1, batch).

    >>> layer = EnergyAttention(width=4, heads=1, steps=3)
    >>> layer.descend(torch.randn(2, 5, 4)).energies.shape
    torch.Size([4, 2])
    """

    tokens: Tensor
    energies: Tensor


class EnergyAttention(nn.Module):
    """X ← X − t ∇E(X), E = ½‖X‖² − Σ_h Σ_i G_h(W_Q x_i) over keys W_K n(x_j): E never rises.

    Keys are made of tokens brought to the sphere, n(x) = √d x/‖x‖, so G grows no faster than ‖x‖
    and E has a minimum. Every step is halved, sample by sample, until the energy falls by enough; a
    step that cannot be is not made. The layer is differentiable through its steps.

    >>> torch.manual_seed(0)
    <torch._C.Generator object at ...>
    >>> layer = EnergyAttention(width=8, heads=2, steps=5)
    >>> energies = layer.descend(torch.randn(3, 6, 8)).energies
    >>> bool((energies.diff(dim=0) <= 0).all())
    True
    """

    def __init__(
        self, width: int, heads: int, *, steps: int = 8, temperature: float = 1.0, rate: float = 1.0
    ) -> None:
        super().__init__()
        require_heads(width, heads)
        require_temperature(temperature)
        self.heads, self.steps, self.temperature, self.rate = heads, steps, temperature, rate
        self.W_Q, self.W_K = (nn.Linear(width, width, bias=False) for _ in range(2))

    def energy(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch"]:
        """E(X), one number a set of tokens.

        >>> EnergyAttention(width=4, heads=2).energy(torch.zeros(3, 5, 4)).shape
        torch.Size([3])
        """
        sphere = x * (x.shape[-1] / (x.square().sum(-1, keepdim=True) + 1e-6)).sqrt()
        q, k = by_head(self.W_Q(x), self.heads), by_head(self.W_K(sphere), self.heads)
        G = LogNormalizer(Empirical(k), self.temperature).value(q)
        return x.square().sum((-2, -1)) / 2 - G.sum((-2, -1))

    def descend(self, x: Float[Tensor, "*batch n d"]) -> Descent:
        """The steps, with the energy after each."""
        energies = [self.energy(x)]
        for _ in range(self.steps):
            x = self._step(x, energies[-1])
            energies.append(self.energy(x))
        return Descent(x, torch.stack(energies).detach())

    def forward(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The tokens after `steps` steps."""
        return self.descend(x).tokens

    def _step(self, x: Tensor, energy: Tensor) -> Tensor:
        trains = torch.is_grad_enabled()
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.energy(at).sum(), at, create_graph=trains)
        return x - self._rate(x, slope, energy) * slope

    @torch.no_grad()
    def _rate(self, x: Tensor, slope: Tensor, energy: Tensor) -> Tensor:
        """The longest step that pays, halved from `rate`; 0 where none does."""
        rate = torch.full_like(energy, self.rate)
        square = slope.square().sum((-2, -1))
        for _ in range(HALVINGS):
            after = self.energy(x - rate[..., None, None] * slope)
            fails = ~(after <= energy - ARMIJO * rate * square)
            if not fails.any():
                break
            rate = torch.where(fails, rate / 2, rate)
        return torch.where(fails, 0, rate)[..., None, None]
