"""Rank collapse: do tokens become alike from layer to layer, and how fast?

`μ(X) = ‖X − 11ᵀX/N‖` is how far the N tokens of a sample lie from their mean. Attention without
residual connections brings it to 0. As μ has the scale of X, other measures stand beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from rich.console import Group
from torch import Tensor, nn

from dualform.diagnose.blocks import find_blocks, look
from dualform.diagnose.calls import BlockState
from dualform.diagnose.mask_graph import dobrushin
from dualform.read.display import Displayed, columns, framed, matplotlib_axes, pandas_frame

EXACT = 512
"""Up to so many tokens, or so wide, all eigenvalues of XᵀX are computed to find the largest."""
ROUNDS = 32
"""Beyond it, so many vectors are made, each by multiplying the last by the tokens and back."""
PAIRED = 256
"""So many tokens of a sample are compared in pairs."""
FLOOR = 1e-6
"""Relative distances below this are rounding, in float32."""


@dataclass(frozen=True)
class Spread:
    """How different the tokens of a sample are; means over the samples.

    >>> found = spread(torch.eye(4)[None])
    >>> round(found.distance, 4), round(found.relative, 4), found.stable_rank, found.cosine
    (1.7321, 0.866, 4.0, 0.0)
    """

    distance: float
    """`μ(X) = ‖X − 11ᵀX/N‖`, Frobenius."""
    relative: float
    """`μ(X) / ‖X‖`: 0 where all tokens are one."""
    stable_rank: float
    """`‖X‖² / σ₁²`: 1 where all tokens lie on one line through the origin."""
    cosine: float
    """The mean |cos| of two tokens."""

    @property
    def is_finite(self) -> bool:
        """Whether all tokens were finite numbers.

        >>> spread(torch.full((1, 2, 3), torch.inf)).is_finite
        False
        """
        return all(map(math.isfinite, astuple(self)))


@torch.no_grad()
def spread(tokens: Tensor) -> Spread:
    """How different the tokens (batch, tokens, width) of each sample are, on average.

    >>> spread(torch.ones(2, 5, 3)).relative
    0.0
    """
    x = tokens if tokens.dtype == torch.float64 else tokens.float()
    if not bool(x.isfinite().all()):
        return Spread(math.nan, math.nan, math.nan, math.nan)
    total = x.flatten(1).norm(dim=1).clamp_min(1e-30)
    distance = (x - x.mean(1, keepdim=True)).flatten(1).norm(dim=1)
    return Spread(
        float(distance.mean()),
        float((distance / total).mean()),
        float((total / _largest_singular_value(x).clamp_min(1e-30)).square().mean()),
        float(_mean_cosine(x).mean()),
    )


def _largest_singular_value(x: Tensor) -> Tensor:
    """(batch,)."""
    if min(x.shape[1:]) > EXACT:
        x = _in_few_directions(x)
    gram = x.mT @ x if x.shape[1] > x.shape[2] else x @ x.mT
    largest: Tensor = torch.linalg.eigvalsh(gram)[:, -1].clamp_min(0).sqrt()
    return largest


def _in_few_directions(x: Tensor) -> Tensor:
    """(batch, tokens, ROUNDS): x in a basis of `v, XᵀXv, (XᵀX)²v, …`, close to its largest axis."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(x.shape[2], 1, generator=generator).to(x).expand(len(x), -1, -1)
    basis: Tensor = v / v.norm(dim=1, keepdim=True)
    for _ in range(ROUNDS - 1):
        v = x.mT @ (x @ basis[..., -1:])
        for _ in range(2):  # the second time for what rounding left
            v = v - basis @ (basis.mT @ v)
        v = v / v.norm(dim=1, keepdim=True).clamp_min(1e-30)
        basis = torch.cat([basis, v], -1)
    found: Tensor = x @ basis
    return found


