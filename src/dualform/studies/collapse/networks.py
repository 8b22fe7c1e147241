"""The networks: blocks of one head of attention, with or without norms, residuals and an MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from dualform.studies.collapse.setting import MASKS, Architecture, CollapseSetting

WIDER = 4
"""So many times wider than tokens an MLP is inside."""


class MixingBlock(nn.Module):
    """`A(X) X W_V`, then an MLP if there is one; each with the norm and residual that it has.

    >>> block = MixingBlock(16, 8, Architecture("causal", "pre", residual=True), mlp=True)
    >>> block(torch.randn(2, 8, 16)).shape
    torch.Size([2, 8, 16])
    """

    mask: Tensor

    def __init__(
        self, width: int, tokens: int, architecture: Architecture, mlp: bool = False
    ) -> None:
        super().__init__()
        self.architecture = architecture
        normed = architecture.norm != "none"
        self.q, self.k = (nn.Linear(width, architecture.width_qk, bias=False) for _ in range(2))
        self.v = nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width) if normed else nn.Identity()
        self.register_buffer("mask", MASKS[architecture.mask](tokens))
        self.mlp = self.mlp_norm = None
        if mlp:
            inside = WIDER * width
            self.mlp = nn.Sequential(nn.Linear(width, inside), nn.GELU(), nn.Linear(inside, width))
            self.mlp_norm = nn.LayerNorm(width) if normed else nn.Identity()
        for projection in (self.q, self.k):  # scores have a deviation of 1 but for sharpness
            nn.init.normal_(projection.weight, std=(architecture.sharpness**0.5) * width**-0.5)
        nn.init.orthogonal_(self.v.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens, width) of the same."""
        x = self._around(x, self.attend, self.norm)
        if self.mlp is None or self.mlp_norm is None:
            return x
        return self._around(x, self.mlp, self.mlp_norm)

    def attend(self, x: Tensor) -> Tensor:
        """`A(x) x W_V`."""
        return scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), self.mask)

    def _around(self, x: Tensor, part: nn.Module | object, norm: nn.Module) -> Tensor:
        assert callable(part)
        own = self.architecture
        y: Tensor = part(norm(x) if own.norm == "pre" else x)
        y = x + y if own.residual else y
        return norm(y) if own.norm == "post" else y


def random_blocks(setting: CollapseSetting, architecture: Architecture) -> nn.Sequential:
    """Blocks that only attend, with random weights.

    >>> len(random_blocks(CollapseSetting(depth=3), Architecture()))
    3
    """
    blocks = (
        MixingBlock(setting.width, setting.tokens, architecture) for _ in range(setting.depth)
    )
    return nn.Sequential(*blocks)


class Reader(nn.Module):
    """Tells hidden characters from those around them: embeddings, blocks, and a linear map.

    >>> reader = Reader(CollapseSetting(tokens=6), Architecture(), characters=9)
    >>> reader(torch.zeros(2, 6, dtype=torch.long)).shape
    torch.Size([2, 6, 9])
    """

    def __init__(
        self, setting: CollapseSetting, architecture: Architecture, characters: int
    ) -> None:
        super().__init__()
        width = setting.trained_width
        self.characters = nn.Embedding(characters + 1, width)  # the last one is what hides
        self.places = nn.Parameter(torch.randn(setting.tokens, width))
        blocks = (
            MixingBlock(width, setting.tokens, architecture, mlp=True)
            for _ in range(setting.trained_depth)
        )
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width) if architecture.norm == "pre" else nn.Identity()
        self.out = nn.Linear(width, characters)

    def enter(self, ids: Tensor) -> Tensor:
        """(samples, tokens, width): what the first block gets."""
        found: Tensor = (self.characters(ids) + self.places) / 2**0.5
        return found

    def forward(self, ids: Tensor) -> Tensor:
        """(samples, tokens, characters): scores for the character at each place."""
        found: Tensor = self.out(self.norm(self.blocks(self.enter(ids))))
        return found
