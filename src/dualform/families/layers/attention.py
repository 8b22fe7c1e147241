"""Attention as a layer: ∇G over the context, by torch's fused kernels where they are equal."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from dualform.errors import FamilyError
from dualform.families.checks import require_temperature
from dualform.families.fenchel_young import entmax
from dualform.memory.fused import fused_attention


def attend(
    q: Float[Tensor, "*#batch q d"],
    k: Float[Tensor, "*#batch n d"],
    v: Float[Tensor, "*#batch n m"],
    *,
    mask: Bool[Tensor, "..."] | None = None,
    temperature: float | None = None,
    alpha: float = 1.0,
) -> Float[Tensor, "*batch q m"]:
    """E[v] under p ∝ exp(q·k / T), T = √d unless given; with α > 1 under entmax, which is sparse.

    At α = 1 it equals `LogNormalizer(Empirical(k, mask=mask), T).mean(q, v)`, and goes to torch's
    fused kernels with its gradients too. Those have one derivative; that mean has all of them.

    >>> from dualform.families import Empirical, LogNormalizer
    >>> q, k, v = torch.randn(5, 4), torch.randn(7, 4), torch.randn(7, 3)
    >>> torch.allclose(attend(q, k, v), LogNormalizer(Empirical(k), 2.0).mean(q, v), atol=1e-6)
    True
    >>> (attend(q, k, torch.eye(7), alpha=2.0, temperature=0.1) == 0).any()
    tensor(True)
    """
    T = math.sqrt(q.shape[-1]) if temperature is None else temperature
    require_temperature(T)
    if alpha == 1:
        return fused_attention(q, k, v, mask, scale=1 / T)
    scores = (q / T) @ k.mT
    kept = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    return entmax(kept, alpha) @ v


class Attention(nn.Module):
    """Heads of attention: x ↦ W_O [E_h[W_V c]], p_h ∝ exp(W_Q x · W_K c / T), context c.

    The context is x itself unless given. `alpha` > 1 makes the weights sparse. For causal passes,
    caches, padding and torch's own weights there is `dualform.attention.MultiheadAttention`.

    >>> layer = Attention(width=16, heads=4, alpha=1.5)
    >>> layer(torch.randn(2, 7, 16)).shape
    torch.Size([2, 7, 16])
    """

    def __init__(
        self, width: int, heads: int, *, alpha: float = 1.0, temperature: float | None = None
    ) -> None:
        super().__init__()
        require_heads(width, heads)
        self.heads, self.alpha, self.temperature = heads, alpha, temperature
        self.W_Q, self.W_K, self.W_V, self.W_O = (nn.Linear(width, width) for _ in range(4))

    def forward(
        self,
        x: Float[Tensor, "*batch q d"],
        context: Float[Tensor, "*batch n d"] | None = None,
        mask: Bool[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "*batch q d"]:
        """The output; `mask` broadcasts with (…, heads, q, n) and is True where a pair may meet."""
        c = x if context is None else context
        pairs = ((self.W_Q, x), (self.W_K, c), (self.W_V, c))
        q, k, v = (by_head(W(y), self.heads) for W, y in pairs)
        read = attend(q, k, v, mask=mask, temperature=self.temperature, alpha=self.alpha)
        output: Tensor = self.W_O(read.transpose(-3, -2).flatten(-2))
        return output


class Block(nn.Module):
    """x + attention(norm x), then x + W₂ σ(W₁ norm x): a step up G, and one of a sigmoid layer.

    The layers in between are those of a family of bits: the mean of each is a sigmoid.

    >>> Block(width=16, heads=4)(torch.randn(2, 7, 16)).shape
    torch.Size([2, 7, 16])
    """

    def __init__(
        self, width: int, heads: int, *, hidden: int | None = None, alpha: float = 1.0
    ) -> None:
        super().__init__()
        hidden = 4 * width if hidden is None else hidden
        self.attention = Attention(width, heads, alpha=alpha)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The block's output."""
        x = x + self.attention(self.norms[0](x))
        bits = self.up(self.norms[1](x)).sigmoid()
        output: Tensor = x + self.down(bits)
        return output


def by_head(x: Float[Tensor, "*batch n w"], heads: int) -> Float[Tensor, "*batch heads n d"]:
    """Tokens as (…, heads, n, w / heads).

    >>> by_head(torch.ones(2, 7, 16), heads=4).shape
    torch.Size([2, 4, 7, 4])
    """
    return x.reshape(*x.shape[:-1], heads, -1).transpose(-3, -2)


def require_heads(width: int, heads: int) -> None:
    """Raise unless the width divides evenly.

    >>> require_heads(10, 3)
    Traceback (most recent call last):
    dualform.errors.FamilyError: width=10 cannot be divided among heads=3; choose a divisor.
    """
    if heads < 1 or width % heads:
        raise FamilyError(f"width={width} cannot be divided among heads={heads}; choose a divisor.")
