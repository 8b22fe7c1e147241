"""What a mask implies: the graph of who attends to whom, its center, its radius, and the bound.

Tokens mix along the edges of the mask's graph. If some token, a *center*, reaches all others within
`r` steps, then attention by itself brings all tokens together: `μ(X_t) ≤ C (1 − ε^r)^(t/r)` after
`t` layers whose weights are at least ε where the mask allows them (Wu, Ajorlou, Wang, Jegelka and
Jadbabaie, *On the Role of Attention Masks and LayerNorm in Transformers*, NeurIPS 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.attention.shapes import require_mask_type, visible, wide
from dualform.errors import AttentionError


@dataclass(frozen=True)
class MaskGraph:
    """The graph of a mask: an edge from each token to those that attend to it.

    >>> mask_graph(torch.ones(6, 6).tril().bool())
    MaskGraph(tokens=6, center=0, radius=1, apart=())
    """

    tokens: int
    center: int | None
    """A token that reaches all others in the fewest steps; None if no token reaches all."""
    radius: int | None
    """In how many steps it does so."""
    apart: tuple[int, ...]
    """Without a center: one token of each group that hears nothing from outside of it."""

    def bound(self, least_weight: float, layers: int) -> float:
        """`(1 − ε^r)^(t/r)`: by what the distance of the tokens shrinks at least, but for `C`.

        >>> round(mask_graph(torch.ones(4, 4).bool()).bound(0.25, 2), 4)
        0.5625
        """
        if not 0 <= least_weight <= 1:
            raise AttentionError(f"least_weight={least_weight} is no attention weight, 0 to 1.")
        if layers < 0:
            raise AttentionError(
                f"layers={layers} is no number of layers; give how many there are, 0 or more."
            )
        if self.radius is None:
            return 1.0
        steps = max(1, self.radius)
        return float((1 - least_weight**steps) ** (layers / steps))

    def __str__(self) -> str:
        if self.radius is None:
            named = ", ".join(map(str, self.apart[:8]))
            return (
                f"no token reaches all {self.tokens} others: the groups of tokens {named} hear "
                "nothing from each other, and attention alone does not bring them together"
            )
        return f"token {self.center} reaches all {self.tokens} tokens within {self.radius} layers"


def mask_graph(mask: Tensor) -> MaskGraph:
    """The graph of a mask (tokens, tokens), as `scaled_dot_product_attention` takes it.

    True lets the token of the row attend to the token of the column, and so does a number that is
    added to the logits. False, −∞, and a number far below the others of its row, such as −1e9 or
    the least of its type, hide it. Every token keeps itself: a residual connection, or its own
    weight.

    >>> window = (torch.arange(9)[:, None] - torch.arange(9)).abs() <= 2
    >>> print(mask_graph(window))
    token 4 reaches all 9 tokens within 2 layers
    >>> print(mask_graph(torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).bool()))
    no token reaches all 5 others: the groups of tokens 0, 2 hear nothing from each other, and attention alone does not bring them together
    """  # noqa: E501
    if mask.ndim != 2 or mask.shape[0] != mask.shape[1] or not len(mask):
        raise AttentionError(
            f"mask has shape {tuple(mask.shape)}; a mask of tokens has as many rows as columns: "
            "row i says what token i attends to."
        )
    require_mask_type(mask, "mask")
    reach = (visible(mask).cpu() | torch.eye(len(mask), dtype=torch.bool)).float()
    powers = [reach]
    while 1 << len(powers) < len(mask):
        powers.append(_then(powers[-1], powers[-1]))
    whole = _then(powers[-1], powers[-1])
    if not bool(whole.all(0).any()):
        return MaskGraph(len(mask), None, None, _sources(whole))
    before, steps = torch.eye(len(mask)), 0
    for power in reversed(range(len(powers))):  # the most steps in which no token reaches all
        tried = _then(before, powers[power])
        if not bool(tried.all(0).any()):
            before, steps = tried, steps + (1 << power)
    reached = (_then(before, reach) if len(mask) > 1 else before).all(0)
    centers = reached.nonzero().flatten()
    return MaskGraph(
        len(mask), int(centers[len(centers) // 2]), steps + 1 if len(mask) > 1 else 0, ()
    )


def _then(first: Tensor, second: Tensor) -> Tensor:
    """Who hears from whom after the steps of both."""
    return ((second @ first) > 0).float()


def _sources(whole: Tensor) -> tuple[int, ...]:
    """One token of each group that all hear from each other, and from nobody else."""
    hears = whole.bool()
    together = hears & hears.T
    closed = (hears == together).all(1)
    return tuple(
        token
        for token in closed.nonzero().flatten().tolist()
        if int(together[token].nonzero()[0]) == token
    )


def dobrushin(weights: Tensor) -> Tensor:
    """`τ(A) = ½ max_{i,k} Σ_j |A_ij − A_kj|` of attention weights (…, rows, columns).

    The rows of `A X` lie within `τ` times the range of those of `X`: 0 where all rows of A are
    equal, and tokens become one; 1 where two rows have no token in common. A row of zeros sees
    nothing, and is compared with none.

    >>> dobrushin(torch.tensor([[0.5, 0.5], [0.25, 0.75]])), dobrushin(torch.eye(3))
    (tensor(0.2500), tensor(1.))
    """
    weights = wide(weights)
    rows, sees = weights.shape[-2], weights.ne(0).any(-1)
    largest = weights.new_zeros(weights.shape[:-2])
    each = max(1, (1 << 24) // max(1, weights.numel()))
    for at in range(0, rows, each):
        some = slice(at, at + each)
        apart = torch.cdist(weights[..., some, :], weights, p=1)
        apart = apart * (sees[..., some, None] & sees[..., None, :])
        largest = torch.maximum(largest, apart.flatten(-2).amax(-1))
    return (largest / 2).clamp(0, 1)
