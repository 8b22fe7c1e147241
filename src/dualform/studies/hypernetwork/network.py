"""The networks: small transformers that differ in what attention makes of scores and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dualform.attention import MultiheadAttention, latent_codes
from dualform.errors import EvaluationError

WIDER = 2
"""So many times wider than tokens an MLP is inside."""


def read_by_codes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    scores: str = "dot",
    offset: int = 0,
    dropout_p: float = 0.0,
) -> Tensor:
    """y_h = Σ_k a_hqk v_hk: the scores of `hyper`, each head reading its own values.

    >>> q, k, v = torch.randn(3, 2, 5, 8).unbind()
    >>> torch.allclose(read_by_codes(q, k, v), q @ k.mT / 8**0.5 @ v, atol=1e-5)
    True
    """
    a = latent_codes(q, k, attn_mask, is_causal, scale, scores=scores, offset=offset)
    return nn.functional.dropout(a, dropout_p, training=dropout_p > 0) @ v


LAYERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "linear": (read_by_codes, {"scores": "dot"}),
    "linear, RMS": (read_by_codes, {"scores": "rms"}),
    "HYLA": ("hyper", {"scores": "rms", "activation": "relu"}),
    "HYLA, no ReLU": ("hyper", {"scores": "rms", "activation": "linear"}),
    "HYLA, no RMS": ("hyper", {"scores": "dot", "activation": "relu"}),
    "HYLA, softmax": ("hyper", {"scores": "softmax", "activation": "relu"}),
}
"""Each layer of the study: its kind, and its options. Those after HYLA are its ablations, as is
linear attention with RMS: HYLA's scores without its value network."""


class RuleReader(nn.Module):
    """Blocks of attention and an MLP, with norms before them; the last tokens answer.

    Without `places` it cannot tell in which order tokens are.

    >>> RuleReader((18, 8, 2, 8), "HYLA", width=16, heads=4, depth=1)(torch.zeros(3, 18, 8)).shape
    torch.Size([3, 2, 8])
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        layer: str,
        width: int,
        heads: int,
        depth: int,
        places: bool = True,
    ) -> None:
        super().__init__()
        require_layer(layer)
        kind, options = LAYERS[layer]
        tokens, inputs, self.asked, answers = shape
        self.enter = nn.Linear(inputs, width)
        self.places = nn.Parameter(torch.randn(tokens, width) * 0.5) if places else None
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            block = nn.TransformerEncoderLayer(
                width, heads, WIDER * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            block.self_attn = MultiheadAttention(
                width, heads, batch_first=True, kind=kind, **options
            )
            self.blocks.append(block)
        self.norm, self.leave = nn.LayerNorm(width), nn.Linear(width, answers)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, asked, numbers of an answer) of (batch, tokens, numbers of a token)."""
        h = self.enter(x)
        h = h if self.places is None else h + self.places
        for block in self.blocks:
            h = block(h)
        answers: Tensor = self.leave(self.norm(h[:, -self.asked :]))
        return answers


def require_layer(name: str) -> None:
    """Raises unless a name is in `LAYERS`.

    >>> require_layer("HYLA")
    """
    if name not in LAYERS:
        known = ", ".join(map(repr, LAYERS))
        raise EvaluationError(f"layer='{name}' is not in this study; it has {known}.")
