"""Rank collapse: do tokens become alike from layer to layer, and how fast?

`μ(X) = ‖X − 11ᵀX/N‖` is how far the N tokens of a sample lie from their mean. Attention without
residual connections brings it to 0. As μ has the scale of X, other measures stand beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from torch import nn

from dualform.diagnose.blocks import find_blocks, look
from dualform.diagnose.calls import BlockState
from dualform.diagnose.mask_graph import dobrushin
from dualform.diagnose.token_spread import Spread, SpreadReader
from dualform.read.display import Displayed, columns, framed, matplotlib_axes, pandas_frame

SAMPLES = 4
"""The tokens of so many samples are measured, where nothing else is said."""
FLOOR = 1e-6
"""Relative distances below this are rounding, in float32."""


@dataclass(frozen=True)
class LayerSpread:
    """One block: its tokens, and how much its attention brings tokens together.

    >>> import torch
    >>> from dualform.diagnose import spread
    >>> LayerSpread("h.0", spread(torch.ones(1, 4, 2)), contraction=0.5).spread.relative
    0.0
    """

    name: str
    spread: Spread
    contraction: float | None = None
    """The mean Dobrushin coefficient of its heads' self-attention, multiplied where it is called
    more than once; None where no weights that sum to 1 were seen, or those within windows."""
    least_weight: float | None = None
    """The smallest weight that is not 0: ε, which `MaskGraph.bound` takes as its least_weight."""


@dataclass(frozen=True, repr=False)
class Collapse(Displayed):
    """The tokens of a network from block to block; prints, plots, and becomes a data frame.

    >>> import torch
    >>> from dualform.diagnose import spread
    >>> Collapse((LayerSpread("h.0", spread(torch.ones(1, 4, 2))),)).finding
    "All tokens are one after 'h.0'."
    """

    layers: tuple[LayerSpread, ...]
    measured: int | None = None
    """How many samples were measured, of those that were given; None where that is not known."""
    given: int | None = None

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
        part = "" if self.measured == self.given else f" ({self.measured} of {self.given} samples)"
        return framed(f"tokens, block by block{part}", table, self.finding)

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
    samples: int | None = SAMPLES,
    **named: Any,
) -> Collapse:
    """How different tokens are after each block of a model that is called with these inputs.

    Blocks are the largest row of alike modules, or those that `layers=` names. The model runs in
    eval mode, and is left as it was.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    >>> found = collapse(nn.TransformerEncoder(block, 4), torch.randn(3, 10, 16))
    >>> len(found.layers), found.collapsed, 0 < found.layers[0].contraction < 1
    (4, None, True)

    Args:
        with_weights: also looks at all weights of self-attention, which takes as long as the
            attention itself.
        samples: the tokens of so many samples of the batch are measured, evenly spaced; None for
            all.
    """
    reading = CollapseReading(samples)
    look(model, find_blocks(model, layers), reading.see, inputs, named, with_weights)
    return reading.result()


class CollapseReading:
    """What is seen of blocks while a model runs; `result` measures it.

    >>> import torch
    >>> reading = CollapseReading()
    >>> reading.see(BlockState("h.0", torch.ones(1, 4, 2)))
    >>> reading.result().collapsed
    'h.0'
    """

    def __init__(self, samples: int | None = None) -> None:
        """Measures the tokens of so many samples of the batch, or of all."""
        self._tokens = SpreadReader(samples)
        self._rest: list[tuple[str, float | None, float | None]] = []

    def see(self, seen: BlockState) -> None:
        """Takes the tokens of a block that ran, and measures what its attention does to them."""
        self._tokens.add(seen.tokens)
        calls = [call.weights for call in seen.calls if not seen.is_apart(call)]
        weights = [w for w in calls if bool((w > 0).any())]  # else nobody sees anybody
        factor = math.prod(float(dobrushin(w).mean()) for w in weights) if weights else None
        least = min((float(w[w > 0].min()) for w in weights), default=None)
        self._rest.append((seen.name, factor, least))

    def result(self) -> Collapse:
        """That of all blocks."""
        spreads = zip(self._rest, self._tokens.result(), strict=True)
        found = (LayerSpread(name, one, *rest) for (name, *rest), one in spreads)
        return Collapse(tuple(found), self._tokens.measured, self._tokens.given)
