"""The networks of the tasks, written with modules that every peer can take apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.attribution.data import VOCABULARY, WINDOW


def mlp() -> nn.Module:
    """784-128-64-10."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def cnn() -> nn.Module:
    """Two convolutions with strides, two linear layers: 57,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(800, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class Block(nn.Module):
    """Causal attention of one head and an MLP, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)
        self.v, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        scores = self.q(y) @ self.k(y).mT / x.shape[-1] ** 0.5
        future = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).triu(1)
        x = x + self.out(scores.masked_fill(future, -1e9).softmax(-1) @ self.v(y))
        return x + self.down(torch.relu(self.up(self.second(x))))


class Transformer(nn.Module):
    """Words to the words that follow: embeddings of 48, one block, a linear layer."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(WINDOW, width)
        self.block = Block(width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, words: Tensor) -> Tensor:
        places = torch.arange(words.shape[-1], device=words.device)
        return self.head(self.norm(self.block(self.words(words) + self.places(places))))
