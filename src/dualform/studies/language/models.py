"""The study's models: an LSTM as the paper has it, and a small transformer."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

State: TypeAlias = tuple[Tensor, Tensor]
"""What an LSTM carries from one window to the next."""


class RecurrentLanguageModel(nn.Module):
    """Tokens, a linear map to the LSTM's width if they are narrower, the LSTM, and an output layer.

    >>> model = RecurrentLanguageModel(words=7, embedding=3, units=4)
    >>> logits, state = model(torch.zeros(2, 5, dtype=torch.long), model.rested(2))
    >>> logits.shape, model(torch.zeros(2, 5, dtype=torch.long)).shape, state[0].shape
    (torch.Size([2, 5, 7]), torch.Size([2, 5, 7]), torch.Size([1, 2, 4]))
    """

    def __init__(self, words: int, embedding: int | None, units: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, embedding or units)
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)
        self.dropout = nn.Dropout(dropout)
        self.adapt = nn.Identity() if embedding is None else nn.Linear(embedding, units)
        self.lstm = nn.LSTM(units, units, batch_first=True)
        self.head = nn.Linear(units, words)

    def forward(self, x: Tensor, state: State | None = None) -> Tensor | tuple[Tensor, State]:
        """(samples, tokens, words), and the state after the last token if one is given."""
        hidden, after = self.lstm(self.adapt(self.dropout(self.embed(x))), state)
        logits: Tensor = self.head(hidden)
        return logits if state is None else (logits, after)

    def rested(self, samples: int) -> State:
        """The state before the first token of a text."""
        zeros = self.head.weight.new_zeros(1, samples, self.lstm.hidden_size)
        return zeros, zeros.clone()


class CausalBlock(nn.Module):
    """Causal attention and a feed-forward network, each behind a norm and around it a shortcut.

    >>> CausalBlock(width=8, heads=2)(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attend, self.norm_think = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # a bias of keys would have no gradient
        self.mix = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens, width)."""
        parts = self.qkv(self.norm_attend(x)).unflatten(2, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        found: Tensor = x + self.down(gelu(self.up(self.norm_think(x))))
        return found


class TransformerLanguageModel(nn.Module):
    """Tokens with positions, blocks, and an output layer.

    >>> model = TransformerLanguageModel(words=7, length=6, width=8, heads=2, blocks=1)
    >>> model(torch.zeros(2, 5, dtype=torch.long)).shape
    torch.Size([2, 5, 7])
    """

    def __init__(self, words: int, length: int, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(CausalBlock(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens, words)."""
        places = torch.arange(x.shape[1], device=x.device).expand_as(x)
        hidden = self.blocks(self.embed(x) + self.place(places))
        logits: Tensor = self.head(self.norm(hidden))
        return logits
