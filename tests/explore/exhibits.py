"""Small runs to explore: digits, digits through a convolution, and words; SGD, seconds to train."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dualform
from dualform.demo import load_digits
from dualform.explore import Exhibit, Query
from dualform.ledger import Preview

HOSTILE = "</script><img src=x onerror=alert(1)>"
WORDS = "a film that was never dull and I loved it or so very slow cold hated bad long".split()
LIKED = {"loved", "never", "very"}
LENGTH = 6


def digits(folder: Path, samples: int = 160, epochs: int = 5, queries: int = 40) -> Exhibit:
    """Handwritten digits, a few of which are labeled wrongly, and a network 64-24-10."""
    torch.manual_seed(0)
    train, test = load_digits()
    x, y = train.x[:samples], train.y[:samples].clone()
    y[:4] = (y[:4] + 1) % 10
    model = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
    pictures = _pixels(x)
    _record(folder, model, x, y, epochs, lr=0.3, labels=y.tolist(), previews=pictures)
    shown = _digit_queries(test.x[:queries], test.y[:queries])
    return Exhibit(dualform.open(folder), model, test.x[:queries], shown)


def patches(folder: Path, samples: int = 60, epochs: int = 3, queries: int = 4) -> Exhibit:
    """The same digits through a convolution: its rows are patches of 3 × 3 pixels."""
    torch.manual_seed(0)
    train, test = load_digits()
    x, y = train.x[:samples].reshape(-1, 1, 8, 8), train.y[:samples]
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)
    )
    _record(folder, model, x, y, epochs, lr=0.1, labels=y.tolist(), previews=_pixels(x))
    asked = test.x[:queries]
    shown = _digit_queries(asked, test.y[:queries])
    return Exhibit(dualform.open(folder), model, asked.reshape(-1, 1, 8, 8), shown)


class Bag(nn.Module):
    """Words one by one through two layers, then their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(WORDS), 8)
        self.hidden, self.out = nn.Linear(8, 12), nn.Linear(12, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(self.embedding(words))).mean(1))


def words(folder: Path, samples: int = 48, epochs: int = 6, queries: int = 5) -> Exhibit:
    """Sentences of six words; those that are not liked have a hostile label."""
    torch.manual_seed(0)
    tokens = torch.randint(0, len(WORDS), (samples + queries, LENGTH))
    texts = [" ".join(WORDS[word] for word in row) for row in tokens.tolist()]
    liked = torch.tensor([bool(LIKED & set(text.split())) for text in texts])
    labels = ["liked" if one else HOSTILE for one in liked.tolist()]
    model = Bag()
    _record(
        folder,
        model,
        tokens[:samples],
        liked[:samples].long(),
        epochs,
        lr=0.5,
        labels=labels[:samples],
        previews=texts[:samples],
    )
    shown = [Query(t, la, Preview("text", t)) for t, la in zip(texts, labels, strict=True)]
    return Exhibit(dualform.open(folder), model, tokens[samples:], shown[samples:], encode=_encoded)


def _encoded(preview: Preview) -> Tensor:
    """The first six words; what is not a word of the run is its first."""
    known = [WORDS.index(word) if word in WORDS else 0 for word in str(preview.data).split()]
    return torch.tensor([(known + [0] * LENGTH)[:LENGTH]])


def _record(
    folder: Path,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    epochs: int,
    lr: float,
    labels: Sequence[int] | Sequence[str],
    previews: Sequence[str] | Tensor,
) -> None:
    """Trains by SGD, recording every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with dualform.record(model, optimizer, folder) as recorder:
        recorder.describe(range(len(x)), labels, previews)
        for ids in (ids for _ in range(epochs) for ids in torch.randperm(len(x)).split(16)):
            recorder.samples(ids)
            F.cross_entropy(model(x[ids]), y[ids]).backward()
            optimizer.step()
            optimizer.zero_grad()


def _pixels(x: Tensor) -> Tensor:
    return (x.reshape(-1, 8, 8) * 255).round().to(torch.uint8)


def _digit_queries(x: Tensor, y: Tensor) -> list[Query]:
    pictures = _pixels(x)
    return [
        Query(f"test digit {at}", int(label), Preview("image", pictures[at]))
        for at, label in enumerate(y)
    ]