def _mean_cosine(x: Tensor) -> Tensor:
    """(batch,): the mean |cos| over pairs of tokens, spaced evenly where they are many."""
    each = -(-x.shape[1] // PAIRED)
    few = x[:, ::each]
    count = few.shape[1]
    if count < 2:
        return few.new_ones(len(few))
    lengths = few.norm(dim=-1).clamp_min(1e-12)
    cosines = (few @ few.mT).abs() / (lengths[:, :, None] * lengths[:, None])
    apart: Tensor = cosines.sum((1, 2)) - cosines.diagonal(dim1=1, dim2=2).sum(1)
    return apart / (count * (count - 1))


@dataclass(frozen=True)
class LayerSpread:
    """One block: its tokens, and how much its attention brings tokens together.

    >>> LayerSpread("h.0", spread(torch.ones(1, 4, 2)), contraction=0.5).spread.relative
    0.0
    """

    name: str
    spread: Spread
    contraction: float | None = None
    """The mean Dobrushin coefficient of its heads' self-attention, multiplied where it is called
    more than once; None where no weights that sum to 1 were seen."""
    least_weight: float | None = None
    """The smallest weight that is not 0: ε, which `MaskGraph.bound` takes as its least_weight."""


@dataclass(frozen=True, repr=False)
class Collapse(Displayed):
    """The tokens of a network from block to block; prints, plots, and becomes a data frame.

    >>> Collapse((LayerSpread("h.0", spread(torch.ones(1, 4, 2))),)).finding
    "All tokens are one after 'h.0'."
    """

    layers: tuple[LayerSpread, ...]

    @property
    def collapsed(self) -> str | None:
        """The first block after which all tokens are one, but for rounding; None if none is."""
        names = (one.name for one in self.layers if one.spread.relative < FLOOR)
        return next(names, None)

    @property
    def rate(self) -> float:
        """By what a block multiplies μ/‖X‖, in the geometric mean; 1 for a single block."""
        shares = [one.spread.relative for one in self.layers]
        if len(shares) < 2 or not shares[0] or not shares[-1]:
            return 0.0 if len(shares) > 1 else 1.0
        return float((shares[-1] / shares[0]) ** (1 / (len(shares) - 1)))

    @property
    def finding(self) -> str:
        """The result in one sentence."""
        name, last = self.layers[-1].name, self.layers[-1].spread
        broken = next((one.name for one in self.layers if not one.spread.is_finite), None)
        if broken is not None:
            return f"Tokens after '{broken}' are not finite, so their differences are not known."
        if self.collapsed is not None:
            return f"All tokens are one after '{self.collapsed}'."
        size = (
            f"{last.relative:.1%} of the tokens' size, and two tokens have |cos| {last.cosine:.2f}."
        )
        if len(self.layers) == 1:
            return f"Differences between tokens are, after '{name}', {size}"
        if 0.99 <= self.rate <= 1.01:
            return f"Differences between tokens stay as they are: in the end they are {size}"
        return (
            f"Differences between tokens are multiplied by {self.rate:.3f} from block to block: in "
            f"the end they are {size}"
        )

    def __rich__(self) -> Group:
        names = ("block", "μ", "μ/‖X‖", "stable rank", "mean |cos|", "contraction", "least weight")
        table = columns(names, {"block"})
        for one in self.layers:
            s, factor, least = one.spread, one.contraction, one.least_weight
            table.add_row(
                one.name,
                f"{s.distance:.3g}",
                f"{s.relative:.3g}",
                f"{s.stable_rank:.2f}",
                f"{s.cosine:.3f}",
                "–" if factor is None else f"{factor:.3f}",
                "–" if least is None else f"{least:.2g}",
            )
        return framed("tokens, block by block", table, self.finding)

    def to_pandas(self) -> Any:
        """A data frame with a line for each block."""
        data: dict[str, list[Any]] = {
            name: [getattr(one.spread, name) for one in self.layers]
            for name in ("distance", "relative", "stable_rank", "cosine")
        }
        data["contraction"] = [one.contraction for one in self.layers]
        data["least_weight"] = [one.least_weight for one in self.layers]
        frame = pandas_frame(data)
        frame.index = [one.name for one in self.layers]
        return frame

    def plot(self, axes: Any = None) -> Any:
        """μ/‖X‖ and mean |cos| against depth."""
        axes = matplotlib_axes(axes)
        depth = range(1, len(self.layers) + 1)
        axes.plot(depth, [one.spread.relative for one in self.layers], label="μ/‖X‖")
        axes.plot(depth, [one.spread.cosine for one in self.layers], label="mean |cos|")
        axes.set(xlabel="block", ylim=(0, 1.05))
        axes.legend(frameon=False)
        return axes


def collapse(
    model: nn.Module,
    *inputs: Any,
    layers: str | Sequence[str] | None = None,
    with_weights: bool = True,
    **named: Any,
) -> Collapse:
    """How different tokens are after each block of a model that is called with these inputs.

    Blocks are the largest row of alike modules, or those that `layers=` names. `with_weights` also
    looks at all weights of self-attention, which takes as long as the attention itself. The model
    runs in eval mode, and is left as it was.

    >>> _ = torch.manual_seed(0)
    >>> block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    >>> found = collapse(nn.TransformerEncoder(block, 4), torch.randn(3, 10, 16))
    >>> len(found.layers), found.collapsed, 0 < found.layers[0].contraction < 1
    (4, None, True)
    """
    found: list[LayerSpread] = []
    look(
        model,
        find_blocks(model, layers),
        lambda seen: found.append(layer_spread(seen)),
        inputs,
        named,
        with_weights,
    )
    return Collapse(tuple(found))


def layer_spread(seen: BlockState) -> LayerSpread:
    """The tokens of a block that ran, and what its attention does to them."""
    weights = [w for w in seen.weights if bool((w > 0).any())]  # else nobody sees anybody
    return LayerSpread(
        seen.name,
        spread(seen.tokens),
        math.prod(float(dobrushin(w).mean()) for w in weights) if weights else None,
        min((float(w[w > 0].min()) for w in weights), default=None),
    )
